"""Environments that run in an interpreter and a process of their own, and are believed no further than their lines."""

from __future__ import annotations

from node.environments.isolated.environment import Isolated, IsolatedConversation, load_isolated

__all__ = ["Isolated", "IsolatedConversation", "load_isolated"]
