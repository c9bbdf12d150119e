"""The frame-based action model: however it is read, a worker and a verifier must get the same hidden states."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from node.engines.recurrent_decoder import RecurrentDecoder
from node.environments.terminal import TerminalTarget
from node.policy.config import parse_config, render_config
from node.policy.errors import MalformedPolicy
from node.policy.file import Policy, inspect_policy, load_policy, render_prompt, save_policy
from node.policy.models import frame_action
from node.policy.models.base import join, select
from node.policy.models.frame_action import FrameActionConfig, FrameActionForCausalLM
from node.policy.models.tiny import make_frame_action
from node.policy.models.tiny_llama import EOS, make_tokenizer
from node.protocol.terminal import Terminal

KEYS = "lljjhxkkl q\nhl"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "policy.safetensors"
    save_policy(make_frame_action(seed=3), make_tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def policy(path: Path) -> Policy:
    return load_policy(path, dtype=torch.float32)


def tokens(policy: Policy, index: int, keys: str = KEYS) -> list[int]:
    return render_prompt(policy, TerminalTarget().problem(index).prompt + keys)


@torch.inference_mode()
def states(policy: Policy, ids: Sequence[int]) -> torch.Tensor:
    """Hidden states [T, hidden] of one whole sequence."""
    found: torch.Tensor = policy.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return found


def test_step_by_step_it_says_what_it_says_of_whole_sequences(policy: Policy) -> None:
    """Otherwise an honest worker's proofs would not be the verifier's."""
    rows = [tokens(policy, index) for index in range(4)]
    start = len(rows[0]) - len(KEYS)
    decoder = RecurrentDecoder(policy)
    with torch.inference_mode():
        found = [decoder.join([tuple(row[:start]) for row in rows])]
        found += [decoder.step([row[at] for row in rows]) for at in range(start, len(rows[0]))]
    for place, row in enumerate(rows):
        stepped = torch.stack([step[place] for step in found])
        assert (stepped - states(policy, row)[start - 1 :]).abs().max() <= 1e-6
        assert stepped.std(0).max() > 1e-3


def test_states_are_selected_and_joined_by_place(policy: Policy) -> None:
    """Places leave and join: a terminal must stay with its own row."""
    base = policy.model.base_model
    rows = [tokens(policy, index) for index in (5, 6)]
    with torch.inference_mode():
        kept = [base(input_ids=torch.tensor([row[:-3]]), use_cache=True).state for row in rows]
        swapped = select(join(kept), [1, 0])
        found = base(input_ids=torch.tensor([rows[1][-3:], rows[0][-3:]]), state=swapped).last_hidden_state
    for line, row in enumerate(reversed(rows)):
        assert (found[line] - states(policy, row)[-3:]).abs().max() <= 1e-6


def test_padding_on_the_right_and_neighbours_change_nothing(policy: Policy) -> None:
    rows = [tokens(policy, 1), tokens(policy, 2)[:-6], tokens(policy, 3, "")]
    padded = torch.zeros(3, max(map(len, rows)), dtype=torch.int64)
    for line, row in enumerate(rows):
        padded[line, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        found = policy.model.base_model(input_ids=padded).last_hidden_state
    for line, row in enumerate(rows):
        assert (found[line, : len(row)] - states(policy, row)).abs().max() <= 1e-6


def test_a_packed_row_has_a_terminal_for_each_of_its_sequences(policy: Policy) -> None:
    """A trainer's row: else a sample would be trained on another's screen."""
    rows = [tokens(policy, 1), tokens(policy, 2)[:-6], tokens(policy, 3)]
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with torch.inference_mode():
        found = policy.model.base_model(input_ids=ids, position_ids=positions).last_hidden_state[0]
    assert (found - torch.cat([states(policy, row) for row in rows])).abs().max() <= 1e-6


def test_equal_frames_are_embedded_once_and_say_the_same(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(policy, 1, "lhlhlh")
    expected = states(policy, ids)
    embedded: list[int] = []
    embed = policy.model.base_model._embed
    monkeypatch.setattr(policy.model.base_model, "_embed", lambda frames: embedded.append(len(frames)) or embed(frames))
    repeated = states(policy, ids)
    assert sum(embedded) == 3  # nothing yet, and two places of the cursor
    assert torch.equal(repeated, expected)

    class Apart(frame_action._FrameCache):
        """Embeds each frame that is added."""

        def add(self, frame: frame_action.Cells) -> int:
            self._places.clear()
            self._vectors.append(self._embed([frame]))
            return len(self._vectors) - 1

    monkeypatch.setattr(frame_action, "_FrameCache", Apart)
    assert (states(policy, ids) - expected).abs().max() <= 1e-6
    assert embedded[-1] == 1


def test_few_frames_at_a_time_say_the_same_as_many(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long submission is embedded in parts: memory must not grow with it, nor its states change."""
    ids, held = tokens(policy, 1, KEYS[:-4] * 8), list[int]()
    head = policy.model.base_model.frame_head
    watching = head.register_forward_pre_hook(lambda _, given: held.append(len(given[0])))
    expected = states(policy, ids)
    watching.remove()
    assert set(held) == {frame_action.PASS_FRAMES}
    monkeypatch.setattr(frame_action, "PASS_FRAMES", 2)
    assert (states(policy, ids) - expected).abs().max() <= 1e-5


def test_a_frame_has_one_vector_whatever_stands_beside_it(policy: Policy) -> None:
    """A worker embeds a frame or a few at a time, a verifier hundreds: they should not even round differently."""
    frames = [screen(keys) for keys in ("l", "lj", "ljh", "x", "h", "j\n", "jj")]
    base = policy.model.base_model
    with torch.inference_mode():
        together = base._embed(frames)
        alone = torch.cat([base._embed([frame]) for frame in frames])
    assert (together - alone).abs().max() <= 1e-7


def test_a_frame_depends_on_what_the_screen_shows_and_on_nothing_else(policy: Policy) -> None:
    """Two ways to one screen: the frame's vector is the same, so only the LSTM can remember the way."""
    head = policy.model.base_model.frame_head
    with torch.inference_mode():
        vectors = head(torch.stack([torch.from_numpy(screen(keys)) for keys in ("lj", "jl", "l")]))
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.allclose(vectors[0], vectors[2])


def screen(keys: str) -> frame_action.Cells:
    terminal = Terminal.blank(8, 16)
    for character in "   \n @ \n  *\n\n" + keys:
        terminal.feed(ord(character))
    return terminal.frame()


def test_training_computes_frames_again_with_the_same_gradients(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_frame_action(seed=3).train()
    ids = torch.tensor([tokens(policy, 1)])
    model(input_ids=ids).logits.square().mean().backward()
    recomputed = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    monkeypatch.setattr(frame_action, "checkpoint", lambda head, frames, **_: head(frames))
    model(input_ids=ids).logits.square().mean().backward()
    assert len(recomputed) == len(list(model.parameters()))
    for gradient, parameter in zip(recomputed, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-7)
    assert model.model.embed_start.weight.grad.abs().max() > 0


def test_no_state_is_all_zeros_where_nothing_is_ever_seen(policy: Policy) -> None:
    """Of zeros there is no proof, and prompts of other environments may have no empty line."""
    assert states(policy, render_prompt(policy, "Q:12+34=?A:" * 50)).abs().amax(1).min() > 1e-3


def test_hidden_states_lie_between_minus_one_and_one(policy: Policy) -> None:
    """What the proofs of it are made of; docs/models.md says what that does to them."""
    found = states(policy, tokens(policy, 9))
    assert found.shape[1] == 128
    assert found.abs().max() < 1


def test_a_policy_file_is_read_back_as_it_was(path: Path, policy: Policy) -> None:
    made = make_frame_action(seed=3).eval()
    ids = tokens(policy, 4)
    with torch.inference_mode():
        expected = made(input_ids=torch.tensor([ids])).logits
        assert torch.equal(policy.model(input_ids=torch.tensor([ids])).logits, expected)
    blueprint = inspect_policy(path)
    assert blueprint.hidden == 128
    assert blueprint.eos_ids == {EOS}
    assert blueprint.parameters == sum(parameter.numel() for parameter in made.parameters())


def test_from_pretrained_reads_what_save_pretrained_wrote(tmp_path: Path) -> None:
    made = make_frame_action(seed=3)
    made.save_pretrained(tmp_path)
    read = FrameActionForCausalLM.from_pretrained(tmp_path)
    state = read.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 2**20},
        {"columns": 260},
        {"rows": 0},
        {"rows": 6},
        {"columns": 30},
        {"codepoints": 2**20},
        {"codepoints": 64},  # fewer than the characters have
        {"foregrounds": 2},
        {"backgrounds": 1},
        {"foregrounds": 17},
        {"frame_size": 65},
        {"num_attention_heads": 0},
        {"rows": 64, "columns": 256, "cell_size": 2048},
        {"rows": 64, "columns": 256, "convolution_size": 2048},
        {"rows": 64, "columns": 256, "frame_size": 1024},
        {"rows": 64, "columns": 256, "intermediate_size": 2**18},
        {"rows": 64, "columns": 256, "frame_size": 16, "intermediate_size": 16, "num_hidden_layers": 100},
        {"rows": 64, "columns": 256, "frame_size": 512, "num_attention_heads": 512},
        {"token_codepoints": [0] * 129},
        {"token_codepoints": [-1]},
        {"token_codepoints": [128]},
        {"token_codepoints": ["a"]},
        {"token_codepoints": {"0": 1}},
        {"token_codepoints": [[1]]},
        {"num_hidden_layers": 0},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": 0.0},
        {"kernel": "x"},
    ],
)
def test_a_configuration_of_screens_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    """Before memory is taken: a stranger's file says how large a screen is."""
    values = json.loads(render_config(make_frame_action(seed=3).config, dtype="float32"))
    parse_config(json.dumps(values), tensors=100)
    with pytest.raises(MalformedPolicy) as refused:
        parse_config(json.dumps(values | changes), tensors=100)
    assert refused.value.code == "bad_config"


def test_a_weight_that_no_blank_screen_meets_is_a_number_too(tmp_path: Path) -> None:
    """Else a worker would find out in the middle of its first slot."""
    model = make_frame_action(seed=3)
    with torch.no_grad():
        model.get_parameter("model.frame_head.embed_codepoint.weight")[ord("X"), 0] = torch.nan
    save_policy(model, make_tokenizer(), tmp_path / "policy")
    with pytest.raises(MalformedPolicy) as refused:
        load_policy(tmp_path / "policy", dtype=torch.float32)
    assert refused.value.code == "broken_model"


def test_the_largest_model_of_the_paper_has_a_configuration() -> None:
    config = FrameActionConfig()
    assert (config.rows, config.columns, config.hidden_size) == (48, 160, 1024)


def test_a_vocabulary_that_no_weights_bear_out_takes_no_memory() -> None:
    """A small file may say that there are millions of tokens; whether its weights agree is seen only later."""
    sizes = make_frame_action(seed=3).config.to_dict() | {"vocab_size": 2**24}
    with torch.device("meta"):
        tracemalloc.start()
        FrameActionForCausalLM(FrameActionConfig(**sizes))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**24
