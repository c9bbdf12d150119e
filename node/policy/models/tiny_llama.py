"""A policy that learns on one CPU core in a minute, for `model.initial = "tiny"`.

Two Llama layers of width 128 over single characters; 410,240 parameters, for the demonstration run and tests. Its
architecture is fixed: changing it changes every file the run ever published.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from node.policy.families import TINY_HIDDEN, TINY_POSITIONS

PAD, EOS, UNK = 0, 1, 2
VOCABULARY = 128
_MARKS = ("<pad>", "<eos>", "<unk>", "<think>", "</think>")
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per printable ASCII character or newline, and for `<think>` and `</think>`.

    101 of the model's 128 rows are used; the rest decode to nothing.
    """
    vocabulary = {text: index for index, text in enumerate((*_MARKS, *_CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_MARKS[UNK]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=_MARKS[PAD], eos_token=_MARKS[EOS], unk_token=_MARKS[UNK]
    )


def token_codepoints() -> list[int]:
    """Return each token id's code point for a terminal, 0 for a mark."""
    return [0] * len(_MARKS) + [ord(character) for character in _CHARACTERS]


def make_model(seed: int) -> PreTrainedModel:
    """Make the tiny policy with random float32 weights, reproducible for a seed and torch release.

    Preserves torch's global random state.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=TINY_HIDDEN,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_POSITIONS,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
