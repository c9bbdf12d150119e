"""Supervised fine-tuning of a model's folder before a run: `swarmproof sft`."""
