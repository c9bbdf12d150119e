"""Errors of policies that cannot be built.

PolicyError
├── MalformedPolicy        the file is at fault
└── UnreadablePolicy       this machine is

Every error carries `code`, a stable identifier.
"""

from __future__ import annotations

MAX_MESSAGE = 1000
"""Characters of an error's message, part of which may be a stranger's text."""


class PolicyError(Exception):
    """Base of the two below; `code` is stable across releases."""

    code = "policy_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message[:MAX_MESSAGE])
        if code is not None:
            self.code = code


class MalformedPolicy(PolicyError):
    """The file is not a policy this version builds: its maker is at fault, or this node is outdated.

    Codes: not_safetensors, oversized_header, wrong_metadata, bad_config, unsupported_model, bad_tokenizer,
    wrong_tensors, broken_model; of a model's folder also bad_weights and bad_chat_template.
    """

    code = "malformed_policy"


class UnreadablePolicy(PolicyError):
    """This machine could not read the file."""

    code = "unreadable"
