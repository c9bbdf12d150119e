"""`swarmproof sft`: one process, or several that `torchrun` started."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.commands.options import execution_options, seed_option, tracker_options
from node.commands.engine_options import import_models
from node.commands.options import (
    EXISTING_FILE,
    EXISTING_FOLDER,
    FOLDER,
    all_of,
    json_line,
    json_option,
    number_option,
    state_option,
    threads_option,
)

if TYPE_CHECKING:
    from coordinator.sft.recipe import SftRecipe


def _share(text: str) -> float:
    """Parse a percentage, such as 2%."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no percentage, such as 2%") from error
    if not 0 <= share <= 0.5:
        raise click.BadParameter("0% to 50%")
    return share


def _number(name: str, text: str, *, least: float, most: float, default: float) -> Any:
    kind = click.FloatRange(least, most, min_open=name == "--learning-rate")
    return click.option(name, type=kind, metavar="NUMBER", default=default, show_default=True, help=text)


def _rank_and_alpha(text: str | None) -> tuple[int, float] | None:
    """Parse RANK or RANK:ALPHA, alpha being twice the rank by default."""
    if text is None:
        return None
    rank, _, alpha = text.partition(":")
    try:
        return int(rank), float(alpha) if alpha else 2.0 * int(rank)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither RANK nor RANK:ALPHA, such as 16:32") from error


data_columns = all_of(
    click.option("--messages", default="messages", show_default=True, metavar="COLUMN", help="Conversations."),
    click.option(
        "--prompt", default="prompt", show_default=True, metavar="COLUMN", help="Prompts, where there is none."
    ),
    click.option("--completion", default="completion", show_default=True, metavar="COLUMN", help="What follows them."),
    click.option("--chat", is_flag=True, help="A prompt is the user's message, and its completion the reply."),
    click.option(
        "--each-turn",
        is_flag=True,
        help="Make an example of each of the assistant's turns, for templates that show earlier turns differently.",
    ),
    click.option("--end-mark", metavar="TOKEN", help="Make this one of the model's end marks, such as <|im_end|>."),
    number_option(
        "--max-tokens",
        "Longer examples are left out.  [default: the model's positions, at most 4096]",
        least=2,
        most=2**20,
    ),
    click.option(
        "--held-out",
        metavar="PERCENT",
        default="2%",
        show_default=True,
        callback=lambda _context, _parameter, given: _share(given),
        help="Share of the rows that only the held-out loss is of.",
    ),
)
"""What a row of the data is."""

recipe_options = all_of(
    number_option("--epochs", "Times that each row is trained on.", default=1, most=1000),
    number_option("--batch", "Examples of a step.", default=64, most=2**20),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "muon"]),
        default="adamw",
        show_default=True,
        help="Muon is for the layers' matrices, and AdamW then for all else.",
    ),
    _number("--learning-rate", "The highest.", least=0, most=1, default=2e-5),
    number_option("--warmup-steps", "Steps in which it rises.  [default: 3 % of all]", least=0, most=1_000_000),
    _number("--final-rate", "What it falls to along a cosine, as a share.", least=0, most=1, default=0.05),
    _number("--weight-decay", "AdamW's.", least=0, most=1, default=0.0),
    _number("--gradient-clip", "Bound on a gradient's norm.", least=1e-9, most=1e9, default=1.0),
    click.option(
        "--lora",
        metavar="RANK[:ALPHA]",
        callback=lambda _context, _parameter, given: _rank_and_alpha(given),
        help="Train low-rank adapters in place of all weights, and merge them into the folder that is written.  "
        "[default of ALPHA: twice RANK]",
    ),
    click.option(
        "--lora-targets",
        metavar="LAYERS",
        help="Layers that have adapters, with commas, such as q_proj,v_proj.  [default: all linear ones of attention "
        "and MLP]",
    ),
    seed_option("Draws the order, what is held out, and the first adapters."),
)
"""How it is trained."""


@click.command()
@click.option("--model", type=EXISTING_FOLDER, required=True, help="A model's folder in Hugging Face's layout.")
@click.option("--data", type=EXISTING_FILE, required=True, help="JSON lines: a conversation, or prompt and completion.")
@click.option("--to", type=FOLDER, required=True, help="Where the trained model goes: a folder for model.initial.")
@state_option("Checkpoints, curves and tokens; kept, and may be deleted.  [default: beside --to, with .sft behind it]")
@data_columns
@recipe_options
@number_option("--evaluate-every", "Steps between two held-out losses.", default=100, metavar="STEPS")
@number_option(
    "--checkpoint-every",
    "Steps between two checkpoints; a killed process trains those since the last one again.",
    default=100,
    metavar="STEPS",
)
@threads_option("CPU threads of torch.", default=1)
@execution_options
@tracker_options
@json_option("One line of JSON on stdout, and progress on stderr.")
def sft(
    *,
    model: Path,
    data: Path,
    to: Path,
    state: Path | None,
    threads: int,
    row_tokens: int,
    recompute: bool,
    device: str,
    autocast: str | None,
    evaluate_every: int,
    checkpoint_every: int,
    tensorboard: Path | None,
    no_tensorboard: bool,
    wandb: str | None,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Fine-tune a model on rows of text before a run (supervised fine-tuning).

    \b
    Example:
      swarmproof sft --model Qwen3-0.6B/ --data chats.jsonl --to tuned/

    The loss is on the assistant's tokens, or the completion's, alone. The same command goes on where a killed one
    stopped, with the same result. Then model.initial = "tuned" begins a run with it.

    \b
    With --lora 16 adapters of rank 16 are trained beside frozen weights, which takes far less memory.

    \b
    Several processes hold a model and its optimizer together (FSDP2):
      torchrun --nproc-per-node 4 -m node.cli sft --model ...
    """
    import_models()
    import msgspec
    import torch

    from coordinator.sft.recipe import PreparedSft
    from coordinator.sft.rows import RowColumns
    from coordinator.sft.run import SftJob, fine_tune
    from coordinator.sft.view import SftView, closing
    from coordinator.training.grpo import Execution
    from coordinator.training.trackers import Tracker, make_tracker, tracker_settings
    from coordinator.training.world import open_world
    from node.engines.device import find_device
    from node.runtime.terminal import LiveDisplay, supports_live_display
    from shardcast.wire import digest

    folder = state or to.with_name(f"{to.name}.sft")
    columns = RowColumns(**{name: recipe.pop(name) for name in ("messages", "prompt", "completion", "chat")})
    chosen = _recipe(columns=columns, **recipe)

    def tracker(prepared: PreparedSft) -> Tracker:
        watched = tracker_settings(state=folder, tensorboard=tensorboard, no_tensorboard=no_tensorboard, wandb=wandb)
        run_id = digest(msgspec.json.encode(prepared))
        return make_tracker(watched, run_id=run_id, name=to.name, config=prepared, state=folder)

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    torch.set_num_threads(threads)
    live = LiveDisplay(sys.stdout) if supports_live_display(sys.stdout) and not as_json else None
    dtype = torch.bfloat16 if autocast else None
    with open_world(device=find_device(device).type, gathered_in=dtype) as world, live or contextlib.nullcontext():
        job = SftJob(
            model=model,
            data=data,
            to=to,
            state=folder,
            recipe=chosen,
            execution=Execution(world=world, row_tokens=row_tokens, autocast=dtype, recompute=recompute),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
        )
        result = fine_tune(job, tracker=tracker, observer=SftView(live, err=as_json), stop=stop.is_set)
    if result is None:
        return
    if as_json:
        click.echo(json_line({"to": str(to), **msgspec.to_builtins(result)}))
        return
    click.echo(closing(result))
    click.echo(f'{to} holds the trained model (policy {result.digest[:16]}…): model.initial = "{to}" begins with it')
    if chosen.lora:
        click.echo(f"its adapters alone: swarmproof export policy latest --adapter --state {folder} --to adapter/")


def _recipe(*, lora: tuple[int, float] | None, lora_targets: str | None, **given: Any) -> SftRecipe:
    """Return the recipe of the options; raises UsageError for what contradicts itself."""
    import msgspec

    from coordinator.sft.recipe import SftRecipe
    from node.protocol.run import LoraSpec

    if lora is None and lora_targets is not None:
        raise click.UsageError("--lora-targets says which layers have the adapters of --lora: give both.")
    try:
        adapters = None
        if lora is not None:
            targets = {} if lora_targets is None else {"targets": lora_targets.split(",")}
            adapters = msgspec.convert({"rank": lora[0], "alpha": lora[1], **targets}, LoraSpec)
        return SftRecipe(lora=adapters, **given)
    except (ValueError, msgspec.ValidationError) as error:
        raise click.UsageError(f"--lora: {error}") from error
