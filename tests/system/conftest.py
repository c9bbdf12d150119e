"""Processes that begin as forks, and images, where a test asks for them: support/zygote.py, support/built_images.py."""

from built_images import images  # noqa: F401  (fixture)
from zygote import forked_commands, forked_vllm, forked_vllm_commands, vllm_zygote, zygote  # noqa: F401  (fixtures)
