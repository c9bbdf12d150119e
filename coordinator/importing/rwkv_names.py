"""The tensors of Eagle and Finch, by our names and by those of the checkpoints that their authors publish."""

from __future__ import annotations

from typing import Final, NamedTuple


class Published(NamedTuple):
    """Where a published checkpoint has one of our tensors: the names of its rows, or of the whole.

    Shapes may differ by dimensions of one, and a vector may be split into heads. If `is_complement`, ours is one minus
    the published one.
    """

    names: tuple[str, ...]
    is_complement: bool = False


_NORMS: Final = {"time_norm": "ln1", "channel_norm": "ln2", "time_mix.norm": "att.ln_x"}
_MATRICES: Final = {
    **{f"time_mix.{name}": f"att.{name}" for name in ("receptance", "key", "value", "gate", "output")},
    **{f"channel_mix.{name}": f"ffn.{name}" for name in ("key", "receptance", "value")},
}
_EAGLE_SHARES: Final = {
    **{f"time_mix.mix_{name}": f"att.time_mix_{name[0]}" for name in ("key", "value", "receptance", "gate")},
    **{f"channel_mix.mix_{name}": f"ffn.time_mix_{name[0]}" for name in ("key", "receptance")},
}
"""Shares of the token before, where a published one is of the token itself."""
_FINCH_LAYER: Final = {
    "time_mix.mix_first": "att.time_maa_x",
    "time_mix.mix_down": "att.time_maa_w1",
    "time_mix.mix_up": "att.time_maa_w2",
    "time_mix.decay_down": "att.time_decay_w1",
    "time_mix.decay_up": "att.time_decay_w2",
    "channel_mix.mix_key": "ffn.time_maa_k",
    "channel_mix.mix_receptance": "ffn.time_maa_r",
}
_FINCH_MIX: Final = tuple(f"att.time_maa_{name}" for name in "wkvrg")
_HEADS: Final = {"time_mix.decay": "att.time_decay", "time_mix.bonus": "att.time_faaaa"}


def published_names(family: str, layers: int) -> dict[str, Published]:
    """Return the published names by ours, of an "eagle" or a "finch" of `layers` layers.

    In an order from which the authors' package tells the version.
    """
    found = {"model.embeddings.weight": Published(("emb.weight",))}
    for index in range(layers):
        norms = _NORMS if index else _NORMS | {"": "ln0"}
        for ours, theirs in norms.items():
            # The norm behind the embedding is the first layer's in a published checkpoint.
            prefix = f"model.layers.{index}.{ours}" if ours else "model.first_norm"
            for part in ("weight", "bias"):
                found[f"{prefix}.{part}"] = Published((f"blocks.{index}.{theirs}.{part}",))
        for ours, published in _layer(family).items():
            names = tuple(f"blocks.{index}.{name}" for name in published.names)
            found[f"model.layers.{index}.{ours}"] = published._replace(names=names)
    for part in ("weight", "bias"):
        found[f"model.last_norm.{part}"] = Published((f"ln_out.{part}",))
    found["lm_head.weight"] = Published(("head.weight",))
    return found


def _layer(family: str) -> dict[str, Published]:
    """Return what a layer has beside its norms."""
    matrices = {f"{ours}.weight": Published((f"{theirs}.weight",)) for ours, theirs in _MATRICES.items()}
    if family == "eagle":
        own = {ours: Published((theirs,), is_complement=True) for ours, theirs in _EAGLE_SHARES.items()}
    else:
        own = {ours: Published((theirs,)) for ours, theirs in _FINCH_LAYER.items()}
        own["time_mix.mix"] = Published(_FINCH_MIX)
    return matrices | own | {ours: Published((theirs,)) for ours, theirs in _HEADS.items()}
