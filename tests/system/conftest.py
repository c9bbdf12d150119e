"""Processes that begin as forks, where a test asks for them: see support/zygote.py."""

from zygote import (  # noqa: F401  (fixtures)
    forked_commands,
    forked_environments,
    forked_vllm,
    forked_vllm_command,
    vllm_zygote,
    zygote,
)
