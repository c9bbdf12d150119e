"""What turns prompts into proved completions: one interface, one file per engine."""

from node.engines.base import BadRequest, BrokenPolicy, Engine, EngineError, Interrupted, NoPolicy, SampleRequest

__all__ = ["BadRequest", "BrokenPolicy", "Engine", "EngineError", "Interrupted", "NoPolicy", "SampleRequest"]
