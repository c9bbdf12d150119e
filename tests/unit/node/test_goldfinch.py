"""GoldFinch against its equations, and its ways of reading a text against each other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from node.doctor.policy import read_footprint
from node.policy.errors import MalformedPolicy
from node.policy.file import load_policy, save_policy
from node.policy.models.base import LENGTH, State, join, select, state_bytes
from node.policy.models.goldfinch import (
    CACHE,
    PREFILL_TOKENS,
    GoldFinchConfig,
    GoldFinchForCausalLM,
    GoldFinchModel,
)
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.models.wkv import HEAD_SIZE, WKV_CHUNK

CONFIG = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 6, "eos_token_id": 1}
RANKS = {"shift_rank": 4, "decay_rank": 6, "value_rank": 5, "adapt_rank": 7}
TOKENS = 2 * WKV_CHUNK + 7
"""The last chunk of the recurrence is not whole, and the text is longer than the GOLD layers' window."""


def make(*, dtype: torch.dtype = torch.float32) -> GoldFinchForCausalLM:
    """Four Finch-C2 layers and two GOLD layers, whose every weight is a random number."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = GoldFinchForCausalLM(GoldFinchConfig(**CONFIG, **RANKS))
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> GoldFinchModel:
    return make().model


@pytest.fixture(scope="module", params=[torch.float32, torch.float64])
def any_model(request: pytest.FixtureRequest) -> GoldFinchModel:
    return make(dtype=request.param).model


def some(batch: int, tokens: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: GoldFinchModel, ids: Tensor, state: State | None = None, **how: bool) -> tuple[Tensor, State]:
    found = model(input_ids=ids, state=state, use_cache=True, **how)
    return found.last_hidden_state, found.state


def one_by_one(model: GoldFinchModel, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    hidden = []
    for token in ids.T:
        step, state = read(model, token[:, None], state)
        hidden.append(step)
    assert state is not None
    return torch.cat(hidden, 1), state


def furthest(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


class Reference:
    """The paper's equations (arXiv 2407.12077, section 3) for one text, a token at a time, in float64.

    No chunks, no batch, no cache: attention looks back at lists of vectors.
    """

    def __init__(self, model: GoldFinchModel) -> None:
        self.weights = {name: weight.double() for name, weight in model.state_dict().items()}
        self.count = model.config.num_hidden_layers

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + 1e-5).sqrt() * self[f"{name}.weight"] + self[f"{name}.bias"]

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self[f"{name}.weight"] @ x

    def low_rank(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.up", self.linear(f"{name}.down", x).tanh())

    def shift(self, name: str, x: Tensor, last: Tensor, which: int) -> Tensor:
        """ddlerp: how much of the token before is taken follows from the data."""
        both = x + (last - x) * self[f"{name}.mix_first"]
        rank = self[f"{name}.mix_up"].shape[1]
        low = (both @ self[f"{name}.mix_down"])[which * rank : (which + 1) * rank].tanh()
        return x + (last - x) * (self[f"{name}.mix"][which] + low @ self[f"{name}.mix_up"][which])

    def finch(self, layer: str, xs: list[Tensor]) -> list[Tensor]:
        mix, added = f"{layer}.time_mix", []
        last = torch.zeros_like(xs[0])
        states = [torch.zeros(HEAD_SIZE, HEAD_SIZE, dtype=torch.float64) for _ in range(len(last) // HEAD_SIZE)]
        for x in xs:
            r, k, v, w, own = (self.shift(f"{mix}.shift", x, last, which) for which in range(5))
            decay = torch.exp(-torch.exp(self[f"{mix}.decay"] + self.low_rank(f"{mix}.decay_adapt", w)))
            receptance, value = self.linear(f"{mix}.receptance", r), self.linear(f"{mix}.value", v)
            key = self.linear(f"{mix}.key", k) * (1 - decay)
            out = []
            for head in range(len(states)):
                part = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
                out.append(receptance[part] @ states[head])
                states[head] = decay[part, None] * states[head] + torch.outer(key[part], value[part])
            second = self.linear(f"{mix}.value", own) + self.low_rank(f"{mix}.value_adapt", own)
            added.append(self.linear(f"{mix}.output", self.norm(f"{mix}.norm", torch.cat(out) + second)))
            last = x
        return added

    def gold(self, layer: str, xs: list[Tensor], shared_k: list[Tensor], shared_v: list[Tensor]) -> list[Tensor]:
        mix, added, keys, values = f"{layer}.time_mix", [], [], []
        zero = torch.zeros_like(xs[0])
        for at, x in enumerate(xs):
            for kind, shared, kept in (("key", shared_k, keys), ("value", shared_v, values)):
                before = shared[at - 1] if at else zero
                shifted = shared[at] + (before - shared[at]) * self[f"{mix}.mix_{kind}"]
                adapted = shifted + self.low_rank(f"{mix}.{kind}_adapt", shifted)
                kept.append(self.norm(f"{mix}.{kind}_norm", adapted))
            asked = self.shift(f"{mix}.shift", x, xs[at - 1] if at else zero, 0)
            query = self.norm(f"{mix}.query_norm", self.linear(f"{mix}.query", asked))
            out = []
            for start in range(0, len(x), HEAD_SIZE):
                part = slice(start, start + HEAD_SIZE)
                scores = torch.stack([query[part] @ key[part] for key in keys]) / math.sqrt(HEAD_SIZE)
                out.append(sum(share * value[part] for share, value in zip(scores.softmax(0), values, strict=True)))
            added.append(self.linear(f"{mix}.output", self.norm(f"{mix}.norm", torch.cat(out))))
        return added

    def channels(self, layer: str, xs: list[Tensor]) -> list[Tensor]:
        mix, last, added = f"{layer}.channel_mix", torch.zeros_like(xs[0]), []
        for x in xs:
            key = self.linear(f"{mix}.key", x + (last - x) * self[f"{mix}.mix_key"]).relu().square()
            gate = self.linear(f"{mix}.receptance", x + (last - x) * self[f"{mix}.mix_receptance"]).sigmoid()
            added.append(gate * self.linear(f"{mix}.value", key))
            last = x
        return added

    def __call__(self, ids: list[int]) -> Tensor:
        embedded = [self.norm("first_norm", self["embeddings.weight"][token]) for token in ids]
        xs, finch = embedded, self.count - self.count // 3
        for index in range(self.count):
            layer = f"layers.{index}"
            if index == finch:
                packed = [self.linear("compress", x) for x in xs]
                pairs = zip(embedded, packed, strict=True)
                keys = [rms(self.linear("decompress", torch.cat(pair))) for pair in pairs]
                values = [rms(each) for each in embedded]
            normed = [self.norm(f"{layer}.time_norm", x) for x in xs]
            added = self.finch(layer, normed) if index < finch else self.gold(layer, normed, keys, values)
            xs = [x + more for x, more in zip(xs, added, strict=True)]
            added = self.channels(layer, [self.norm(f"{layer}.channel_norm", x) for x in xs])
            xs = [x + more for x, more in zip(xs, added, strict=True)]
        return torch.stack([self.norm("last_norm", x) for x in xs])


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt()


def test_it_computes_what_the_papers_equations_say(any_model: GoldFinchModel):
    """Trained weights of anybody else's GoldFinch would otherwise mean something else here."""
    ids = some(1, TOKENS)
    assert furthest(read(any_model, ids)[0][0].double(), Reference(any_model)(ids[0].tolist())) < 5e-5


def test_decoding_is_what_a_prefill_computes(any_model: GoldFinchModel):
    """A worker decodes, a verifier prefills: what differs would be held against an honest worker."""
    ids = some(3, TOKENS)
    full, after = read(any_model, ids)
    steps, state = one_by_one(any_model, ids)
    assert furthest(steps, full) < 5e-5
    assert all(furthest(state[name].double(), after[name].double()) < 2e-4 for name in after)
    assert state.keys() == after.keys()


def test_the_window_is_exact_for_the_next_token_and_all_that_follow():
    """A worker's prefill skips most of the GOLD layers' work; a verifier's does not."""
    model = make(dtype=torch.float64).model
    ids, more = some(2, TOKENS), some(2, 5, seed=1)
    full, after = read(model, ids)
    last, state = read(model, ids, last_alone=True)
    assert last.shape == (2, 1, 128)
    assert furthest(last[:, 0], full[:, -1]) < 1e-12
    assert all(furthest(state[name].double(), after[name].double()) < 1e-12 for name in after)
    assert furthest(one_by_one(model, more, state)[0], one_by_one(model, more, after)[0]) < 1e-12


def test_with_one_position_less_than_the_window_the_next_token_would_be_another():
    """So the window is as the documentation says: two positions for each GOLD layer, and the last."""
    model = make(dtype=torch.float64).model
    assert model.config.window == 2 * 2 + 1
    ids = some(2, TOKENS)
    full, _ = read(model, ids)
    with torch.no_grad():
        cut, _ = model._read(ids, model.initial_state(2), start=0, last=model.config.window - 1)
    assert furthest(cut[:, -1], full[:, -1]) > 1e-6


def test_a_long_text_that_is_read_in_pieces_is_read_as_one():
    """The memory that a prefill takes must not grow with the text, nor what it says differ from a verifier's."""
    model = make(dtype=torch.float64).model
    _, state = read(model, some(1, 5))
    ids = some(1, 2 * PREFILL_TOKENS + 9)
    full, after = read(model, ids, state)
    last, left = read(model, ids, state, last_alone=True)
    assert furthest(last[:, 0], full[:, -1]) < 1e-12
    assert all(furthest(left[name].double(), after[name].double()) < 1e-12 for name in after)


@pytest.mark.parametrize("length", [1, 4, 5, 6, WKV_CHUNK])
def test_texts_about_as_long_as_the_window_are_exact(model: GoldFinchModel, length: int):
    ids = some(2, length)
    assert furthest(read(model, ids, last_alone=True)[0][:, 0], read(model, ids)[0][:, -1]) < 1e-5


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("count", [2, 5, WKV_CHUNK + 3])
def test_several_tokens_at_once_are_several_tokens_one_by_one(model: GoldFinchModel, count: int, *, windowed: bool):
    """A turn of a conversation is read at once, behind texts of different lengths: none may see another's columns, or
    its own future."""
    beginnings = [some(1, length, seed=length) for length in (3, 3 + 2 * WKV_CHUNK, 3 + WKV_CHUNK)]
    state = join([read(model, ids)[1] for ids in beginnings])
    more = some(3, count)
    at_once, after = read(model, more, state, last_alone=windowed)
    steps, stepped = one_by_one(model, more, state)
    assert furthest(at_once, steps[:, -at_once.shape[1] :]) < 5e-5
    for name in after:
        assert furthest(after[name].double(), stepped[name].double()) < 2e-4
    for place, ids in enumerate(beginnings):
        alone, _ = read(model, torch.cat([ids, more[place : place + 1]], 1))
        assert furthest(at_once[place], alone[0, -at_once.shape[1] :]) < 5e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cache_holds_a_sixteenth_of_the_width_and_four_bytes_a_token(dtype: torch.dtype):
    """What makes long texts fit; the paper's own code holds whole keys."""
    model = make(dtype=dtype).model
    held = {}
    for tokens in (WKV_CHUNK, TOKENS):
        for state in (read(model, some(2, tokens))[1], one_by_one(model, some(2, tokens))[1]):
            growing = sum(state[name].nbytes for name in CACHE)
            assert growing == 2 * tokens * (128 // 16 * dtype.itemsize + 4)
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in state.values()), "a view holds more"
            held[tokens] = sum(each.nbytes for each in state.values()) - growing
    assert held[WKV_CHUNK] == held[TOKENS], "nothing else grows"


def test_the_doctor_knows_what_a_text_takes(path: Path):
    """Before a worker fetches a policy, it is told whether it fits."""
    footprint = read_footprint(path)
    model = load_policy(path, dtype=torch.float32).model
    for tokens in (1, 40):
        _, state = read(model.model, some(1, tokens))
        assert footprint.sequence_bytes(tokens) == state_bytes(state) - state[LENGTH].nbytes


def test_keys_of_few_sequences_exist_at_once(model: GoldFinchModel, monkeypatch: pytest.MonkeyPatch):
    """A batch of many long texts must not need the memory that the small cache has saved, nor give other answers."""
    ids, more = some(5, TOKENS), some(5, 1, seed=1)
    full, after = read(model, ids)
    then, _ = read(model, more, after)
    asked: list[int] = []
    model.decompress.register_forward_hook(lambda _module, given, _made: asked.append(given[0].shape[0]))
    monkeypatch.setattr("node.policy.models.goldfinch.DECOMPRESSED_TOKENS", 2 * TOKENS + 5)
    again, state = read(model, ids)
    assert furthest(again, full) < 1e-5
    assert all(furthest(state[name].double(), after[name].double()) < 1e-4 for name in after)
    assert furthest(read(model, more, state)[0], then) < 1e-5
    model.decompress._forward_hooks.clear()
    assert asked == [2, 2, 1] * 2


def test_a_place_that_is_left_takes_its_columns_along(model: GoldFinchModel):
    """The longest text's end must give back the memory that only it needed."""
    state = join([read(model, some(1, length))[1] for length in (4, 40)])
    assert state["compressed"].shape[1] == 40
    _, after = read(model, some(1, 1), select(state, [0]))
    assert (after["compressed"].shape[1], after[LENGTH].tolist()) == (5, [5])


def test_a_longer_text_is_not_what_its_beginning_was_read_with(model: GoldFinchModel):
    """Two replies to one prompt go on from the same state."""
    _, state = read(model, some(1, TOKENS))
    kept = {name: each.clone() for name, each in state.items()}
    read(model, some(1, 3), state)
    one_by_one(model, some(1, 3), state)
    assert all(torch.equal(kept[name], state[name]) for name in kept)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("goldfinch") / "policy.safetensors"
    save_policy(make(), make_tokenizer(), path)
    return path


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"hidden_size": 96}, "bad_config"),
        ({"hidden_size": 0}, "bad_config"),
        ({"hidden_size": 2**24}, "wrong_tensors"),
        ({"num_hidden_layers": 2}, "bad_config"),
        ({"num_hidden_layers": 9}, "wrong_tensors"),
        ({"num_hidden_layers": 1024}, "bad_config"),
        ({"adapt_rank": 0}, "bad_config"),
        ({"adapt_rank": 2**24}, "wrong_tensors"),
        ({"adapt_rank": 2**40}, "bad_config"),
        ({"adapt_rank": None}, "wrong_tensors"),
        ({"shift_rank": -1}, "bad_config"),
        ({"decay_rank": "6"}, "bad_config"),
        ({"value_rank": 0}, "bad_config"),
        ({"intermediate_size": 0}, "bad_config"),
        ({"vocab_size": 2**24}, "wrong_tensors"),
        ({"head_size": 32}, "bad_config"),
    ],
)
def test_sizes_that_a_stranger_made_up_are_refused(change: dict[str, object], code: str, path: Path, tmp_path: Path):
    """Before memory is taken for them: a file makes a reader allocate what it weighs, and no more."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    hostile = tmp_path / "hostile.safetensors"
    save_file(tensors, hostile, metadata | {"config": json.dumps(json.loads(metadata["config"]) | change)})
    with pytest.raises(MalformedPolicy) as refused:
        load_policy(hostile, dtype=torch.float32)
    assert refused.value.code == code
