"""The trainer: GRPO on admitted groups, checkpoints and export."""
