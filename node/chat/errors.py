"""What can go wrong with chats.

ChatError
├── NotText            a message holds an image, audio, or nothing that a text model can read
├── Unrenderable       the format has no place for something in a conversation
└── Irreducible        a chat template that is no data: the reason says where
"""

from __future__ import annotations

from node.errors import NodeError


class ChatError(NodeError):
    """Base of this package's errors."""

    code = "bad_chat"


class NotText(ChatError):
    """A message holds an image, audio, or nothing a text model can read."""

    code = "not_text"


class Unrenderable(ChatError):
    """A conversation that the format cannot express; templates would raise, or leave something out."""

    code = "unrenderable_chat"


class Irreducible(ChatError):
    """A chat template that cannot be reduced to data."""

    code = "irreducible_template"
