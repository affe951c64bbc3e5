import json
from pathlib import Path

import pytest

from gptile.model.config import PRESETS, GPT2Config
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2


def test_the_published_config_is_read_and_its_inert_fields_ignored() -> None:
    published = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    assert GPT2Config.from_dict(published) == PRESETS["gpt2"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"activation_function": "quick_gelu"}, "quick_gelu"),
        ({"activation_function": None}, "activation_function"),
        ({"rotary_dim": 64}, "rotary_dim"),
        ({"model_type": "gptj"}, "model_type"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"n_embd": 50, "n_head": 12}, "n_head"),
        ({"n_layer": 0}, "n_layer"),
        ({"n_layer": 2.5}, "n_layer"),
        ({"n_layer": True}, "n_layer"),
        ({"n_inner": -1}, "n_inner"),
        ({"n_inner": 0}, "n_inner"),
        ({"vocab_size": "50257"}, "vocab_size"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ({"attn_pdrop": 1.5}, "attn_pdrop"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [1, "a"]}, "eos_token_id"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
        ({"scale_attn_weights": "yes"}, "scale_attn_weights"),
        ({"n_embd": 768, "hidden_size": 1024}, "n_embd"),
        ({"n_embd": 256.0}, "n_embd must be a whole number"),
        ({"n_layer": 10**9}, "n_layer"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"layer_norm_epsilon": 10**400}, "layer_norm_epsilon"),
        ({"activation_function": []}, "activation_function"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)
def test_what_we_do_not_honour_is_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        GPT2Config.from_dict(fields)


def test_a_field_that_says_nothing_is_no_field() -> None:
    assert GPT2Config.from_dict({"rope_scaling": None, "xla_device": False}) == GPT2Config()


def test_names_of_other_architectures_are_understood() -> None:
    config = GPT2Config.from_dict({"hidden_size": 64, "num_attention_heads": 4})
    assert (config.n_embd, config.n_head) == (64, 4)


@pytest.mark.parametrize("eos", [None, 0, 7, [0, 7]])
def test_round_trip_through_json(tmp_path: Path, eos: object) -> None:
    config = GPT2Config.from_dict({"n_inner": 10, "eos_token_id": eos, "pad_token_id": 3})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert GPT2Config.from_json(path) == config
    assert config.eos_token_ids == ({None: (), 0: (0,), 7: (7,)}[eos] if eos != [0, 7] else (0, 7))


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", "\x00", '{"n_layer": 0}', '{"n_layer": ' + "9" * 5000 + "}"],
    ids=["cut", "list", "nul", "value", "digits"],
)
def test_errors_name_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UserError, match=str(path)):
        GPT2Config.from_json(path)
    with pytest.raises(UserError, match="nowhere"):
        GPT2Config.from_json(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("distilgpt2", 81_912_576),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_sizes(name: str, parameters: int) -> None:
    import torch

    with torch.device("meta"):
        assert GPT2(PRESETS[name]).num_parameters() == parameters


def test_attention_scale_follows_the_flags() -> None:
    shape = {"n_embd": 32, "n_head": 2}
    assert GPT2Config(**shape).attention_scale(2) == 0.25
    assert GPT2Config(**shape, scale_attn_weights=False).attention_scale(2) == 1
    by_layer = GPT2Config(**shape, scale_attn_by_inverse_layer_idx=True)
    assert [by_layer.attention_scale(i) for i in range(3)] == [0.25, 0.125, 0.25 / 3]
