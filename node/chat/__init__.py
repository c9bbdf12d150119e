"""Conversations as text, by a chat format that is data (docs/chat.md)."""
