"""A model's folder that cannot be a policy is refused by a sentence that names the file, before a run begins with it.

What would break for whom: an operator whose signed run no worker can load, or whose run trains another model than the
folder holds, finds out by a failing trainer, or never.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import families
from model_folders import SECOND_END, edit_header, edit_json, make_folder, shard_of
from safetensors.torch import load_file, save_file

from benchmarks.modelling.families import telling_fields
from node.policy.errors import MalformedPolicy
from node.policy.families import TINY_RECURRENT
from node.policy.file import load_policy, write_policy
from node.policy.folder import open_folder, validate_folder
from node.policy.model_files import MAX_BYTES
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import EOS, make_tokenizer
from node.policy.tokenizer_files import check_chat_template
from node.policy.weights import INDEX, MAX_HEADER_BYTES, SINGLE, read_weights

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole") / "model", tie_word_embeddings=False)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", fields)


def tokenizer_config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", fields)


def header(tensor: str, **fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_header(shard_of(folder, tensor), lambda found: found[tensor].update(fields))


def rewritten(change: Callable[[dict[str, Any]], object], tensor: str) -> Callable[[Path], object]:
    """Change the tensors of one shard, and its index with them."""

    def apply(folder: Path) -> None:
        path = shard_of(folder, tensor)
        tensors = load_file(path)
        before = set(tensors)
        change(tensors)
        path.unlink()
        if tensors:
            save_file(tensors, path, metadata={"format": "pt"})
        index = folder / INDEX
        found = json.loads(index.read_bytes())
        for name in before - tensors.keys():
            del found["weight_map"][name]
        found["weight_map"] |= dict.fromkeys(tensors.keys() - before, path.name)
        index.write_text(json.dumps(found))

    return apply


def cut(tensor: str, *, by: int) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        path = shard_of(folder, tensor)
        path.write_bytes(path.read_bytes()[:-by])

    return apply


def many_added_tokens(folder: Path) -> None:
    def add(tokenizer: dict[str, Any]) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"] += [{"id": 128, "content": "<tool>", "special": True, **flags}]

    edit_json(folder / "tokenizer.json", add)


def too_many_added_tokens(folder: Path) -> None:
    """As after `add_tokens` without `resize_token_embeddings`."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<tool_{number}>" for number in range(30)])
    tokenizer.save_pretrained(folder)


def templated_out_of_vocabulary(folder: Path) -> None:
    special = {"<pad>": {"id": "<pad>", "ids": [4000], "tokens": ["<pad>"]}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [{"SpecialToken": {"id": "<pad>", "type_id": 0}}, *pair]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    edit_json(folder / "tokenizer.json", {"post_processor": processor})


def rename(before: str, after: str) -> Callable[[Path], object]:
    return lambda folder: (folder / before).rename(folder / after)


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


CASES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    # config.json
    "no_configuration": ("bad_config", "model has no config.json", lambda folder: (folder / "config.json").unlink()),
    "configuration_too_long": ("bad_config", "config.json has .* at most 65536", config(name="x" * 70_000)),
    "configuration_is_a_list": ("bad_config", "config.json is not a JSON object", write("config.json", b"[]")),
    "configuration_nests_deep": ("bad_config", "config.json is not a JSON", write("config.json", b'{"a":' * 9_000)),
    "family_of_a_newer_release": (
        "unsupported_model",
        "config.json has the model_type 'qwen9', and these are supported: .*llama, ministral, mistral, mixtral, olmo2",
        config(model_type="qwen9"),
    ),
    "no_family": ("unsupported_model", "None", config(model_type=None)),
    "setting_of_a_newer_release": (
        "bad_config",
        "config.json sets 'logits_scaling', which qwen3 models .* written by 9.1.0",
        config(logits_scaling=8.0, transformers_version="9.1.0"),
    ),
    "multiplier_that_would_be_lost": ("bad_config", "'residual_multiplier'", config(residual_multiplier=0.22)),
    "code_of_its_own": ("unsupported_model", "auto_map", config(auto_map={"AutoModelForCausalLM": "evil.Model"})),
    "quantised_weights": ("unsupported_model", "quantization_config", config(quantization_config={"bits": 4})),
    "window_of_no_tokens": (
        "unsupported_model",
        "window of 0 tokens",
        config(use_sliding_window=True, sliding_window=0, max_window_layers=1, layer_types=None),
    ),
    "linear_attention_in_a_layer": (
        "unsupported_model|bad_config",
        "linear_attention",
        config(layer_types=["full_attention", "linear_attention"]),
    ),
    "positions_that_change_with_the_length": (
        "unsupported_model",
        "positions",
        config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    ),
    "other_activation": ("unsupported_model", "activation is not silu", config(hidden_act="gelu")),
    "size_beyond_any_memory": (
        "bad_config",
        "16777217, and integers are 0 .. 16777216",
        config(intermediate_size=2**24 + 1),
    ),
    "negative_padding": ("bad_config", "has -1", config(pad_token_id=-1)),
    "heads_that_do_not_divide": ("broken_model|bad_config", "config.json", config(num_key_value_heads=3)),
    # weights
    "no_weights": (
        "bad_weights",
        "model has neither model.safetensors nor .*index.json: copy",
        lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")],
    ),
    "pickled_weights": (
        "bad_weights",
        "pickled ones are never loaded",
        lambda folder: (
            [
                *(path.unlink() for path in folder.glob("*.safetensors*")),
                (folder / "pytorch_model.bin").write_bytes(b""),
            ]
        ),
    ),
    "shard_that_is_missing": ("bad_weights", "{norm} is missing", lambda folder: shard_of(folder, NORM).unlink()),
    "shard_that_the_index_lacks": (
        "bad_weights",
        "model-00099-of-00099.safetensors is not named",
        write("model-00099-of-00099.safetensors", b""),
    ),
    "shard_outside_the_folder": (
        "bad_weights",
        "index.json is not an index",
        lambda folder: edit_json(
            folder / INDEX, lambda index: index["weight_map"].update({NORM: "../other.safetensors"})
        ),
    ),
    "index_is_cut_off": ("bad_weights", "index.json is not an index", write(INDEX, b'{"weight_map": {')),
    "index_names_a_tensor_elsewhere": (
        "bad_weights",
        "lacks tensor 'model.norm.weight'",
        lambda folder: edit_json(
            folder / INDEX,
            lambda index: index["weight_map"].update({NORM: index["weight_map"][EMBEDDING]}),
        ),
    ),
    "tensor_that_the_index_lacks": (
        "bad_weights",
        "has tensor '.*', unlike",
        lambda folder: edit_json(
            folder / INDEX, lambda index: index["weight_map"].pop("model.layers.0.self_attn.k_norm.weight")
        ),
    ),
    "truncated_shard": ("bad_weights", "{norm} is cut off: 2 bytes", cut(NORM, by=2)),
    "shard_cut_in_its_header": (
        "bad_weights",
        "is cut off in its header",
        lambda folder: shard_of(folder, NORM).write_bytes(shard_of(folder, NORM).read_bytes()[:20]),
    ),
    "empty_shard": (
        "bad_weights",
        "is cut off in its header, after 0 bytes",
        lambda folder: shard_of(folder, NORM).write_bytes(b""),
    ),
    "shard_that_claims_a_huge_header": (
        "bad_weights",
        "is not a safetensors file",
        lambda folder: shard_of(folder, NORM).write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little")),
    ),
    "bytes_after_the_last_tensor": (
        "bad_weights",
        "has 3 bytes after its last tensor",
        lambda folder: shard_of(folder, NORM).write_bytes(shard_of(folder, NORM).read_bytes() + b"abc"),
    ),
    "length_that_is_not_the_shapes": ("bad_weights", "'model.norm.weight' another length", header(NORM, shape=[9])),
    "shape_of_2_to_the_60": ("bad_weights", "not a safetensors file", header(NORM, shape=[2**60])),
    "tensors_that_overlap": (
        "bad_weights",
        "overlap, or gaps",
        lambda folder: edit_header(
            shard_of(folder, "model.layers.0.self_attn.k_norm.weight"),
            lambda found: [
                each.update(data_offsets=[each["data_offsets"][0] + 2, each["data_offsets"][1] + 2])
                for name, each in found.items()
                if name == "model.layers.0.self_attn.k_norm.weight"
            ],
        ),
    ),
    "dtype_of_eight_bits": ("bad_weights", "'model.norm.weight' as F8_E4M3", header(NORM, dtype="F8_E4M3")),
    "tensor_of_another_shape": (
        "wrong_tensors",
        r"{norm} has tensor 'model.norm.weight' of shape \[64\], where config.json says \[128\]",
        rewritten(lambda tensors: tensors.update({NORM: tensors[NORM][:64].clone()}), NORM),
    ),
    "tensor_that_is_missing": (
        "wrong_tensors",
        "lacks tensor 'model.norm.weight' of a qwen3 model",
        rewritten(lambda tensors: tensors.pop(NORM), NORM),
    ),
    "head_that_is_missing": (
        "wrong_tensors",
        "lacks tensor 'lm_head.weight'",
        rewritten(lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
    ),
    "tensor_of_another_family": (
        "wrong_tensors",
        "{norm} has tensor 'model.layers.0.gate.weight', which no qwen3 model",
        rewritten(lambda tensors: tensors.update({"model.layers.0.gate.weight": tensors[NORM].clone()}), NORM),
    ),
    "tied_head_that_differs_from_the_embedding": (
        "wrong_tensors",
        "config.json ties 'lm_head.weight' to 'model.embed_tokens.weight', and the weights have two different ones",
        config(tie_word_embeddings=True),
    ),
    "more_layers_than_weights": (
        "wrong_tensors",
        "lacks tensor 'model.layers.2",
        config(num_hidden_layers=3, layer_types=None),
    ),
    # tokenizer
    "no_fast_tokenizer": ("bad_tokenizer", "no fast tokenizer", rename("tokenizer.json", "vocab.json")),
    "tokenizer_is_cut_off": ("bad_tokenizer", "tokenizer", write("tokenizer.json", b'{"version": "1.0"')),
    "tokenizer_of_another_model": (
        "bad_tokenizer",
        "tokenizer.json cannot be a policy's: its tokenizer has ids up to 100, outside the model's vocabulary of 64",
        lambda folder: (
            (
                config(vocab_size=64)(folder),
                rewritten(lambda all_: all_.update({EMBEDDING: all_[EMBEDDING][:64].clone()}), EMBEDDING)(folder),
            )
        ),
    ),
    "added_token_with_an_id_that_it_will_not_have": (
        "bad_tokenizer",
        "added token '<tool>' with id 128, which is 101 once loaded",
        many_added_tokens,
    ),
    "added_tokens_beyond_the_vocabulary": ("bad_tokenizer", "ids up to 130", too_many_added_tokens),
    "prompts_begin_beyond_the_vocabulary": (
        "bad_tokenizer",
        "puts token 4000 into a text",
        templated_out_of_vocabulary,
    ),
    "no_end_mark": ("bad_tokenizer", "tokenizer_config.json names no eos_token", tokenizer_config(eos_token=None)),
    "end_mark_beyond_the_vocabulary": ("bad_config", "config.json", config(eos_token_id=[EOS, 128])),
    "second_end_mark_beyond_the_vocabulary": (
        "bad_config",
        "generation_config.json has an eos_token_id outside the vocabulary of 128",
        lambda folder: edit_json(folder / "generation_config.json", {"eos_token_id": [EOS, 151_643]}),
    ),
    "end_mark_is_a_word": (
        "bad_config",
        "generation_config.json has an eos_token_id",
        lambda folder: edit_json(folder / "generation_config.json", {"eos_token_id": "<eos>"}),
    ),
    # chat template
    "chat_template_too_large": (
        "bad_chat_template",
        "chat_template.jinja has .* at most 131072",
        write("chat_template.jinja", b"x" * (MAX_BYTES["chat_template.jinja"] + 1)),
    ),
    "chat_template_too_large_in_the_tokenizer": (
        "bad_chat_template",
        "chat template of more than 131072 bytes",
        lambda folder: (
            (
                (folder / "chat_template.jinja").unlink(),
                tokenizer_config(chat_template="x" * 140_000)(folder),
            )
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_a_policy_is_refused_by_name(case: str, folder: Path) -> None:
    code, said, spoil = CASES[case]
    said = said.replace("{norm}", shard_of(folder, NORM).name)
    spoil(folder)
    with pytest.raises(MalformedPolicy, match=said) as caught:
        validate_folder(folder)
    assert caught.value.code in code.split("|")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages[0].name.first }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ],
)
def test_a_chat_template_that_raises_is_refused(template: str, said: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(
        MalformedPolicy, match=rf"chat_template\.jinja has a chat template that fails.*{said}"
    ) as caught:
        check_chat_template(folder)
    assert caught.value.code == "bad_chat_template"


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_a_whole_folder_of_each_family_passes_with_every_end_mark(family: str, tmp_path: Path) -> None:
    """Qwen's second end mark stands in generation_config.json alone; a run without it never ends there."""
    found = validate_folder(make_folder(tmp_path / "model", family=family, **telling_fields(family, layers=2)))
    check_chat_template(tmp_path / "model")
    assert (found.family, found.hidden, found.positions, found.vocabulary) == (family, 128, 512, 128)
    assert found.end_marks == (EOS, SECOND_END)
    assert found.has_chat_template
    stored = read_weights(tmp_path / "model").values()
    assert found.parameters >= sum(tensor.count for tensor in stored) > found.largest_layer > 128 * 48


@pytest.mark.parametrize("family", TINY_RECURRENT)
def test_a_recurrent_folder_passes_and_has_no_limit_of_positions(family: str, tmp_path: Path) -> None:
    MAKERS[family](0).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    found = validate_folder(tmp_path)
    assert (found.positions, found.hidden, found.has_chat_template) == (None, 128, False)


def test_the_model_of_text_is_taken_out_of_one_that_sees(tmp_path: Path) -> None:
    """Qwen 3.5 is published in no other form: with eyes, drafts of further tokens, and a few numbers in float32."""
    folder = make_folder(tmp_path, family="qwen3_5_text", **telling_fields("qwen3_5_text", layers=2))
    text = json.loads((folder / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 2]}
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}, "image_token_id": 5}
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(MalformedPolicy, match="of quantised weights"):
        open_folder(folder)
    (folder / "config.json").write_text(json.dumps(whole))
    before = weights_of(folder)
    tensors = {name.replace("model.", "model.language_model.", 1): each.bfloat16() for name, each in before.items()} | {
        "model.visual.proj.weight": torch.zeros(2, 2),
        "mtp.fc.weight": torch.zeros(2, 2),
    }
    numbers = "model.language_model.layers.0.linear_attn.A_log"
    tensors[numbers] = tensors[numbers].float()
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    save_file(tensors, folder / SINGLE)
    found = open_folder(folder)
    assert (found.first_policy().family, found.dtype) == ("qwen3_5_text", torch.bfloat16)
    write_policy(found.source(), tmp_path / "policy", dtype=torch.bfloat16)
    weights = load_policy(tmp_path / "policy", dtype=None).model.state_dict()
    assert all(torch.equal(weights[name], each.bfloat16()) for name, each in before.items())


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


HONEST: dict[str, Callable[[Path], object]] = {
    "settings_of_earlier_releases": config(
        torch_dtype="bfloat16", _name_or_path="Qwen/Qwen3", use_mrope=False, temperature=0.7, tokenizer_class="X"
    ),
    "rotary_base_of_llama_3": config(rope_parameters={"rope_type": "default", "rope_theta": 500_000_000}),
    "rotary_base_of_earlier_releases": config(rope_parameters=None, rope_theta=500_000_000),
    "window_that_is_switched_off": config(use_sliding_window=False, sliding_window=4096, layer_types=None),
    "dropout": config(attention_dropout=0.1),
    "tied_head_that_is_stored_twice": lambda folder: (
        rewritten(
            lambda tensors: tensors.update({"lm_head.weight": load_file(shard_of(folder, EMBEDDING))[EMBEDDING]}),
            "lm_head.weight",
        )(folder),
        config(tie_word_embeddings=True)(folder),
    ),
    "mistrals_second_copy": write("consolidated.safetensors", b"not looked at"),
    "rotary_frequencies_of_early_llamas": rewritten(
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": tensors[NORM][:16].clone()}),
        NORM,
    ),
    "one_file": lambda folder: (
        (
            save_file(
                weights_of(folder),
                folder / SINGLE,
            ),
            (folder / INDEX).unlink(),
        )
    ),
}


@pytest.mark.parametrize("case", HONEST)
def test_what_real_folders_have_besides_is_no_fault(case: str, folder: Path) -> None:
    HONEST[case](folder)
    assert validate_folder(folder).parameters > 0
