"""Export a policy as a folder in Hugging Face's layout, as read by transformers, vLLM and `model.initial`.

Weights are written bit for bit in the policy's dtype, shared ones once; chat template and generation settings are those
of the folder that the run began with. The folder is renamed into place when complete.

ExportError
├── FolderNotEmpty      the target exists and is not empty
└── VersionNotHeld      the state folder has no such version, or no versions at all
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from coordinator.errors import CoordinatorError
from coordinator.training.companion import Companion, kept_companion
from node.policy.file import Policy, load_policy
from node.policy.model_files import GENERATION
from shardcast.files import sync_file, sync_folder
from shardcast.store.reading import MANIFESTS, StoredVersions

log = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
_MAX_LISTED = 20


class ExportError(CoordinatorError):
    code = "export_error"


class FolderNotEmpty(ExportError):
    code = "folder_not_empty"


class VersionNotHeld(ExportError):
    code = "version_not_held"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written; `version` is None for a policy given as a file."""

    folder: Path
    version: int | None
    parameters: int
    dtype: torch.dtype


def export_file(
    path: Path, folder: Path, *, companion: Companion | None = None, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Export the policy file `path` to `folder`, with what `companion` has.

    Raises ExportError, PolicyError, OSError.
    """
    with written_folder(folder) as partial:
        return _export(path, partial, folder, version=None, companion=companion or Companion(), shard_bytes=shard_bytes)


def export_version(state: Path, version: int | None, folder: Path, *, companion: Companion | None) -> Exported:
    """Export a version held in the state folder of a trainer, worker, relay or verifier; None takes its newest.

    Without a `companion`, it has the one that a trainer kept there. The folder's owner may be running. Raises as
    `export_file`, and LocalFault.
    """
    held = StoredVersions(store_of(state))
    versions = held.versions()
    if not versions or (version is not None and version not in versions):
        raise VersionNotHeld(f"{state} does not hold {_describe_request(version)}: {_describe_versions(versions)}")
    chosen = versions[-1] if version is None else version
    companion = companion or kept_companion(state)
    with written_folder(folder) as partial:
        copy = partial / ".policy"
        held.write(chosen, copy)
        exported = _export(copy, partial, folder, version=chosen, companion=companion, shard_bytes=SHARD_BYTES)
        copy.unlink()
        return exported


def store_of(state: Path) -> Path:
    """Return the folder with the versions in a process's state folder. Raises VersionNotHeld."""
    found = [folder for folder in (state, *sorted(state.glob("*"))) if (folder / MANIFESTS).is_dir()]
    if len(found) != 1:
        raise VersionNotHeld(f"{state} is not a state folder of a process that holds policies")
    return found[0]


def _describe_request(version: int | None) -> str:
    return "any policy" if version is None else f"policy {version}"


def _describe_versions(versions: list[int]) -> str:
    if not versions:
        return "none is there"
    shown = ", ".join(map(str, versions[-_MAX_LISTED:]))
    return f"there are {'…, ' if len(versions) > _MAX_LISTED else ''}{shown}"


def _export(
    path: Path, partial: Path, folder: Path, *, version: int | None, companion: Companion, shard_bytes: int
) -> Exported:
    policy = load_policy(path, dtype=None)
    model: Any = policy.model
    model.generation_config = _generation_config(policy)
    policy.tokenizer.chat_template = companion.chat_template
    with _no_progress_bars():
        model.save_pretrained(partial, max_shard_size=shard_bytes)
        # As JSON: transformers refuses to write some settings that it reads, and writes none of recurrent policies.
        generation = companion.generation | json.loads(model.generation_config.to_json_string())
        (partial / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
        policy.tokenizer.save_pretrained(partial)
        _check_tokenizer(partial, policy.tokenizer)
    return Exported(folder, version, policy.parameters, policy.model.dtype)


def _check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Warn if others will not load the tokenizer as it is.

    transformers 5 substitutes a Qwen2Tokenizer for any tokenizer of a qwen2 model, keeping only the vocabulary and
    merges. For Qwen's own tokenizer this makes no difference.
    """
    found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if json.loads(found.backend_tokenizer.to_str()) != json.loads(tokenizer.backend_tokenizer.to_str()):
        log.warning(
            "AutoTokenizer, and so vLLM, loads this tokenizer as %s, which splits text differently; "
            "PreTrainedTokenizerFast.from_pretrained reads it as it is, and vLLM takes token ids",
            type(found).__name__,
        )


def _generation_config(policy: Policy) -> GenerationConfig:
    """Build the generation config with the run's end marks: the model's and the tokenizer's."""
    ends = sorted(policy.eos_ids)
    config = policy.config
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id,
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=config.pad_token_id,
    )


def require_empty(folder: Path) -> None:
    """Raise FolderNotEmpty unless `folder` is empty or missing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderNotEmpty(f"{folder} exists and is not empty")


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder`, durably, unless an exception is raised."""
    require_empty(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync_file(path)
        partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars."""
    drawn = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if drawn:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
