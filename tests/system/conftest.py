"""Processes that begin as forks, where a test asks for them: see support/zygote.py."""

from zygote import forked_commands, forked_vllm, vllm_zygote, zygote  # noqa: F401  (fixtures)
