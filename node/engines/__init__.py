"""Engines that turn prompts into proved completions, a file each."""

from node.engines.base import BadRequest, BrokenPolicy, Engine, EngineError, Interrupted, NoPolicy, SampleRequest

__all__ = ["BadRequest", "BrokenPolicy", "Engine", "EngineError", "Interrupted", "NoPolicy", "SampleRequest"]
