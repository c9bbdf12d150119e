"""The policy a run starts from: `model.initial` in run.toml."""

from __future__ import annotations

from pathlib import Path

from coordinator.errors import UnfitModel
from coordinator.run.first_policy import require_fit
from coordinator.training.warm_start import WarmStartProgress, warm_start
from node.policy.errors import MalformedPolicy
from node.policy.families import TINY_FAMILIES
from node.policy.file import PolicySource
from node.policy.folder import open_folder
from node.policy.inspection import RANDOM, tiny_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import RunSpec


def initial_policy(spec: RunSpec, *, progress: WarmStartProgress | None = None) -> PolicySource:
    """Make the model or open its folder, to be written as a policy file in the run's dtype; raises UnfitModel.

    One of `TINY_FAMILIES` is warm-started from `spec.seed`; with the prefix "random-" it is untrained (for tests);
    anything else is a local folder in Hugging Face's layout with safetensors weights. Nothing is ever downloaded, and
    the weights of a folder are read when the file is written.
    """
    initial = spec.model.initial
    tiny = tiny_policy(initial)
    if tiny is None:
        return _from_folder(Path(initial), spec)
    require_fit(tiny, spec)
    if initial in TINY_FAMILIES:
        return PolicySource.of_model(*warm_start(initial, seed=spec.seed, progress=progress))
    return PolicySource.of_model(MAKERS[initial.removeprefix(RANDOM)](spec.seed), make_tokenizer())


def _from_folder(folder: Path, spec: RunSpec) -> PolicySource:
    try:
        found = open_folder(folder)
        require_fit(found.first_policy(), spec)
    except (MalformedPolicy, OSError) as error:
        raise UnfitModel(f"model.initial: {error}") from error
    return found.source()
