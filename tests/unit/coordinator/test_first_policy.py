"""A run whose rules cannot work with its first policy is refused before it is signed.

What would break for whom: rules are fixed with a run's first log entry, so an operator who learns of it from the
trainer, or from workers that are refused, starts all over with a new key.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from coordinator.errors import Uncalibrated, UnfitModel
from coordinator.run.first_policy import require_fit, startable
from coordinator.training.initial import initial_policy
from node.cli import main
from node.doctor import model as doctor_model
from node.keys.identity import create_key
from node.policy.file import reply_ids
from node.policy.inspection import FirstPolicy
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.chat_formats import CHAT_FORMATS
from node.protocol.run import EnvironmentSpec, LoraSpec, RunSpec, ThinkingSpec
from node.protocol.submission import Rollout, chunk_sizes, proof_bytes
from node.submission.writer import full_group_bytes, write_rollouts

SPEC = RunSpec(name="first", environments=(EnvironmentSpec(name="arithmetic"),))
QWEN = FirstPolicy(family="qwen3", hidden=1024, positions=4096, parameters=600_000_000, largest_layer=155_582_464)


def changed(section: str, **values: object) -> RunSpec:
    return msgspec.structs.replace(SPEC, **{section: msgspec.structs.replace(getattr(SPEC, section), **values)})


UNFIT = {
    "longer_than_the_positions": (changed("sampling", max_new_tokens=4096), "4224 tokens .* positions for 4096"),
    "longer_with_the_replies": (
        changed("sampling", max_prompt_tokens=2048, max_new_tokens=1920, max_turns=2, max_reply_tokens=129),
        r"4097 tokens .* \+ max_reply_tokens 129\)",
    ),
    "more_activations_than_hidden_units": (changed("proofs", top_k=1025), "1025 hidden units .* has 1024"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_run_that_its_policy_cannot_serve_is_refused(case: str) -> None:
    spec, said = UNFIT[case]
    with pytest.raises(UnfitModel, match=said):
        require_fit(QWEN, spec)


@pytest.mark.parametrize("initial", ["finch", "random-goldfinch"])
def test_adapters_of_layers_that_the_family_lacks_are_refused_before_the_rules_are_fixed(initial: str) -> None:
    """The trainer alone would find it, with the run's id given to everybody."""
    spec = changed("training", lora=LoraSpec(rank=8, alpha=16.0, targets=("q_proj", "up_proj")))
    fixed = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, initial=initial))
    with pytest.raises(UnfitModel, match=r"finch policy does not have: q_proj, up_proj\. Leave \[training\.lora\] out"):
        startable(fixed, model_elsewhere=False, uncalibrated=True)
    startable(spec, model_elsewhere=False, uncalibrated=True)


def test_a_run_whose_marks_full_width_text_can_forge_is_refused() -> None:
    """A reply's full-width <|im_end|> is no mark that could be broken, and a normalizer makes one of it."""
    forgeable = msgspec.structs.replace(QWEN, normalized_tokens=("<|im_end|>", "<other>"))
    with pytest.raises(
        UnfitModel, match=r"other characters, too \(normalized\): <\|im_end\|>\. Set normalized to false"
    ):
        require_fit(forgeable, changed("sampling", chat=CHAT_FORMATS["chatml"]))
    capital = msgspec.structs.replace(QWEN, normalized_tokens=("<|IM_END|>",))
    with pytest.raises(UnfitModel, match=r"other characters, too \(normalized\): <\|im_end\|>"):
        require_fit(capital, changed("sampling", chat=CHAT_FORMATS["chatml"]))
    require_fit(forgeable, changed("sampling", chat=CHAT_FORMATS["plain"]))
    require_fit(forgeable, SPEC)


def test_the_longest_sequence_that_the_positions_allow_is_allowed() -> None:
    """Replies of the environment count only where there is a second turn."""
    require_fit(QWEN, changed("sampling", max_prompt_tokens=2048, max_new_tokens=2048, max_reply_tokens=2**20))
    recurrent = msgspec.structs.replace(QWEN, positions=None)
    require_fit(recurrent, changed("sampling", max_new_tokens=2**20))


def test_a_tiny_policy_of_512_positions_begins_no_run_of_4496_tokens() -> None:
    spec = changed("sampling", max_prompt_tokens=400, max_new_tokens=4096)
    for begin in (lambda: startable(spec, model_elsewhere=False, uncalibrated=True), lambda: initial_policy(spec)):
        with pytest.raises(UnfitModel, match=r"4496 tokens .* positions for 512"):
            begin()


def test_a_budget_behind_which_the_end_of_a_thought_never_fits_begins_no_run() -> None:
    """Nobody's thoughts would be ended, and the operator would look for the reason in the policy."""
    most = SPEC.sampling.max_new_tokens - len(reply_ids(make_tokenizer(), "</think>"))
    for initial in ("random-tiny", "random-finch"):
        for tokens in (most - 1, most):
            thinking = ThinkingSpec(tokens=tokens, end="</think>")
            spec = changed("model", initial=initial)
            spec = msgspec.structs.replace(spec, environments=(EnvironmentSpec(name="arithmetic", thinking=thinking),))
            if tokens < most:
                initial_policy(spec)
                continue
            with pytest.raises(UnfitModel, match=rf"a thought of {most} tokens and the \d+ of its end leave nothing"):
                initial_policy(spec)


@pytest.mark.parametrize(("rank", "kl"), [(8, 0.0), (1024, 0.01)])
def test_a_trainer_of_adapters_needs_the_frozen_weights_and_what_the_adapters_take(
    rank: int, kl: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At a high rank they are most of it, and were not counted."""
    policy = msgspec.structs.replace(QWEN, projections={"q_proj": 28 * (1024 + 2048), "o_proj": 28 * (2048 + 1024)})
    need = 4 * QWEN.parameters + 16 * rank * 28 * (1024 + 2048) + 4 * QWEN.largest_layer
    spec = changed("training", lora=LoraSpec(rank=rank, alpha=16.0, targets=("q_proj",)), kl_coefficient=kl)
    monkeypatch.setattr(doctor_model, "free_memory", lambda: need)
    require_fit(policy, spec)
    assert not caplog.records
    monkeypatch.setattr(doctor_model, "free_memory", lambda: need - 1)
    require_fit(policy, spec)
    assert f"16 for each of the adapters' {rank * 28 * 3072:,}" in caplog.text


@pytest.mark.parametrize(("kl", "bytes_each"), [(0.0, 16), (0.01, 20)])
def test_a_trainer_that_will_not_fit_into_memory_is_a_warning_with_figures(
    kl: float, bytes_each: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need = bytes_each * QWEN.parameters + 4 * QWEN.largest_layer
    spec = changed("training", kl_coefficient=kl)
    monkeypatch.setattr(doctor_model, "free_memory", lambda: need)
    require_fit(QWEN, spec)
    assert not caplog.records
    monkeypatch.setattr(doctor_model, "free_memory", lambda: need - 1)
    require_fit(QWEN, spec)
    assert f"{bytes_each} bytes for each of 600,000,000 parameters" in caplog.text


SIZES = {
    "defaults": SPEC,
    "one_long_turn": changed("sampling", group_size=2, max_new_tokens=4000, max_prompt_tokens=2000),
    "many_turns_and_segments": changed("sampling", group_size=2, max_turns=64, max_version_lead=16),
    "sketches_alone": changed("proofs", scheme="sketch/1", chunk_tokens=7),
    "toploc_alone": changed("proofs", scheme="toploc/1", chunk_tokens=1),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_largest_honest_group_fits_and_the_bound_is_not_far_above(case: str) -> None:
    """An operator who sets `max_submission_bytes` to what is asked for loses no honest group, and wastes little."""
    body, most = write_rollouts(largest_group(SIZES[case])), full_group_bytes(SIZES[case])
    assert 0.85 * most < len(body) <= most


def largest_group(spec: RunSpec) -> list[Rollout]:
    """As many tokens, segments and turns as the run allows, with numbers that do not compress."""
    rng, sampling = random.Random(1), spec.sampling
    tokens, segments = sampling.max_new_tokens, sampling.max_version_lead + 1
    cuts = min(tokens, segments + sampling.max_turns - 1)
    pieces = [1] * (cuts - 1) + [tokens - cuts + 1]
    sizes = chunk_sizes(pieces, chunk_tokens=spec.proofs.chunk_tokens)
    return [
        Rollout(
            seed=rng.randbytes(16),
            prompt_ids=[rng.randrange(-(2**31), 2**31) for _ in range(sampling.max_prompt_tokens)],
            completion_ids=[rng.randrange(-(2**31), 2**31) for _ in range(tokens)],
            logprobs=[-rng.random() for _ in range(tokens)],
            segment_versions=[rng.randrange(2**62) for _ in range(segments)],
            segment_tokens=[rng.randrange(2**31) for _ in range(segments)],
            proofs=[rng.randbytes(proof_bytes(spec.proofs, tokens=size)) for size in sizes],
        )
        for _ in range(sampling.group_size)
    ]


def test_a_run_whose_full_groups_are_larger_than_a_submission_is_refused() -> None:
    need = full_group_bytes(SPEC)
    startable(changed("limits", max_submission_bytes=need), model_elsewhere=False, uncalibrated=True)
    with pytest.raises(UnfitModel, match=f"up to {need} bytes.*Raise it to {need}"):
        startable(changed("limits", max_submission_bytes=need - 1), model_elsewhere=True, uncalibrated=True)


# -- swarmproof coordinator --check


def check(folder: Path, text: str, *arguments: str) -> Result:
    (folder / "run.toml").write_text(f'name = "checked"\n\n[[environments]]\nname = "arithmetic"\n\n{text}')
    if not (folder / "run.key").exists():
        create_key(folder / "run.key")
    return coordinator(folder, "--check", *arguments)


def coordinator(folder: Path, *arguments: str) -> Result:
    files = ("--run", folder / "run.toml", "--key", folder / "run.key", "--data", folder / "run")
    return CliRunner(env={"COLUMNS": "500"}).invoke(main, ["coordinator", *map(str, files), *arguments])


def test_a_check_says_what_it_found_and_creates_nothing(tmp_path: Path) -> None:
    done = check(tmp_path, "", "--uncalibrated")
    assert done.exit_code == 0, done.output
    assert "'checked'" in done.output
    assert "Sequences have up to 176 tokens" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"run.toml", "run.key"}


FAULTS = {
    "positions": ("[sampling]\nmax_prompt_tokens = 400\nmax_new_tokens = 4096\n", "positions for 512"),
    "submission_size": ("[limits]\nmax_submission_bytes = 2000\n", "max_submission_bytes is 2000"),
    "unknown_key": ("[limits]\nmagic = 1\n", "there is no key 'magic' in [limits]"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_check_ends_with_2_and_names_the_fault(case: str, tmp_path: Path) -> None:
    text, said = FAULTS[case]
    done = check(tmp_path, text)
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert not (tmp_path / "run").exists()


def test_rules_without_levels_begin_no_run_unasked(tmp_path: Path) -> None:
    """Limits cannot change later: whoever forgot to calibrate would have to begin anew, with other participants."""
    with pytest.raises(Uncalibrated, match="no levels of honest work"):
        startable(SPEC, model_elsewhere=False, uncalibrated=False)
    level = "[limits.honest.margin]\nmean = 0\nvariance = 1\nlargest = 1\n"
    assert check(tmp_path, level).exit_code == 0
    done = check(tmp_path, "")
    assert (done.exit_code, "cannot change once it has begun" in done.output) == (2, True), done.output


def test_an_address_that_nobody_could_call_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for option, value in (("--endpoint", "foo"), ("--introduce", "foo"), ("--peer-address", "foo")):
        check(tmp_path, "")
        done = coordinator(tmp_path, option, value)
        assert (done.exit_code, option in done.stderr) == (2, True), done.output
    assert {path.name for path in tmp_path.iterdir()} == {"run.toml", "run.key"}


def test_a_key_that_others_can_read_or_that_is_missing_is_a_problem(tmp_path: Path) -> None:
    check(tmp_path, "")
    (tmp_path / "run.key").chmod(0o644)
    assert check(tmp_path, "").exit_code == 2
    done = check(tmp_path, "", "--key", str(tmp_path / "other.key"))
    assert (done.exit_code, "other.key" in done.output) == (2, True)
    assert not (tmp_path / "other.key").exists()
