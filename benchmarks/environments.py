"""Environments in processes of their own: `python -m benchmarks.environments [--json] [--only boundary same]`.

boundary: what the process adds to a completion. A class whose problem, reply and reward take next to nothing is asked
for each of `--completions` completions in this process and, alternating with it, through a guest process and its lines;
the figure is the median of the differences.

same: every environment of verifiers of both generations in tests/environments, and every dataset of reasoning-gym that
is offered in a process only, asked in three processes with different hash seeds, time zones, locales and threads, as
workers, verifiers and auditors are different machines. `replies_differ` counts the problems, replies and rewards that
are not the same in all three. It needs the environments of `--store` (`make environments`), and counts as an example or
a dataset what loads in all three processes.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from benchmarks.report import make_parser, report, say
from node.environments.base import Conversation, EnvironmentFault
from node.environments.isolated import load_isolated
from node.environments.isolated.check import OTHERS
from node.environments.isolated.environment import load_of
from node.environments.isolated.messages import (
    CalledTool,
    Loaded,
    ProblemAnswer,
    ProblemQuery,
    ReplyAnswer,
    ReplyQuery,
    RewardAnswer,
    RewardQuery,
    TurnMessage,
)
from node.environments.isolated.process import GUEST_PROGRAM, GUEST_VARIABLES, LOAD_SECONDS, GuestProcess
from node.environments.isolated.store import EnvironmentStore
from node.environments.reasoning_gym import PLAIN, REVIEWED
from node.protocol.environment_spec import EnvironmentSpec, ProblemsSpec

STORE: Final = Path(__file__).parent.parent / "build" / "environments"
LEGACY: Final = ("", ":Chat", ":Raw", ":Guessing", ":Echo", ":Tools", ":Ledger", ":Sorting")
V1: Final = ("v1_letters", "v1_sorting", "v1_lookup", "v1_notes", "v1_guessing", "v1_counting")
OWN: Final = PLAIN | REVIEWED
FIGURES: Final = {
    "boundary": ("boundary_ms_per_completion_p50",),
    "same": ("verifiers_examples", "reasoning_gym_new", "replies_differ"),
}
"""What each part measures, null where it was left out."""
PROBLEMS: Final = (0, 1, 5)
TEXTS: Final = ("", "3", "Ada Mia Zoe", "</think>[[1, 2], [3]]", "</think>2*x + 1", "</think>yes\n\u202e", "9" * 3000)

MODULE = """
class Counter:
    def problem(self, index):
        return {"prompt": f"Count to {index}.", "answer": str(index)}

    def reply(self, problem, turns):
        return None if len(turns) > 1 else f"{len(turns[-1])} letters"

    def reward(self, problem, completion):
        return float(completion == problem["answer"])

    def reward_turns(self, problem, turns):
        return self.reward(problem, turns[-1])
"""


def command_of(python: Path | str, variables: Mapping[str, str]) -> list[str]:
    """Return the command of a guest without a sandbox, which queries do not pass."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["/usr/bin/env", *settings, str(python), "-P", "-s", "-B", "-u", str(GUEST_PROGRAM)]


# -- boundary


def measure_boundary(completions: int) -> dict[str, float]:
    """Return milliseconds for a completion: of the class itself, in a process, and the median difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        info = folder / "counter-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counter\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[swarmproof.environments]\ncounter = counter_module:Counter\n")
        (folder / "counter_module.py").write_text(MODULE)
        spec = importlib.util.spec_from_file_location("counter_module", folder / "counter_module.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        command = command_of(sys.executable, {"PYTHONPATH": name})
        isolated = cast("Conversation", load_isolated(EnvironmentSpec(name="counter"), command, None))
        here, there = [], []
        for index in range(completions):
            here.append(_milliseconds(module.Counter(), index))
            there.append(_milliseconds(isolated, index))
    added = [beyond - within for within, beyond in zip(here, there, strict=True)]
    return {
        "in_process_ms_per_completion_p50": statistics.median(here),
        "boundary_ms_per_completion_p50": statistics.median(added),
        "boundary_ms_per_completion_p99": sorted(added)[int(0.99 * (len(added) - 1))],
    }


def _milliseconds(environment: Any, index: int) -> float:
    turns = ["x" * 4000, str(index)]
    began = time.perf_counter()
    problem = environment.problem(index)
    environment.reply(problem, turns[:1])
    environment.reward_turns(problem, turns)
    return 1000 * (time.perf_counter() - began)


# -- the same everywhere


def examples(kind: str, names: Sequence[str]) -> list[EnvironmentSpec]:
    """Return examples of verifiers as run.toml names them."""
    bound = ProblemsSpec(count=50)
    return [EnvironmentSpec(name=f"verifiers:{kind}{name}", problems=bound) for name in names]


def datasets(python: Path) -> list[EnvironmentSpec]:
    """Return all datasets of reasoning-gym that this node's own process does not offer."""
    code = "import reasoning_gym.factory as f; print(*sorted(f.DATASETS))"
    listed = subprocess.run([str(python), "-c", code], capture_output=True, check=True, text=True)
    return [EnvironmentSpec(name=f"reasoning_gym:{name}") for name in listed.stdout.split() if name not in OWN]


def interview(python: Path, specs: Sequence[EnvironmentSpec], variables: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what one process says of each environment: its answers, or the one reason why there are none."""
    said: dict[str, list[str]] = {}
    process: GuestProcess | None = None
    for spec in specs:
        load = load_of(spec)
        try:
            if process is None:
                command = command_of(python, variables)
                process = GuestProcess(
                    spec.name, command, load, variables={**GUEST_VARIABLES, **variables}, answer_seconds=LOAD_SECONDS
                )
                loaded = process.start()
            else:
                loaded = process.ask(load, Loaded)
            said[spec.name] = [msgspec.json.encode(loaded).decode(), *_answers(process, loaded)]
        except EnvironmentFault as fault:
            said[spec.name] = [f"{fault.code}: {fault}"]
            process = None if process is None or process.pid is None else process
    if process is not None:
        process.close()
    return said


def _answers(process: GuestProcess, loaded: Loaded) -> Iterator[str]:
    turns = [_turn(text, loaded) for text in TEXTS]
    if loaded.tools:
        call = CalledTool(id="call_0_0", name=loaded.tools[0].name, arguments='{"a": 1, "b": 2, "name": "ada"}')
        turns.append(TurnMessage(content="", tool_calls=(call,)))
    for number in PROBLEMS:
        index = number if loaded.problems is None else number % loaded.problems
        yield repr(process.ask(ProblemQuery(index=index), ProblemAnswer))
        for turn in turns:
            script = (turn,) if not loaded.several_turns else (turn, turns[1])
            yield repr(process.ask(RewardQuery(index=index, turns=script), RewardAnswer))
            if loaded.several_turns:
                for count in range(1, len(script) + 1):
                    yield repr(process.ask(ReplyQuery(index=index, turns=script[:count]), ReplyAnswer))


def _turn(text: str, loaded: Loaded) -> str | TurnMessage:
    return text if loaded.speaks == "text" else TurnMessage(content=text)


def measure_same(store: EnvironmentStore, *, few: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures, and a row for each environment."""
    legacy, v1, gym = (store.select(name).python for name in ("legacy-examples", "v1-examples", "reasoning-gym"))
    rooms = (
        ("verifiers_examples", legacy, examples("legacy_examples", LEGACY)),
        ("verifiers_examples", v1, examples("", V1)),
        ("reasoning_gym_new", gym, datasets(gym)),
    )
    figures = {"verifiers_examples": 0, "reasoning_gym_new": 0, "replies_differ": 0, "answers": 0}
    rows = []
    for figure, python, all_specs in rooms:
        specs = all_specs[:2] if few else all_specs
        said = [interview(python, specs, others) for others in OTHERS]
        say(f"{figure}: asked {len(specs)} environments in {len(OTHERS)} processes")
        for spec in specs:
            answers = [each[spec.name] for each in said]
            loads = all(len(each) > 1 for each in answers)
            differ = sum(len(set(same)) > 1 for same in zip(*answers, strict=False)) if loads else 0
            differ += len({len(each) for each in answers}) > 1
            figures[figure] += loads and not differ
            figures["replies_differ"] += differ
            figures["answers"] += len(answers[0]) if loads else 0
            refused = "" if loads else min(answers, key=len)[0]
            rows.append({"environment": spec.name, "loads": loads, "differ": differ, "refused": refused})
    return figures, rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(FIGURES), default=[*FIGURES])
    parser.add_argument("--completions", type=int, default=500, help="of boundary (default 500)")
    parser.add_argument("--store", type=Path, default=STORE, help="the installed environments")
    parser.add_argument("--few", action="store_true", help="two environments of each package")
    given = parser.parse_args()
    left_out = [part for part in FIGURES if part not in given.only]
    notes = {figure: f"--only without {part}" for part in left_out for figure in FIGURES[part]}
    notes["random_programs"] = "of benchmarks.programs"
    figures, rows = dict[str, Any].fromkeys(notes), list[dict[str, Any]]()
    if "boundary" in given.only:
        figures |= measure_boundary(given.completions)
    if "same" in given.only:
        found, rows = measure_same(EnvironmentStore(given.store), few=given.few)
        figures |= found
    given.store = str(given.store)
    report("environments", given, figures, notes, rows=rows)


if __name__ == "__main__":
    main()
