"""The architecture of one of Qwen3's models with random weights, in Hugging Face's layout; nothing is downloaded.

Weights are transformers' initialisation in bfloat16, with two changes that give the policy the entropy of a trained one
and completions that a reward can tell apart:

- logits have a standard deviation of OTHERS_SPREAD, and those of ANSWERS one of SPREAD: a few tokens share the mass;
- the tokens of ANSWERS have larger values in channel 0, which no layer writes to, so that their logits are PREFERENCE
  above all others', in every context, those of the end of thought and the end of turn a little less. So a completion is
  some dozens of digits and ends of thought, in an order that the random layers choose by what was said before:
  attention is sharpened, as training does, because a mean over the context would hardly change from token to token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from string import ascii_letters
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from node.policy.file import save_policy

SIZES: Final = {"0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32)}
"""Widths of hidden states and of the layers between, layers, and heads; 8 key and value heads of 128 in each."""
SIZE: Final = "0.6B"
VOCABULARY: Final = 151_936
SHARDS: Final = 4
SPREAD: Final = 1.2
OTHERS_SPREAD: Final = 2.0
PREFERENCE: Final = 14.0

END_OF_TEXT, TURN, END_OF_TURN, THINK, END_OF_THOUGHT = MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
)
NUMBERS: Final = "1234"
ANSWERS: Final = (*NUMBERS, END_OF_THOUGHT, END_OF_TURN)
UNUSED_ROWS: Final = 267
"""Rows of the embedding that no token has, as in Qwen3's own."""
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LEVEL, _MORE, _THOUGHT, _END = 0.5, 0.125, 0.11, 0.08
"""Channel 0 of every token's embedding, and what digits, the end of thought and the end of turn have on top."""
_SHARPNESS: Final = 2.0
"""Weights of the norms of queries and keys."""
_CONTEXT: Final = 64


def architecture(*, size: str = SIZE, layers: int | None = None, vocabulary: int = VOCABULARY) -> Qwen3Config:
    """Return the configuration of one of SIZES, with fewer layers and a smaller vocabulary where asked for."""
    hidden, between, own_layers, heads = SIZES[size]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers or own_layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=mark_id(END_OF_TURN, vocabulary),
        pad_token_id=mark_id(END_OF_TEXT, vocabulary),
    )


def mark_id(mark: str, vocabulary: int) -> int:
    """Return the id of one of MARKS: they are the last of the tokens."""
    return vocabulary - UNUSED_ROWS - len(MARKS) + MARKS.index(mark)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer whose merges are spelled out: two or three letters, digits one by one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(), vocabulary - UNUSED_ROWS - len(alphabet) - len(MARKS)))
    entries = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(entries, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT, TURN, END_OF_TURN])
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in (THINK, END_OF_THOUGHT)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TURN, pad_token=END_OF_TEXT)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Yield pairs of letters, the first of which may have a space before it, then those with a third one."""
    beginnings = [*ascii_letters, *(f"Ġ{letter}" for letter in ascii_letters)]
    yield from (("Ġ", letter) for letter in ascii_letters)
    for _ in range(2):
        longer = [(beginning, letter) for beginning in beginnings for letter in ascii_letters]
        yield from longer
        beginnings = ["".join(pair) for pair in longer]


def make_policy(
    *,
    size: str = SIZE,
    layers: int | None = None,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make model and tokenizer, the weights drawn on `device`: a CPU draws a billion numbers in a minute or two."""
    config, tokenizer = architecture(size=size, layers=layers, vocabulary=vocabulary), make_tokenizer(vocabulary)
    torch.manual_seed(seed)
    build: Any = AutoModelForCausalLM.from_config
    with torch.no_grad(), torch.device(device):
        model: PreTrainedModel = build(config, dtype=torch.bfloat16)
        answers = torch.tensor(tokenizer.convert_tokens_to_ids(list(ANSWERS)))
        _plant(model, answers, layers=SIZES[size][2])
        _scale(model, answers)
    ends = [mark_id(mark, vocabulary) for mark in (END_OF_TURN, END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=True, temperature=0.6, top_p=0.95)
    return model, tokenizer


def write_folder(folder: Path, **shape: Any) -> None:
    """Write weights in several shards with an index, configurations, tokenizer and chat template; as `make_policy`."""
    model, tokenizer = make_policy(**shape)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    model.save_pretrained(folder, max_shard_size=weight_bytes // SHARDS)
    tokenizer.save_pretrained(folder)


def write_file(path: Path, **shape: Any) -> None:
    """Write the same policy as one policy file; as `make_policy`."""
    save_policy(*make_policy(**shape), path)


def _plant(model: PreTrainedModel, answers: torch.Tensor, *, layers: int) -> None:
    """Reserve channel 0 for what a token is."""
    body: Any = model.base_model
    # With few layers as little of a token's own embedding is left as with all: it would say the same token again.
    gain = (layers / len(body.layers)) ** 0.5
    for layer in body.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight *= gain
            writer.weight[0] = 0.0
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight[:] = _SHARPNESS
    body.embed_tokens.weight[:, 0] = _LEVEL
    body.embed_tokens.weight[answers, 0] = _LEVEL + _MORE
    body.embed_tokens.weight[answers[-2:], 0] = torch.tensor([_LEVEL + _THOUGHT, _LEVEL + _END], dtype=torch.bfloat16)


def _scale(model: PreTrainedModel, answers: torch.Tensor) -> None:
    """Set the scale of all logits, and of the answers' against each other, by a forward pass over random tokens."""
    body: Any = model.base_model
    embedding = body.embed_tokens.weight
    ids = torch.randint(256, (_CONTEXT,)), answers[torch.randint(len(answers), (_CONTEXT,))]
    caught: list[torch.Tensor] = []
    hook = body.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0][0, _CONTEXT:].float()))
    body(input_ids=torch.cat(ids)[None], use_cache=False)
    hook.remove()
    root_mean_square = caught[0].square().mean(-1, keepdim=True).sqrt()
    states, rows = (caught[0] / root_mean_square)[:, 1:], embedding[answers, 1:].float()
    scale = OTHERS_SPREAD / (float(embedding[:, 1:].float().std()) * model.config.hidden_size**0.5)
    # What all states of a random network have in common would say the same token everywhere.
    common = torch.nn.functional.normalize(states.mean(0), dim=0)
    rows -= (rows @ common)[:, None] * common
    embedding[answers, 1:] = (rows * SPREAD / (scale * states @ rows.t()).std()).to(embedding.dtype)
    body.norm.weight[:] = scale
    body.norm.weight[0] = PREFERENCE * float(root_mean_square.mean()) / (_LEVEL * _MORE)
