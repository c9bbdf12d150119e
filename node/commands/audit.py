"""`swarmproof audit`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from node.commands.click_ext import CouldNotRun, reported
from node.commands.engine_options import (
    check_engine,
    engine_options,
    import_models,
    prefills_maker,
    refuse_vllm_options,
)
from node.commands.joining_options import run_id_option
from node.commands.memory_options import policy_memory_bytes, policy_memory_option
from node.commands.options import EXISTING_FILE, json_option, number_option, state_folder, state_option
from node.commands.witness_options import witness_options, witness_rule


@click.command()
@click.argument("url")
@run_id_option
@number_option("--sample", "How many verdicts to derive again.  [default: a few]", least=0)
@click.option("--all", "all_", is_flag=True, help="Derive every verdict again.")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="URL",
    help="An origin or relay to ask for policies besides the run's own; repeatable. Relays forget old policies.",
)
@click.option(
    "--answers",
    multiple=True,
    type=EXISTING_FILE,
    metavar="FILE",
    help="A file of answers that the operator keeps and gave to you, to derive its rewards too; repeatable.",
)
@witness_options
@click.option("--seed", type=int, metavar="NUMBER", help="Draw the same sample as an earlier audit with this seed.")
@state_option()
@policy_memory_option
@engine_options
@json_option("One JSON object instead of a table.")
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    *,
    url: str,
    run_id: str,
    sample: int | None,
    all_: bool,
    sources: tuple[str, ...],
    answers: tuple[Path, ...],
    witnesses: tuple[str, ...],
    quorum: int | None,
    seed: int | None,
    state: Path | None,
    policy_memory: float | None,
    engine: str,
    as_json: bool,
    **compute: Any,
) -> None:
    """Check a coordinator's log, and derive its verdicts again.

    \b
    Example:
      swarmproof audit http://192.0.2.1:8700 --run-id 5f3c... --sample 20

    Any --engine and --device that hold the policy will do, whatever the run's verifiers have.

    Exit code 0: it agrees. 1: it does not, and the table says where. 2: the audit could not run. 3: it agrees, but of
    some verdicts that were drawn the operator has removed the files.
    """
    with reported(CouldNotRun):
        if all_ and sample is not None:
            raise click.UsageError("Give --sample or --all, not both.")
        rule = witness_rule(witnesses, quorum)
        refuse_vllm_options(engine)
        check_engine(engine, compute["device"])
        import_models()
        from node.audit.auditor import run_audit

        folder = state_folder(state, run_id, "audit")
        code = asyncio.run(
            run_audit(
                url,
                run_id=run_id,
                sample=sample,
                all_=all_,
                seed=seed,
                state_dir=folder,
                as_json=as_json,
                sources=sources,
                answers=answers,
                witnesses=rule,
                policy_memory=policy_memory_bytes(policy_memory, engine=engine, device=compute["device"]),
                prefills=prefills_maker(engine, state=folder, **compute),
            )
        )
    ctx.exit(code)
