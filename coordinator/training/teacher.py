"""The teacher of `[training.teacher]`: a frozen model whose log-probabilities of what workers drew the policy nears.

Its folder is read once, into the trainer's state folder, where every process loads its part. Policy and teacher need
the same vocabulary, since a token's id is what both are asked for.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from coordinator.errors import UnfitModel
from coordinator.training.world import World
from node.policy.config import longest_sequence
from node.policy.errors import MalformedPolicy
from node.policy.file import Policy, load_policy, write_policy
from node.policy.folder import open_folder
from node.policy.models.base import RecurrentForCausalLM
from node.policy.tokenizer import vocabulary_digest
from node.protocol.run import RunSpec, TeacherSpec

TEACHER = "teacher.safetensors"


def write_teacher(spec: RunSpec, state: Path) -> None:
    """Write the run's teacher to the state folder unless it is there, or there is none; raises UnfitModel, OSError."""
    teacher, path = spec.training.teacher, state / TEACHER
    if not isinstance(teacher, TeacherSpec) or path.exists():
        return
    try:
        found = open_folder(Path(teacher.folder))
    except (MalformedPolicy, OSError) as error:
        raise UnfitModel(f"training.teacher.folder: {error}") from error
    write_policy(found.source(), path, dtype=found.dtype)


def load_teacher(path: Path, *, policy: Policy, spec: RunSpec, world: World) -> PreTrainedModel:
    """Load the teacher in float32, shared out and frozen.

    Every process of `world` must call it. Raises UnfitModel if it cannot teach `policy`; PolicyError, OSError.
    """
    teacher = load_policy(path, dtype=torch.float32, shards=world)
    positions = longest_sequence(teacher.config)
    recurrent = [isinstance(each.model, RecurrentForCausalLM) for each in (policy, teacher)]
    if vocabulary_digest(teacher.tokenizer) != vocabulary_digest(policy.tokenizer):
        raise UnfitModel("training.teacher.folder: its tokenizer has another vocabulary than the policy's")
    if teacher.config.vocab_size < policy.config.vocab_size:
        raise UnfitModel("training.teacher.folder: its embedding has fewer rows than the policy's, which may draw any")
    if positions is not None and positions < spec.sampling.most_tokens:
        raise UnfitModel(f"training.teacher.folder: {positions} positions, for {spec.sampling.most_tokens} tokens")
    if len(set(recurrent)) > 1:
        raise UnfitModel("training.teacher.folder: of policy and teacher one is recurrent, the other is not")
    return teacher.model.requires_grad_(False)
