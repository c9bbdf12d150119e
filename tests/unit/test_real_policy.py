"""What `benchmarks.realsize` makes is a folder as an operator has one, and README shows the rules of its run."""

from __future__ import annotations

import re

import pytest
import torch
from locations import ROOT

from benchmarks.realsize import RUN_TOML
from benchmarks.sizing.policy import (
    ANSWERS,
    END_OF_THOUGHT,
    END_OF_TURN,
    MARKS,
    make_policy,
    make_tokenizer,
    mark_id,
    write_folder,
)
from benchmarks.sizing.swarm import rules
from node.policy.folder import validate_folder
from node.policy.tokenizer_files import check_chat_template
from node.protocol.run import parse_run_toml

SMALL = {"layers": 1, "vocabulary": 2048}


def test_readme_shows_the_run_toml_of_the_real_size_benchmark(tmp_path):
    shown = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert shown == [RUN_TOML.read_text()]
    before, after = (parse_run_toml(text) for text in (RUN_TOML.read_text(), rules(RUN_TOML, tmp_path)))
    assert (before.model.initial, after.model.initial) == ("/models/Qwen3-0.6B", str(tmp_path))
    assert (before.sampling, before.batch, before.training) == (after.sampling, after.batch, after.training)


@pytest.mark.service
def test_the_folder_has_several_shards_and_can_be_a_run_s_first_policy(tmp_path):
    write_folder(tmp_path, **SMALL)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert (tmp_path / "model.safetensors.index.json").is_file()
    found = validate_folder(tmp_path)
    check_chat_template(tmp_path)
    assert (found.family, found.hidden, found.vocabulary) == ("qwen3", 1024, 2048)
    assert len(found.end_marks) == 2
    assert found.has_chat_template


@pytest.mark.parametrize("vocabulary", [2048, pytest.param(151_936, marks=pytest.mark.service)])
def test_the_tokenizer_reads_back_what_it_writes_and_has_the_size_of_the_embedding(vocabulary):
    tokenizer = make_tokenizer(vocabulary)
    text = "Find the Greatest Common Divisor of 26 and 760, naïvely.\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < 0.7 * len(text)
    assert len(tokenizer) == vocabulary - 267
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == [mark_id(mark, vocabulary) for mark in MARKS]
    assert all(len(tokenizer(answer)["input_ids"]) == 1 for answer in ANSWERS)


def test_completions_are_answers_that_a_reward_can_tell_apart():
    model, tokenizer = make_policy(**SMALL)
    ids = torch.tensor([tokenizer("What is 2 + 2?\n")["input_ids"]])
    with torch.inference_mode():
        probabilities = model(input_ids=ids).logits[0, -1].float().softmax(-1)
    answers = tokenizer.convert_tokens_to_ids(list(ANSWERS))
    assert probabilities[answers].sum() > 0.95
    assert 0.1 < torch.special.entr(probabilities).sum() < 2
    assert {END_OF_THOUGHT, END_OF_TURN} < set(ANSWERS)
