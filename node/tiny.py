"""A policy small enough to learn on one CPU core in a minute: what `model.initial = "tiny"` means.

Two Llama layers of width 128 over single characters; 410,240 parameters. It exists for the demonstration run
and for tests. Its architecture is fixed: changing it changes every file the run ever published.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

PAD, EOS, UNK = 0, 1, 2
VOCABULARY = 128
_MARKS = ("<pad>", "<eos>", "<unk>", "<think>", "</think>")
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; `<think>` and `</think>` are one token each.

    101 of the model's 128 rows are in use; the rest decode to nothing.
    """
    vocabulary = {text: index for index, text in enumerate((*_MARKS, *_CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_MARKS[UNK]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token=_MARKS[PAD], eos_token=_MARKS[EOS], unk_token=_MARKS[UNK]
    )


def token_codepoints() -> list[int]:
    """What each of the tokenizer's ids is to a terminal: its character's code point, 0 for a mark."""
    return [0] * len(_MARKS) + [ord(character) for character in _CHARACTERS]


def make_model(seed: int) -> PreTrainedModel:
    """The tiny policy with random float32 weights; the same ones for the same seed and torch release.

    Leaves torch's global random state as it was.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
