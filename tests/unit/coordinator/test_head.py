"""The output head in chunks: a policy must learn what it would from all logits at once, however few fit in memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from packed_rows import row_backward, row_logprobs
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.training.groups import Sample
from coordinator.training.head import final_states, head_backward, head_logprobs
from coordinator.training.packing import PackedRow, Scored, pack
from node.policy.families import TINY_RECURRENT
from node.policy.models.tiny import MAKERS
from node.policy.packed_attention import packed_attention
from node.policy.products import LogitRule, OutputHead

V, D, CHUNK = 50, 24, 8
CHUNK_BYTES = CHUNK * V * 4
TEMPERATURE = 0.7


def inputs(tokens: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, weight, targets, and a coefficient for each token."""
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, D, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=generator) / D**0.5).to(dtype).requires_grad_()
    return states, weight, torch.randint(V, (tokens,), generator=generator), torch.randn(tokens, generator=generator)


def losses(logp: Tensor, entropy: Tensor, coefficient: Tensor, entropy_coefficient: float) -> Tensor:
    """Curved in the log-probability, as ratios and the KL penalty are."""
    found = coefficient * logp.exp() + (-1 - logp).exp() + logp
    return found - entropy_coefficient * entropy if entropy_coefficient else found


def whole(states: Tensor, weight: Tensor, targets: Tensor, coefficient: Tensor, entropy_coefficient: float = 0.0):
    """The same from all logits at once by autograd, in float64: log-probabilities, entropies, gradients."""
    states, weight = (each.detach().double().requires_grad_() for each in (states, weight))
    logprobs = torch.log_softmax(F.linear(states, weight) / TEMPERATURE, -1)
    logp = logprobs.gather(1, targets[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    losses(logp, entropy, coefficient.double(), entropy_coefficient).sum().backward()
    return logp.detach(), entropy.detach(), states.grad, weight.grad


def in_chunks(states: Tensor, weight: Tensor, targets: Tensor, coefficient: Tensor, entropy_coefficient: float = 0.0):
    logp, entropy = head_backward(
        states,
        OutputHead(weight),
        targets,
        temperature=TEMPERATURE,
        loss=lambda part, *values: losses(*values, coefficient[part], entropy_coefficient).sum(),
        chunk_bytes=CHUNK_BYTES,
    )
    return logp, entropy, states.grad, weight.grad


def assert_near(found: Tensor, wanted: Tensor, relative: float = 1e-6) -> None:
    """Within `relative` of the largest element."""
    assert found.shape == wanted.shape
    if wanted.numel():
        assert (found.double() - wanted).abs().max() <= relative * wanted.abs().max()


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 2])
def test_chunks_learn_what_all_logits_at_once_would(tokens: int, entropy_coefficient: float) -> None:
    """A token that falls between two chunks, or counts in both, is a gradient that nobody asked for."""
    given = inputs(tokens)
    for found, wanted in zip(in_chunks(*given, entropy_coefficient), whole(*given, entropy_coefficient), strict=True):
        assert_near(found, wanted, 2e-6)
    states, weight, targets, _ = given
    found = head_logprobs(states, OutputHead(weight), targets, temperature=TEMPERATURE, chunk_bytes=CHUNK_BYTES)
    assert_near(found, whole(*given)[0])


def test_a_head_that_scales_and_caps_its_logits_learns_through_both() -> None:
    """Granite divides, Gemma bounds by a tanh: a gradient past either is one of another model, and no error says so."""
    states, weight, targets, coefficient = inputs(2 * CHUNK + 1)
    exact, matrix = (each.detach().double().requires_grad_() for each in (states, weight))
    logits = 1.5 * torch.tanh(F.linear(exact, matrix) / 0.5 / 1.5)
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    logp, entropy = logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    losses(logp, entropy, coefficient.double(), 0.3).sum().backward()
    head = OutputHead(weight, LogitRule(divisor=0.5, cap=1.5))
    found = head_backward(
        states,
        head,
        targets,
        temperature=TEMPERATURE,
        loss=lambda part, *values: losses(*values, coefficient[part], 0.3).sum(),
        chunk_bytes=CHUNK_BYTES,
    )
    alone = head_logprobs(states, head, targets, temperature=TEMPERATURE, chunk_bytes=CHUNK_BYTES)
    wanted = (logp.detach(), entropy.detach(), exact.grad, matrix.grad, logp.detach())
    for ours, theirs in zip((*found, states.grad, weight.grad, alone), wanted, strict=True):
        assert_near(ours, theirs, 3e-6)


def test_a_vocabulary_above_the_bound_is_computed_token_by_token() -> None:
    states, weight, targets, coefficient = inputs(5)
    found = head_logprobs(states, OutputHead(weight), targets, temperature=TEMPERATURE, chunk_bytes=1)
    assert_near(found, whole(states, weight, targets, coefficient)[0])


def test_memory_does_not_grow_with_the_tokens() -> None:
    """All logits of a long row at once would end the trainer: each chunk is learnt from before the next is computed."""
    states, weight, targets, _ = inputs(3 * CHUNK + 2)
    sizes = []

    def loss(part: slice, logp_n: Tensor, _entropy_n: Tensor) -> Tensor:
        assert (targets[part] == targets[sum(sizes) :][: len(logp_n)]).all()
        sizes.append(len(logp_n))
        return logp_n.sum()

    head_backward(states, OutputHead(weight), targets, temperature=1.0, loss=loss, chunk_bytes=CHUNK_BYTES)
    assert sizes == [CHUNK, CHUNK, CHUNK, 2]


def test_each_row_adds_to_the_gradient_of_those_before_it() -> None:
    """A minibatch of several rows would else learn from its last one."""
    first, second = inputs(CHUNK + 3), inputs(CHUNK)
    weight = first[1]
    in_chunks(*first)
    _, _, _, found = in_chunks(second[0], weight, *second[2:])
    assert_near(found, whole(*first)[3] + whole(second[0], weight, *second[2:])[3])


def test_weights_in_bfloat16_are_multiplied_and_summed_in_float32() -> None:
    """As workers and verifiers do: the gradient is rounded once, and log-probabilities never."""
    given = inputs(4 * CHUNK, dtype=torch.bfloat16)
    wanted = whole(*given, 0.3)
    logp, entropy, states_gradient, weight_gradient = in_chunks(*given, 0.3)
    assert_near(logp, wanted[0])
    assert_near(entropy, wanted[1])
    assert states_gradient.dtype == weight_gradient.dtype == torch.bfloat16
    half_a_unit = 2**-8
    assert_near(states_gradient, wanted[2], half_a_unit)
    assert_near(weight_gradient, wanted[3], half_a_unit)


def test_autocast_leaves_the_head_in_float32() -> None:
    """In bfloat16 a log-probability is off by a hundredth: ratios of fresh work would leave 1, and be clipped."""
    given = inputs(2 * CHUNK)
    with torch.autocast("cpu", torch.bfloat16):
        found = in_chunks(*given, 0.3)
        alone = head_logprobs(given[0], OutputHead(given[1]), given[2], temperature=TEMPERATURE)
    for ours, wanted in zip((*found, alone), (*whole(*given, 0.3), whole(*given)[0]), strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours, wanted, 2e-6)


def test_entropy_by_hand() -> None:
    """Of a fair coin beside an id of 1e-30, and of 1/2, 1/4, 1/4: with the identity as head, states are logits."""
    states = torch.tensor([[0.5, 0.5, 1e-30], [0.5, 0.25, 0.25]]).log().requires_grad_()
    weight = torch.eye(3, requires_grad=True)
    _, entropy = head_backward(
        states, OutputHead(weight), torch.tensor([0, 1]), temperature=1.0, loss=lambda _part, logp_n, _: logp_n.sum()
    )
    assert entropy.tolist() == pytest.approx([math.log(2), 1.5 * math.log(2)])


# Through a model.


def row_of(*samples: Sample, recurrent: bool = False) -> PackedRow:
    scored = [Scored(each, 1.0, (0,) * len(each.completion_ids)) for each in samples]
    (row,) = pack(scored, row_tokens=1000, recurrent=recurrent)
    return row


@pytest.mark.parametrize("family", sorted(MAKERS))
def test_the_head_reads_what_the_models_own_forward_pass_reads(family: str) -> None:
    """A family whose logits are scaled, capped or biased would train on others than its workers draw from."""
    model, prompt, drawn = MAKERS[family](1).eval(), (5, 6, 7), (40, 41, 42, 43)
    assert model.get_output_embeddings().bias is None
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0, 2:-1]
        row = row_of(Sample(prompt, drawn, (-1.0,) * 4), recurrent=family in TINY_RECURRENT)
        with packed_attention(model):
            found = row_logprobs(model, row, temperature=TEMPERATURE)
    assert_near(found, torch.log_softmax(logits.double() / TEMPERATURE, -1)[range(4), list(drawn)], 2e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_and_its_embedding_add_up(tied: bool) -> None:
    """The one weight has two gradients: that of the head must not replace the embedding's, nor be replaced."""
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    prompt, drawn = (5, 6, 7), (20, 21, 20, 5)
    logits = model(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0, 2:-1]
    torch.log_softmax(logits, -1)[range(4), list(drawn)].sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with packed_attention(model):
        row_backward(model, row_of(Sample(prompt, drawn, (-1.0,) * 4)), torch.ones(4))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert_near(parameter.grad, gradient, 1e-5)


def test_a_model_has_its_head_again_after_a_failed_forward_pass() -> None:
    """Its next evaluation or publish would else see states in place of logits."""
    model = MAKERS["tiny"](1)
    ids = torch.tensor([[1, 2, 3]])
    with packed_attention(model), pytest.raises(IndexError):
        final_states(model, row_of(Sample((1000,), (5,), (-1.0,))))
    assert model(input_ids=ids).logits.shape == (1, 3, 128)
