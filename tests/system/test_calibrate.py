"""`swarmproof calibrate` on a policy of its own: from a run.toml to limits that honest work keeps and cheats do not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from coordinator import cli
from coordinator.commands import calibrate as command
from coordinator.errors import BadConfiguration
from node.protocol.run import HonestSpec, RunSpec, parse_run_toml
from node.runtime.extras import install_hint

RUN = """\
# Kept.
name = "calibrated"   # kept as well

[[environments]]
name = "{environment}"

[model]
initial = "{initial}"
dtype = "{dtype}"

[sampling]
group_size = {group_size}
max_prompt_tokens = 64
max_new_tokens = {tokens}

[proofs]
scheme = "toploc/1+sketch/1"

[limits]
max_submission_bytes = 1_000_000   # not calibrated
"""
DEFAULTS = {
    "initial": "random-tiny",
    "environment": "arithmetic",
    "dtype": "float32",
    "group_size": 2,
    "tokens": 12,
}
WEIGHTS = ("int8 weights", "int4 weights", "1 % noise on weights", "fp8 cache", "changed prompt")


def calibrate(folder, *options, **changes):
    """What the command says and writes, for a run of its own in `folder`."""
    text = RUN.format(**DEFAULTS | changes)
    (folder / "run.toml").write_text(text)
    asked = ["--run", str(folder / "run.toml"), *options]
    result = CliRunner().invoke(command.calibrate, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def same_draws():
    """Levels of few groups are fitted loosely: with other draws, honest groups of the other half are out at times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.calibration.slots.secrets.token_hex", lambda size: "0b" * size)
        yield


@pytest.fixture(scope="module")
def done(same_draws, tmp_path_factory):
    """The folder of a finished calibration, and what it printed."""
    folder = tmp_path_factory.mktemp("calibrated")
    options = ("--groups", "12", "--cheat-groups", "1", "--report", str(folder / "report"), "--json")
    return folder, calibrate(folder, *options)


def written(folder: Path) -> RunSpec:
    return parse_run_toml((folder / "run.calibrated.toml").read_text())


def test_a_run_can_start_from_what_it_writes(done):
    folder, _ = done
    before, after = parse_run_toml((folder / "run.toml").read_text()), written(folder)
    assert None not in (after.limits.honest.exponents, after.limits.honest.sketch, after.limits.honest.margin)
    assert 0 < after.limits.token_margin < before.limits.token_margin
    assert after.limits.sketch_distance < 3.0
    assert after.proofs.sketch_step < 0.001
    assert after.limits.max_submission_bytes == 1_000_000
    assert (before.sampling, before.model, before.environments) == (after.sampling, after.model, after.environments)


def test_the_operators_remarks_are_kept_and_it_says_where_the_levels_come_from(done):
    text = (done[0] / "run.calibrated.toml").read_text()
    assert text.startswith('# Kept.\nname = "calibrated"   # kept as well\n')
    assert "max_submission_bytes = 1_000_000   # not calibrated\n" in text
    assert "torch sdpa and torch eager" in text.replace("\n# ", " ")


def test_json_is_one_line_that_programs_can_read(done):
    folder, output = done
    (line,) = output.splitlines()
    told = json.loads(line)
    assert told["limits"]["token_margin"] == written(folder).limits.token_margin
    assert [one["name"] for one in told["honest"]] == ["torch sdpa", "torch eager"]
    assert [one["groups"] for one in told["honest"]] == [6, 6]
    assert len(told["cheats"]) == 12
    assert {one["groups"] for one in told["cheats"]} == {1}
    assert (folder / "report" / "calibration.json").read_text() == output
    assert len(told["policy"]) == 64


def test_the_report_has_a_chart(done):
    with Image.open(done[0] / "report" / "calibration.png") as chart:
        chart.verify()
        assert min(chart.size) > 800


def test_in_float32_other_weights_are_caught_at_the_first_slot(done):
    """Whatever the policy: nothing but rounding separates honest machines there."""
    told = {one["name"]: one for one in json.loads(done[1])["cheats"]}
    assert {name: told[name]["rejected_groups"] for name in WEIGHTS} == dict.fromkeys(WEIGHTS, 1)


def test_a_person_gets_tables(tmp_path):
    shown = calibrate(tmp_path, "--groups", "12", "--cheat-groups", "0", dtype="bfloat16")
    for words in ("Limits of single values", "token_margin", "Levels of honest work", "torch eager", "written"):
        assert words in shown
    assert "Cheats" not in shown
    assert not math.isnan(written(tmp_path).limits.honest.logprob.mean)


def test_a_recurrent_policys_memory_and_what_it_sees_are_tampered_with(tmp_path):
    """It has no cache of keys and values: a cheat that rounds one would be honest work in the table."""
    options = ("--groups", "12", "--cheat-groups", "1", "--json")
    told = json.loads(calibrate(tmp_path, *options, initial="random-frame-action", environment="terminal"))
    assert [one["name"] for one in told["honest"]] == ["torch", "torch without oneDNN"]
    assert [one["rejected_groups"] for one in told["honest"]] == [0, 0]
    rejected = {one["name"]: one["rejected_groups"] for one in told["cheats"]}
    own = {
        "bfloat16 state",
        "state forgotten every 32 tokens",
        *(name for name in rejected if name.startswith("frames: ")),
    }
    assert len(own) == 6
    assert {name: rejected[name] for name in own} == dict.fromkeys(own, 1)
    assert "fp8 cache" not in rejected


def test_a_volunteers_recording_has_no_tokens_and_is_fitted_to_where_it_is_accepted(done, tmp_path):
    folder, _ = done
    run, file = folder / "run.calibrated.toml", tmp_path / "one.recording"

    def invoke(*options):
        return CliRunner().invoke(command.calibrate, ["--run", str(run), "--groups", "12", *options])

    written = invoke("--record", str(file), "--key", str(tmp_path / "node.key"), "--json")
    node = json.loads(written.stdout)["node"]
    # Of 2 x 12 groups of 2 completions of at most 12 tokens: their deviations, and nothing else.
    assert file.stat().st_size < 24_000
    fitted = invoke("--accept", str(file), "--cheat-groups", "0", "--out", str(tmp_path / "run.toml"), "--json")
    recorded = json.loads(fitted.stdout)["recorded"]
    assert [(one["node"], one["name"], one["fitted"]) for one in recorded] == [
        (node, "torch sdpa", True),
        (node, "torch eager", True),
    ]
    assert recorded[0]["machine"]["threads"] == 1
    text = (tmp_path / "run.toml").read_text()
    assert f"12 by {node[:16]} (torch sdpa" in text.replace("\n# ", " ")
    # Recorded with the run's step, which therefore stays.
    assert parse_run_toml(text).proofs == parse_run_toml(run.read_text()).proofs

    file.write_bytes(file.read_bytes()[:-1])
    refused = invoke("--from", str(file))
    assert str(refused.exception).startswith(f"{file} is no recording for this run: ")


@pytest.mark.vllm
def test_an_engine_that_has_no_such_model_is_named(tmp_path):
    with pytest.raises(BadConfiguration, match="vLLM has no models for recurrent policies"):
        calibrate(tmp_path, "--engine", "vllm", initial="random-eagle")


def test_a_missing_package_is_one_sentence_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    (tmp_path / "run.toml").write_text("")
    asked = ["--run", str(tmp_path / "run.toml"), "--report", str(tmp_path)]
    result = CliRunner().invoke(command.calibrate, asked)
    assert str(result.exception) == f"tomlkit and matplotlib are not installed here: {install_hint('operator')}"


def test_a_file_that_takes_no_limits_is_refused_before_anything_is_drawn(tmp_path):
    (tmp_path / "run.toml").write_text('name = "x"\nenvironments = [{name = "arithmetic"}]\nlimits = {}\n')
    result = CliRunner().invoke(command.calibrate, ["--run", str(tmp_path / "run.toml")])
    assert "as tables of their own" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_operators_of_an_uncalibrated_run_are_told(done, caplog):
    uncalibrated = parse_run_toml((done[0] / "run.toml").read_text())
    cli._warn_of_defaults(uncalibrated)
    cli._warn_of_defaults(written(done[0]))
    assert uncalibrated.limits.honest == HonestSpec()
    assert [record.getMessage() for record in caplog.records] == [
        "limits.honest is not set: the defaults know nothing of this model; run `swarmproof calibrate`"
    ]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_weight_cheat_on_a_trained_policy_is_caught_in_every_group(tmp_path):
    options = ("--groups", "48", "--cheat-groups", "8", "--json")
    told = json.loads(calibrate(tmp_path, *options, initial="tiny", group_size=8, tokens=48))
    assert [one["rejected_groups"] + one["drifted_groups"] for one in told["honest"]] == [0, 0]
    cheats = {one["name"]: one for one in told["cheats"]}
    assert {name: cheats[name]["rejected_groups"] for name in WEIGHTS} == dict.fromkeys(WEIGHTS, 8)
    for name in ("int4's tokens, right proofs", "best of 8, right proofs"):
        assert all(figure.startswith(("token_margin", "margin")) for figure in cheats[name]["by"]), cheats[name]
    assert cheats["greedy"]["rejected_groups"] >= 6
    assert cheats["best of 8, right proofs"]["rejected_groups"] >= 6


def test_a_policy_with_experts_is_not_compared_with_its_own_eight_bits(tmp_path):
    """Rounding and eight bits make a router choose others alike: honest groups were rejected by such second looks."""
    calibrate(tmp_path, "--groups", "12", "--cheat-groups", "0", initial="random-glm4-moe", tokens=4)
    assert "int8" in parse_run_toml((tmp_path / "run.toml").read_text()).limits.suspects
    assert written(tmp_path).limits.suspects == ("previous",)
