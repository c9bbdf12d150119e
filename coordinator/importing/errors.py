"""Errors of weights that cannot be imported.

ImportFault
├── UnreadableCheckpoint   the file is not one of torch.save with a dictionary of tensors, or is damaged
├── UnsupportedWeights     its tensors are those of no model that this version builds
└── BadVocabulary          the file with the tokenizer's vocabulary is not one
"""

from __future__ import annotations

from coordinator.errors import CoordinatorError

MAX_MESSAGE = 1000
"""Characters of a message, part of which may be a stranger's text."""


class ImportFault(CoordinatorError):
    code = "import_fault"

    def __init__(self, message: str) -> None:
        super().__init__(message[:MAX_MESSAGE])


class UnreadableCheckpoint(ImportFault):
    code = "unreadable_checkpoint"


class UnsupportedWeights(ImportFault):
    code = "unsupported_weights"


class BadVocabulary(ImportFault):
    code = "bad_vocabulary"
