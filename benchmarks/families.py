"""Every model family through everything: engines, proofs, training and export, and attacks that only some have.

`python -m benchmarks.families [--json] [--table] [--only FAMILY ...] [--vllm GROUPS] [--keep RESULT]`. Each family is a
tiny policy of random weights (`benchmarks.modelling.family_policies`) in bfloat16, whose windows are shorter than its
rollouts. Limits are those that `swarmproof calibrate` fits to it, and a column is what became of it:

- `torch`, `vllm`: honest groups of 8 that the engine drew, half of which no level was fitted to; of the torch engine
  two kernels; beside vLLM's, limits are fitted to groups of both engines, and the policy has no setting that vLLM
  refuses;
- `honest_rejected`: of that half, groups that were rejected, or after which the node would have been stopped;
- `perturbed`, `noise_1pct`, `other_prompt`: the share of groups that are rejected, with 2 % and 1 % of noise on each
  weight of the layers, and with a prompt of another length;
- `trainer`: the largest difference of a tensor's gradient in a packed step from that of transformers' own forward pass
  over unpacked rows, relative to its length, in float32; dropout, where the configuration has it, is off in both;
- `fsdp2`: the same of two processes that share the model from one process, which publish the policy they read byte for
  byte;
- `export`: whether weights and logits of the exported folder, read by transformers, and the policy file that a run
  makes of it are those of the policy, bit for bit;
- a family's own attacks are a column each: an expert of every layer dropped, 10 % and 1 % of noise on the routers, one
  expert fewer for each token, the experts alone in 4 bits, half the window, the cache in 8 bits (of latent attention,
  what keys and values are made of).

A cell that was not measured is null, and says why. `--keep` takes what an earlier run has measured from its result.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.modelling.family_checks import GENERAL, OWN, calibrated, export_problem, run_of, trainer_differences
from benchmarks.modelling.family_policies import NAMES, random_family_model
from benchmarks.modelling.family_ranks import ranks_difference
from benchmarks.report import make_parser, report, say
from coordinator.calibration.result import CalibrationResult
from node.policy.families import engines_of
from node.policy.file import save_policy
from node.policy.layout import cast
from node.policy.models.tiny_llama import make_tokenizer

ROUNDING = 1e-4
"""The most that two ways to sum up a float32 gradient may differ, relative to its length."""
COLUMNS: Mapping[str, str] = {
    "torch": "torch",
    "vllm": "vLLM",
    "honest_rejected": "honest rejected",
    "perturbed": "perturbed caught",
    "noise_1pct": "1 % of noise caught",
    "other_prompt": "other prompt caught",
    "trainer": "trainer step",
    "fsdp2": "FSDP2",
    "export": "export",
}
ATTACKS: Mapping[str, str] = {column: name for name, column in OWN.items()}
"""Columns of a family's own attacks, and what they are called."""

NOT_SERVED = "vLLM does not serve it"

Row = dict[str, Any]


def measure_family(family: str, options: argparse.Namespace, folder: Path, kept: Row | None = None) -> Row:
    """Measure one family, or vLLM alone where `kept` has the rest.

    `why` has the reason of each column that could not be measured.
    """
    path, spec = folder / "policy.safetensors", run_of(options.dtype, readings=options.readings)
    row: Row = kept or {"family": family, **dict.fromkeys([*COLUMNS, *ATTACKS]), "rejected_by": {}, "why": {}}
    if kept is None:
        with _told(row, "torch"):
            _save(random_family_model(family), path, options)
            sizes = {"groups": options.groups, "cheat_groups": options.cheat_groups}
            _honest(row, calibrated(path, spec, engines=["torch"], **sizes))
        with _told(row, "trainer"):
            row["trainer"], gradients, groups = trainer_differences(path)
            with _told(row, "fsdp2"):
                row["fsdp2"] = ranks_difference(path, groups, gradients, folder / "ranks")
        with _told(row, "export"):
            if problem := export_problem(path, folder / "exported"):
                row["why"]["export"] = problem
            row["export"] = problem is None
    row["why"].pop("vllm", None)
    if "vllm" not in engines_of(family):
        row["why"]["vllm"] = NOT_SERVED
    elif not options.vllm:
        row["why"]["vllm"] = "not asked for (--vllm)"
    else:
        with _told(row, "vllm"):
            _save(random_family_model(family, for_vllm=True), path, options)
            _honest(row, calibrated(path, spec, engines=["torch", "vllm"], groups=options.vllm, cheat_groups=0))
    return row


def _save(model: PreTrainedModel, path: Path, options: argparse.Namespace) -> None:
    save_policy(cast(model, getattr(torch, options.dtype)), make_tokenizer(), path)


def _honest(row: Row, result: CalibrationResult) -> None:
    """Note what became of honest work in a calibration, and of its cheats."""
    for worker in result.honest:
        engine = worker.name.partition(" ")[0]
        row[engine] = (row[engine] or 0) + result.groups
        rejected = worker.rejected_groups + worker.caught.drifted_groups
        row["honest_rejected"] = (row["honest_rejected"] or 0) + rejected
        if rejected:
            row["rejected_by"][worker.name] = dict(worker.by)
    row.setdefault("largest", dict(result.largest))
    for cheat in result.cheats:
        row[(GENERAL | OWN)[cheat.name]] = cheat.rejected_groups / cheat.caught.groups


@contextmanager
def _told(row: Row, column: str) -> Iterator[None]:
    """Note an error as the reason why a column is empty."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (the other columns and families are measured all the same)
        row["why"][column] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def figures_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the figures of all families together.

    `families` counts those of which all but vLLM was measured, and whose gradients are right. A family that could not
    be measured was not caught either.
    """

    def least(column: str, *, of_all: bool = False) -> float | None:
        return min((row[column] or 0.0 for row in rows if of_all or row[column] is not None), default=None)

    measured = [row for row in rows if all(row[name] is not None for name in COLUMNS if name != "vllm")]
    rejected = [row["honest_rejected"] for row in rows]
    return {
        "families": sum(max(row["trainer"], row["fsdp2"]) <= ROUNDING for row in measured),
        "families_vllm": sum(row["vllm"] is not None for row in rows),
        "honest_groups_judged": sum(((row["torch"] or 0) + (row["vllm"] or 0)) // 2 for row in rows),
        "honest_rejected": None if None in rejected else sum(rejected),
        "perturbed_caught": least("perturbed", of_all=True),
        "noise_1pct_caught": least("noise_1pct", of_all=True),
        "other_prompt_caught": least("other_prompt", of_all=True),
        **{f"{column}_caught": least(column) for column in ATTACKS},
        "trainer_difference": max((row["trainer"] or 0.0 for row in rows), default=None),
        "fsdp2_difference": max((row["fsdp2"] or 0.0 for row in rows), default=None),
        "export_bit_exact": sum(bool(row["export"]) for row in rows) / len(rows),
    }


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Render rows as Markdown."""
    lines = [["", *columns.values()], ["---"] * (len(columns) + 1)]
    lines += [[f"`{row['family']}`", *(cell(row, name) for name in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: Row, column: str) -> str:
    """Render one cell."""
    value = row[column]
    if value is None and column == "vllm" and row["why"].get(column) == NOT_SERVED:
        return "no"
    if value is None:
        return "" if column in ATTACKS else "not measured"
    if column in ("torch", "vllm", "honest_rejected"):
        return str(value)
    if column == "export":
        return "bit for bit" if value else "differs"
    if column in ("trainer", "fsdp2"):
        return f"{value:.0e}"
    return f"{value:.0%}".replace("%", " %")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="FAMILY", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--vllm", type=int, default=0, metavar="GROUPS", help="honest groups by vLLM (default 0: none)")
    parser.add_argument("--groups", type=int, default=24, help="honest groups of each torch kernel (default 24)")
    parser.add_argument("--cheat-groups", type=int, default=16, help="groups of each cheat (default 16)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of policies and runs")
    parser.add_argument("--readings", type=int, choices=(1, 2), default=1, help="of each rollout (default 1)")
    parser.add_argument("--keep", type=Path, metavar="RESULT", help="the file of an earlier result")
    parser.add_argument("--table", action="store_true", help="print the tables of docs/models.md, and no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    earlier = json.loads(options.keep.read_text().splitlines()[-1])["rows"] if options.keep else []
    kept: dict[str, Row] = {row["family"]: row for row in earlier}
    for name in options.only or NAMES:
        if name not in kept or (options.vllm and kept[name]["vllm"] is None):
            with tempfile.TemporaryDirectory(prefix="families-") as folder:
                kept[name] = measure_family(name, options, Path(folder), kept.get(name))
            say(json.dumps(kept[name]))
    rows = [kept[name] for name in NAMES if name in kept]
    if options.table:
        attacked = [row for row in rows if any(row[name] is not None for name in ATTACKS)]
        print(table(rows, COLUMNS), table(attacked, ATTACKS), sep="\n\n")
        return
    notes = {f"{row['family']}: {column}": reason for row in rows for column, reason in row["why"].items()}
    notes |= {name: "no family has it" for name, value in figures_of(rows).items() if value is None}
    report("families", options, figures_of(rows), notes, rows=rows)


if __name__ == "__main__":
    main()
