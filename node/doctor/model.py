"""Checks of a run's first policy (`model.initial`), and of run.toml against it; nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from node.chat.render import folded
from node.doctor.machine import free_memory
from node.doctor.report import Check, fine, problem, size, warning
from node.policy.errors import PolicyError
from node.policy.inspection import FirstPolicy, inspect_folder, tiny_policy
from node.protocol.chat import ChatFormat
from node.protocol.run import LoraSpec, RunSpec, TeacherSpec
from node.submission.writer import full_group_bytes

_WEIGHT_BYTES: Final = 4
"""Of a parameter, trained or not, in float32."""
_TRAINED_BYTES: Final = 12
"""Of a parameter that is trained, further: its gradient and AdamW's two moments."""
_REFERENCE_BYTES: Final = 4
"""Of a parameter: the first policy, kept where `kl_coefficient` is not 0, and a teacher."""


def check_first_policy(spec: RunSpec) -> list[Check]:
    """Check that `model.initial` is a policy that every node can build, and that the run can begin with it."""
    tiny = tiny_policy(spec.model.initial)
    if tiny is None:
        return check_folder(Path(spec.model.initial), spec)
    return [fine("model", f"model.initial is a {tiny.family} policy that is made here."), *_check_rules(tiny, spec)]


def check_folder(folder: Path, spec: RunSpec | None) -> list[Check]:
    """Check that `folder` can be a policy, and where there is a `spec`, that its run can begin with it."""
    try:
        policy = inspect_folder(folder)
    except PolicyError as error:
        return [problem("model", f"{error}.", advice="Mend the folder, or name another one.")]
    ends = ", ".join(map(str, policy.end_marks))
    template = "a" if policy.has_chat_template else "no"
    said = (
        f"{folder} is a {policy.family} policy of {policy.parameters:,} parameters ({size(policy.weight_bytes)}), "
        f"vocabulary {policy.vocabulary}, end marks {ends}, with {template} chat template."
    )
    return [fine("model", said), *([] if spec is None else _check_rules(policy, spec))]


def _check_rules(policy: FirstPolicy, spec: RunSpec) -> list[Check]:
    """Check run.toml, this machine's memory and the run's teacher, if it has one, against `policy`."""
    if not isinstance(spec.training.teacher, TeacherSpec):
        return check_fit(policy, spec)
    try:
        teacher = inspect_folder(Path(spec.training.teacher.folder))
    except PolicyError as error:
        said = f"training.teacher.folder: {error}."
        return [problem("teacher", said, advice="Mend the folder, or name another one."), *check_fit(policy, spec)]
    return [_check_teacher(teacher, policy, spec), *check_fit(policy, spec, teacher=teacher)]


def check_fit(policy: FirstPolicy, spec: RunSpec, *, teacher: FirstPolicy | None = None) -> list[Check]:
    """Check run.toml and this machine's memory against `policy`, and the memory of a `teacher` beside it."""
    checks = [_check_positions(policy, spec), _check_hidden(policy, spec), *_check_marks(policy, spec)]
    checks += _check_adapters(policy, spec)
    return [*checks, _check_trainer_memory(policy, spec, teacher)] if policy.parameters else checks


def check_submission_size(spec: RunSpec) -> Check:
    """Check that a full group of honest work is never larger than a submission may be."""
    need, allowed, sampling = full_group_bytes(spec), spec.limits.max_submission_bytes, spec.sampling
    said = (
        f"A full group ({sampling.group_size} completions of {sampling.max_new_tokens} tokens with their proofs) takes "
        f"up to {need} bytes, and limits.max_submission_bytes is {allowed}."
    )
    if need > allowed:
        return problem("submissions", said, advice=f"Raise it to {need} in run.toml, or make groups smaller.")
    return fine("submissions", said)


def _check_positions(policy: FirstPolicy, spec: RunSpec) -> Check:
    sampling = spec.sampling
    terms = f"max_prompt_tokens {sampling.max_prompt_tokens} + max_new_tokens {sampling.max_new_tokens}"
    if sampling.reply_tokens:
        terms += f" + max_reply_tokens {sampling.reply_tokens}"
    has = "no limit" if policy.positions is None else f"positions for {policy.positions} (max_position_embeddings)"
    said = f"Sequences have up to {sampling.most_tokens} tokens (sampling.{terms}), and the policy has {has}."
    if policy.positions is not None and sampling.most_tokens > policy.positions:
        return problem("sequences", said, advice="Lower those of [sampling] in run.toml, or take another policy.")
    return fine("sequences", said)


def _check_hidden(policy: FirstPolicy, spec: RunSpec) -> Check:
    need = spec.proofs.min_hidden
    said = f"Proofs need {need} hidden units (proofs.top_k, proofs.scheme), and the policy has {policy.hidden}."
    if policy.hidden < need:
        return problem("proofs", said, advice="Lower proofs.top_k in run.toml, or take another policy.")
    return fine("proofs", said)


def _check_marks(policy: FirstPolicy, spec: RunSpec) -> list[Check]:
    """Report the marks of the run's chat format that the tokenizer makes of other characters, too.

    Breaking marks in replies finds their own characters alone, so that full-width or capital ones would forge a turn.
    """
    chat = spec.sampling.chat
    marks = chat.marks if isinstance(chat, ChatFormat) else ()
    normalized = set(map(folded, policy.normalized_tokens))
    forgeable = ", ".join(mark for mark in sorted(marks) if folded(mark) in normalized)
    if not forgeable:
        return []
    said = f"The tokenizer makes marks of the chat format of other characters, too (normalized): {forgeable}."
    return [problem("chat_marks", said, advice="Set normalized to false for them in tokenizer.json.")]


def _check_adapters(policy: FirstPolicy, spec: RunSpec) -> list[Check]:
    lora = spec.training.lora
    if not isinstance(lora, LoraSpec):
        return []
    missing = [target for target in lora.targets if target not in policy.projections]
    if not missing:
        return [fine("adapters", f"The policy has the layers of training.lora.targets: {', '.join(lora.targets)}.")]
    said = f"training.lora.targets names layers that a {policy.family} policy does not have: {', '.join(missing)}."
    return [problem("adapters", said, advice="Leave [training.lora] out, or take a policy with attention.")]


def _check_teacher(teacher: FirstPolicy, policy: FirstPolicy, spec: RunSpec) -> Check:
    """Compare the run's teacher with its policy; a tiny one's vocabulary is compared by the trainer alone."""
    faults = []
    if policy.vocabulary_digest not in ("", teacher.vocabulary_digest):
        faults.append("has another vocabulary than the policy")
    if teacher.vocabulary < policy.vocabulary:
        faults.append("has fewer rows in its embedding than the policy")
    if teacher.positions is not None and teacher.positions < spec.sampling.most_tokens:
        faults.append(f"has positions for {teacher.positions} of {spec.sampling.most_tokens} tokens")
    if bool(teacher.projections) != bool(policy.projections):
        faults.append("is recurrent, or the policy is, and not both")
    said = f"The teacher, a {teacher.family} model of {teacher.parameters:,} parameters, "
    if faults:
        advice = "Take a teacher that was made with the policy's tokenizer, or leave [training.teacher] out."
        return problem("teacher", f"{said}{', and '.join(faults)}.", advice=advice)
    return fine("teacher", f"{said}has the policy's vocabulary.")


def _check_trainer_memory(policy: FirstPolicy, spec: RunSpec, teacher: FirstPolicy | None) -> Check:
    """Compare what a trainer of one process holds at least; activations and logits come on top."""
    lora, weights = spec.training.lora, policy.parameters
    if isinstance(lora, LoraSpec):  # the reference is the frozen weights
        trained = lora.parameters(policy.projections)
        held = _WEIGHT_BYTES * weights + (_WEIGHT_BYTES + _TRAINED_BYTES) * trained
        counted = (
            f"{_WEIGHT_BYTES} bytes for each of {weights:,} parameters, {_WEIGHT_BYTES + _TRAINED_BYTES} for each of "
        )
        counted += f"the adapters' {trained:,}"
    else:
        each = _WEIGHT_BYTES + _TRAINED_BYTES + (_REFERENCE_BYTES if spec.training.kl_coefficient else 0)
        held, counted = each * weights, f"{each} bytes for each of {weights:,} parameters"
    need, free = held + _WEIGHT_BYTES * policy.largest_layer, free_memory()
    taught = ""
    if teacher is not None:
        need += _REFERENCE_BYTES * teacher.parameters
        taught = f", {_REFERENCE_BYTES} bytes for each of its teacher's {teacher.parameters:,}"
    said = (
        f"A trainer in one process takes {size(need)} of memory at least ({counted}, and its largest layer again"
        f"{taught}), and {size(free)} are free here."
    )
    if free < need:
        return warning(
            "trainer_memory",
            said,
            advice="Train on a larger machine, or in several processes (torchrun) that share it.",
        )
    return fine("trainer_memory", said)
