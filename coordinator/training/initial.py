"""The policy a run starts from: `model.initial` in run.toml."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from coordinator.errors import UnfitModel
from coordinator.run.first_policy import require_fit
from coordinator.training.warm_start import WarmStartProgress, warm_start
from node.policy.errors import MalformedPolicy
from node.policy.families import TINY_FAMILIES
from node.policy.file import PolicySource, reply_ids
from node.policy.folder import open_folder
from node.policy.inspection import RANDOM, tiny_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import RunSpec, ThinkingSpec


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
    _require_room_to_answer(make_tokenizer(), spec)
    if initial in TINY_FAMILIES:
        return PolicySource.of_model(*warm_start(initial, seed=spec.seed, progress=progress))
    return PolicySource.of_model(MAKERS[initial.removeprefix(RANDOM)](spec.seed), make_tokenizer())


def _from_folder(folder: Path, spec: RunSpec) -> PolicySource:
    try:
        found = open_folder(folder)
        require_fit(found.first_policy(), spec)
    except (MalformedPolicy, OSError) as error:
        raise UnfitModel(f"model.initial: {error}") from error
    _require_room_to_answer(found.tokenizer, spec)
    return found.source()


def _require_room_to_answer(tokenizer: PreTrainedTokenizerFast, spec: RunSpec) -> None:
    """Raise UnfitModel if the end of a thought never fits behind its budget: then nobody's thoughts would be ended.

    How many tokens the end has, the tokenizer alone can tell; run.toml is refused where one would be too many.
    """
    for number, environment in enumerate(spec.environments):
        if not isinstance(thinking := environment.thinking, ThinkingSpec):
            continue
        end, most = reply_ids(tokenizer, thinking.end), spec.sampling_in(number).max_new_tokens
        if thinking.tokens + len(end) >= most:
            raise UnfitModel(
                f"environments.thinking of {environment.name}: a thought of {thinking.tokens} tokens and the "
                f"{len(end)} of its end leave nothing of max_new_tokens {most} for an answer, so that none would be "
                "ended; lower thinking.tokens"
            )
