"""`reasoning_gym:<dataset>`: datasets of the reasoning-gym package (arXiv 2505.24760), where that is safe.

Completions come from strangers, and many of the package's scorers evaluate the answer as Python (`eval`, or sympy's
`parse_expr`, which calls it). Some problems depend on the order of a set of strings, which differs between processes,
so nobody could re-derive a prompt. Only datasets free of both are offered: those with the package's own string
comparison, and a few whose scorer was reviewed (version 0.1.25).

Not guaranteed: problems are drawn with Python's `random`, so every participant needs the same package version. The
argument `package_version` pins it.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from types import ModuleType
from typing import Any

from node.environments.base import EnvironmentFault, Problem, answer_in, draws
from node.runtime.extras import install_hint

log = logging.getLogger(__name__)

MAX_ANSWER_CHARACTERS = 4096
"""A longer answer earns nothing; every offered scorer takes time linear in it."""

INSTRUCTION = "Think first, end your thoughts with </think>, and then give the answer and nothing else."

# fmt: off
PLAIN = frozenset({
    "acre", "aiw", "arc_1d", "base_conversion", "binary_alternation", "caesar_cipher",
    "count_bits", "count_primes", "course_schedule", "gcd", "largest_island", "lcm", "leg_counting",
    "letter_counting", "mahjong_puzzle", "maze", "modulo_grid", "number_filtering",
    "rotate_matrix", "rotten_oranges", "simple_equations", "simple_geometry", "string_manipulation",
    "string_splitting", "string_synthesis", "syllogism", "word_sequence_reversal",
})
"""Scored by the package's base class: equality, or the matching share of the answer."""

REVIEWED = frozenset({
    "chain_sum", "gsm_symbolic", "number_format", "products", "sentence_reordering", "spell_backward", "word_sorting",
})
"""Own scorers that only compare strings, floats or decimals."""

_REFUSED = {
    "its scorer evaluates the answer as Python code, so a completion could run anything": (
        "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
        "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
    ),
    "its problems follow the order of a set of strings, which differs between processes": (
        "isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder",
    ),
    "it squares numbers until one problem of some thousand has no end": ("number_sequence",),
    "it tries all divisors of products so large that some problems take minutes": ("basic_arithmetic",),
    "its scorer expands numbers such as 1e999999999 without a limit": ("coin_flip",),
}
# fmt: on
TEXTS = frozenset({"delimiter", "format_style", "operators", "whitespace"})
"""Settings that may be texts. `data_file` of spell_backward could be any file of the machine, which prompts quote."""

MOST_COUNT = 100
"""A number may be as large, or ten times its default: most say how much of something the worker's own process makes."""

LOOPING = frozenset({"arc_1d", "base_conversion", "modulo_grid"})
"""Datasets that draw again until something fits: for some settings, and then for some problems only, nothing ever does.

Their numbers keep the defaults, other than the bounds of values.
"""

WHY_REFUSED = {dataset: why for why, datasets in _REFUSED.items() for dataset in datasets}
"""Refused datasets with a specific reason; others were not reviewed."""


@dataclass(frozen=True, slots=True)
class ReasoningGym:
    """One dataset: problem `index` is the only item of the dataset made with a 32-bit seed drawn from it."""

    dataset: str
    settings: Mapping[str, Any]
    package: ModuleType

    @property
    def name(self) -> str:
        return f"reasoning_gym:{self.dataset}"

    def problem(self, index: int) -> Problem:
        source = self._make(next(draws(self.name, index)) >> 32)
        try:
            entry = source[0]
        except Exception as error:
            raise EnvironmentFault(
                f"{self.name} failed to make problem {index}: {error!r}", code="problem_failed"
            ) from error
        return Problem(f"{entry['question']}\n{INSTRUCTION}\n", {"entry": entry, "score": source.score_answer})

    def reward(self, problem: Problem, completion: str) -> float:
        answer = answer_in(completion)
        if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        try:
            score = float(problem.data["score"](answer, problem.data["entry"]))
        except Exception as error:  # noqa: BLE001  (a third party's scorer on untrusted input)
            log.warning("%s failed to score an answer of %d characters: %r; reward 0", self.name, len(answer), error)
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0

    def _make(self, seed: int) -> Any:
        try:
            return self.package.create_dataset(self.dataset, seed=seed, size=1, **self.settings)
        except Exception as error:
            raise EnvironmentFault(
                f"{self.name} does not accept its arguments: {error!r}", code="bad_arguments"
            ) from error


def load_dataset(dataset: str, arguments: Mapping[str, Any]) -> ReasoningGym:
    """Load the environment over `dataset`; `arguments` are its settings and `package_version`.

    Raises EnvironmentFault: refused_dataset, package_missing, package_version, bad_arguments, problem_failed.
    """
    if dataset not in PLAIN | REVIEWED:
        why = WHY_REFUSED.get(dataset, "its scorer has not been reviewed")
        raise EnvironmentFault(f"reasoning_gym:{dataset} is refused: {why}", code="refused_dataset")
    settings = dict(arguments)
    package = _import_package(settings.pop("package_version", None))
    reserved = settings.keys() & {"seed", "size"}
    if reserved:
        raise EnvironmentFault(
            f"reasoning_gym:{dataset}: {sorted(reserved)} follow from the slot", code="bad_arguments"
        )
    _check_settings(dataset, settings)
    environment = ReasoningGym(dataset, settings, package)
    _check_scorer(environment)
    environment.problem(0)
    return environment


def _check_settings(dataset: str, settings: Mapping[str, Any]) -> None:
    """Raise EnvironmentFault for what could read a file, or take the machine's memory or time without end."""
    name = f"reasoning_gym:{dataset}"
    usual = {field.name: field.default for field in fields(_config(dataset))}
    for key, value in settings.items():
        if isinstance(value, str):
            if key not in TEXTS:
                raise EnvironmentFault(f"{name}: {key} may not be a text", code="bad_arguments")
        elif key in usual and not key.endswith("_value"):
            if dataset in LOOPING and value != usual[key]:
                raise EnvironmentFault(f"{name}: {key} is {usual[key]} without a package", code="bad_arguments")
            default = usual.get(key.replace("min_", "max_", 1))
            most = max(MOST_COUNT, 10 * abs(default)) if isinstance(default, int | float) else MOST_COUNT
            if abs(value) > most:
                raise EnvironmentFault(f"{name}: {key} is at most {most:,} without a package", code="bad_arguments")
    chosen = {**usual, **settings}
    for least in (key for key in usual if key.startswith("min_")):
        greatest = least.replace("min_", "max_", 1)
        if greatest in usual and chosen[least] > chosen[greatest]:
            raise EnvironmentFault(f"{name}: {least} is more than {greatest}", code="bad_arguments")


def _config(dataset: str) -> Any:
    try:
        return importlib.import_module("reasoning_gym.factory").DATASETS[dataset][1]
    except KeyError:
        raise EnvironmentFault(
            f"reasoning_gym:{dataset} is not in the installed version of reasoning-gym", code="bad_arguments"
        ) from None


def _import_package(wanted: object) -> ModuleType:
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentFault(
            f"this run needs the reasoning-gym package: {install_hint('reasoning-gym')}", code="package_missing"
        ) from error
    installed = version("reasoning_gym")
    if wanted is not None and wanted != installed:
        raise EnvironmentFault(
            f"this run needs reasoning-gym {wanted}, {installed} is installed", code="package_version"
        )
    return package


def _check_scorer(environment: ReasoningGym) -> None:
    """Raise EnvironmentFault if a newer package gave a PLAIN dataset its own, unreviewed scorer."""
    base = importlib.import_module("reasoning_gym.dataset").ProceduralDataset
    inherited = type(environment._make(0)).score_answer is base.score_answer
    if environment.dataset in PLAIN and not inherited:
        raise EnvironmentFault(
            f"{environment.name} is refused: this version of reasoning-gym scores it in a new way",
            code="refused_dataset",
        )
