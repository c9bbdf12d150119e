"""`swarmproof backup` and `swarmproof restore`, with deferred imports: every command loads this module."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.commands.options import existing_run_options
from node.commands.options import EXISTING_FOLDER, FOLDER, json_option

if TYPE_CHECKING:
    from coordinator.backup.manifest import BackupManifest

_JSON = json_option("One JSON object on stdout instead of sentences.")


@click.command()
@click.argument("directory", type=FOLDER)
@existing_run_options
@click.option("--verify", is_flag=True, help="Read the blobs that DIRECTORY has, too, and replace damaged ones.")
@_JSON
def backup(*, directory: Path, data: Path, database_url: str | None, verify: bool, as_json: bool) -> None:
    """Bring the backup in DIRECTORY up to date, while the run goes on.

    \b
    Example:
      swarmproof backup --data run/ /mnt/backup/run

    The first one makes DIRECTORY; later ones copy what is new. The run's key and the trainer's folder are not in it:
    docs/operating.md says how to keep those.
    """
    from coordinator.backup.create import back_up
    from coordinator.backup.datasets import held_datasets
    from coordinator.run.home import open_home
    from node.datasets.folder import DATASETS

    began = time.monotonic()
    home = open_home(data, database_url=database_url)
    with closing(home.database):
        made = back_up(home, directory, verify=verify)
    copied = made.copied
    lacking = len(home.spec.dataset_files) - len(held_datasets(made.manifest, home.spec))
    summary = _summary(made.manifest) | {
        "blobs_copied": copied.blobs,
        "bytes_copied": copied.size_bytes,
        "datasets_missing": lacking,
    }
    if as_json:
        click.echo(json.dumps(summary | {"seconds": round(time.monotonic() - began, 3)}))
        return
    click.echo(
        f"backed up run {home.run_id[:16]}…: {made.manifest.log_size} log entries as of {_moment(made.manifest)}, "
        f"{copied.blobs} new blobs of {copied.size_bytes / 1e6:.1f} MB"
    )
    if made.manifest.missing:
        click.echo(
            f"warning: the run's own store lacks {len(made.manifest.missing)} blobs, or has them damaged, "
            f"{made.manifest.missing[0]} among them",
            err=True,
        )
    if lacking:
        click.echo(
            f"warning: {data / DATASETS} lacks {lacking} of the run's datasets, or has them damaged: copy them there "
            "from the coordinator's --data and back up again, since the run cannot go on without them",
            err=True,
        )


@click.command()
@click.argument("directory", type=EXISTING_FOLDER)
@click.option(
    "--data",
    type=FOLDER,
    required=True,
    help="The data folder to make; empty, if it is there.",
)
@click.option("--database-url", metavar="URL", help="An empty database to restore into.  [default: a file in --data]")
@click.option("--blobs", "blobs_url", metavar="URL", help="s3://BUCKET/PREFIX.  [default: blobs/ in --data]")
@click.option("--at-once", is_flag=True, help="The old coordinator stopped more than two minutes ago: do not wait.")
@_JSON
def restore(
    *, directory: Path, data: Path, database_url: str | None, blobs_url: str | None, at_once: bool, as_json: bool
) -> None:
    """Restore the run that is backed up in DIRECTORY, for a coordinator with the same --run and --key.

    \b
    Example:
      swarmproof restore /mnt/backup/run --data run2/

    The database may be another kind than the old one, and so may the store of blobs. Nothing is overwritten. Stop
    everything of the old run before, and for good: it takes two minutes until what was signed for it is of no use.
    """
    from coordinator.backup.restore import restore as restored_from
    from node.datasets.folder import DATASETS, dataset_file

    def wait(seconds: float) -> None:
        if not at_once and seconds:
            click.echo(f"the backup is whole; waiting {seconds:.0f} s until what was signed is out of date", err=True)
            time.sleep(seconds)

    began = time.monotonic()
    restored = restored_from(directory, data, database_url=database_url, blobs_url=blobs_url, wait=wait)
    manifest = restored.manifest
    if as_json:
        summary = _summary(manifest) | {"blobs": restored.blobs, "datasets_missing": len(restored.lacking)}
        click.echo(json.dumps(summary | {"seconds": round(time.monotonic() - began, 3)}))
        return
    hours = (time.time() - manifest.made_at) / 3600
    click.echo(f"restored run {manifest.run_id[:16]}… in {data}")
    click.echo(
        f"It is as it was at {_moment(manifest)}, {hours:.1f} hours ago, with {manifest.log_size} log entries and "
        f"{restored.blobs} blobs; what was decided since is forgotten."
    )
    for dataset in restored.lacking:
        click.echo(
            f"The backup lacks a dataset: copy {dataset_file(dataset.digest)} to {data / DATASETS} before you start."
        )
    click.echo(
        "Of its log auditors, and workers with receipts, may have seen more than these entries: they will say that "
        "entries are gone, and be right.\n"
        "If a policy was published since, the next one has its version and other weights, which nodes take for fraud: "
        "then begin a new run, with a new key.\n"
        "Never start the old coordinator or trainer again, and prefer the newest backup that there is.\n"
        "Verifiers that saw more of the log refuse this one: give them a new --state, or see `swarmproof check "
        "--accept-rollback`."
    )


def _summary(manifest: BackupManifest) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "log_size": manifest.log_size,
        "log_root": manifest.log_root,
        "made_at": manifest.made_at,
        "revision": manifest.revision,
        "software": manifest.software,
        "rows": {table.name: table.rows for table in manifest.tables},
        "blobs_missing": len(manifest.missing),
    }


def _moment(manifest: BackupManifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.made_at))
