"""Chat templates of published models: written anew beside their digests, and a tokenizer that knows their marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

FOLDER: Final = Path(__file__).parent / "chat_templates"
PUBLISHED: Final[dict[str, dict[str, Any]]] = json.loads((FOLDER / "published.json").read_bytes())["models"]
FRAMES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {"marks": ["<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>"], "eos": "<|im_end|>"},
    "llama3": {
        "marks": ["<|start_header_id|>", "<|end_header_id|>"],
        "bos": "<|begin_of_text|>",
        "eos": "<|eot_id|>",
    },
    "mistral": {
        "marks": ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"],
        "bos": "<s>",
        "eos": "</s>",
    },
    "gemma3": {"marks": ["<start_of_turn>"], "bos": "<bos>", "eos": "<end_of_turn>"},
    "glm4_5": {"marks": ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"], "eos": "<|user|>"},
    "phi4": {"marks": ["<|im_start|>", "<|im_sep|>"], "bos": "<|endoftext|>", "eos": "<|im_end|>"},
}
FRAMES["llama3_1"] = FRAMES["llama3"]


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes, with the marks of the chat template of that name, which it has."""
    frame = FRAMES[template]
    marks = [mark for mark in (frame.get("bos"), frame["eos"], *frame["marks"], "<think>", "</think>") if mark]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks)
    if "bos" in frame:  # as these models' own tokenizers do for every other text
        special = [(frame["bos"], backend.token_to_id(frame["bos"]))]
        backend.post_processor = TemplateProcessing(single=f"{frame['bos']} $A", special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=frame.get("bos"), eos_token=frame["eos"], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text()
    return tokenizer
