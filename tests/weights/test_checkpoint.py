"""Every layout a checkpoint comes in loads to the same model; all else is refused by name."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.weights import CheckpointError, load, open_checkpoint, save_checkpoint

PROBE = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def saved(model: GPT2, tmp_path: Path) -> Path:
    save_checkpoint(model, tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict]) -> None:
    path = directory / "model.safetensors"
    tensors = {key: tensor.clone().contiguous() for key, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def renamed(rename: Callable[[str], str]) -> Callable[[dict], dict]:
    return lambda tensors: {rename(key): tensor for key, tensor in tensors.items()}


LAYOUTS: dict[str, Callable[[dict], dict]] = {
    "as saved": lambda tensors: tensors,
    "no prefix": renamed(lambda key: key.removeprefix("transformer.")),
    "compiled": renamed(lambda key: "_orig_mod." + key),
    "data parallel": renamed(lambda key: "module." + key),
    "both": renamed(lambda key: "module._orig_mod." + key),
    "both, other way": renamed(lambda key: "_orig_mod.module." + key),
    "compiled blocks": renamed(lambda key: key.replace(".attn.", "._orig_mod.attn.")),
    "fsdp": renamed(
        lambda key: "_fsdp_wrapped_module." + key.replace(".h.0.", ".h.0._fsdp_wrapped_module.")
    ),
    "in a trainer": renamed(lambda key: "model." + key),
    "with a tied head": lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"]},
    "with the head alone": lambda t: {
        "lm_head.weight" if key == "transformer.wte.weight" else key: v for key, v in t.items()
    },
    "with masks": lambda t: {
        **t,
        **{f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(3)},
        **{f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)},
    },
    "with boolean masks": lambda t: {
        **t,
        **{f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 32, 32).bool() for i in range(3)},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_model(model: GPT2, saved: Path, layout: str) -> None:
    rewrite(saved, LAYOUTS[layout])
    loaded, _ = load(saved)
    assert torch.equal(loaded(PROBE).logits, model(PROBE).logits)
    assert loaded.num_parameters() == model.num_parameters()
    assert loaded.head_weight is loaded.wte.weight
    assert not loaded.training


def split_shards(directory: Path, n: int) -> dict[str, str]:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard in range(n):
        file = f"model-{shard + 1:05}-of-{n:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::n]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def test_shards(model: GPT2, saved: Path) -> None:
    split_shards(saved, 3)
    assert torch.equal(load(saved)[0](PROBE).logits, model(PROBE).logits)


def test_a_single_file_of_any_name(model: GPT2, saved: Path) -> None:
    path = (saved / "model.safetensors").rename(saved / "weights.safetensors")
    for source in (path, saved):
        assert torch.equal(load(source)[0](PROBE).logits, model(PROBE).logits)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_into_every_dtype(
    model: GPT2, tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    save_checkpoint(model, tmp_path / "model", dtype=stored)
    loaded, _ = load(tmp_path / "model", dtype=dtype)
    for (name, ours), original in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert ours.dtype == dtype
        assert ours.requires_grad
        assert torch.equal(ours, original.to(stored).to(dtype)), name


def test_values_beyond_float16_are_refused_not_made_infinite(saved: Path) -> None:
    rewrite(saved, lambda t: {**t, QKV: t[QKV] * 1e6})
    with pytest.raises(CheckpointError, match=r"c_attn\.weight has values beyond float16"):
        load(saved, dtype=torch.float16)
    load(saved, dtype=torch.bfloat16)


class TestHead:
    def test_a_separate_head_is_used(
        self, small_model: Callable[..., GPT2], tmp_path: Path
    ) -> None:
        model = small_model(tie_word_embeddings=False)
        save_checkpoint(model, tmp_path / "model")
        loaded, _ = load(tmp_path / "model")
        assert torch.equal(loaded(PROBE).logits, model(PROBE).logits)
        assert not torch.equal(loaded.head_weight, loaded.wte.weight)

    def test_a_missing_separate_head_is_an_error(self, saved: Path) -> None:
        set_config(saved, tie_word_embeddings=False)
        with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
            load(saved)

    def test_a_tied_head_that_differs_is_an_error(self, saved: Path) -> None:
        rewrite(saved, lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"] + 1})
        with pytest.raises(CheckpointError, match="tie_word_embeddings"):
            load(saved)


QKV = "transformer.h.1.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: {k: v for k, v in t.items() if k != QKV}, r"missing h\.1\.attn\.c_attn\.weight"),
        (lambda t: {**t, "transformer.h.9.ln_1.bias": torch.ones(24)}, r"unknown .*h\.9\.ln_1\.b"),
        (lambda t: {**t, "score.weight": torch.ones(2, 24)}, r"unknown score\.weight"),
        (lambda t: {**t, QKV: t[QKV].T}, r"c_attn\.weight is \[72, 24\].*\[24, 72\]"),
        (lambda t: {**t, QKV: t[QKV][:, :-1]}, r"\[24, 71\].*\[24, 72\]"),
        (lambda t: {**t, "transformer.wte.weight": torch.ones(64, 24)}, r"\[64, 24\].*\[61, 24\]"),
        (lambda t: {**t, QKV: t[QKV].to(torch.int8)}, "I8, not a float"),
        (lambda t: {**t, "h.1.attn.c_attn.weight": t[QKV]}, "the same parameter"),
        (lambda t: {"unrelated": torch.ones(1)}, "missing wte.weight.* and .* more; unknown unrel"),
    ],
    ids=["missing", "layer", "task", "linear", "shape", "vocab", "int8", "twice", "none"],
)
def test_what_does_not_fit_is_named_before_anything_is_read(
    saved: Path, change: Callable, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(saved, change)
    read = []
    monkeypatch.setattr("gptile.weights.checkpoint._read_tensor", lambda *args: read.append(args))
    with pytest.raises(CheckpointError, match=named) as error:
        load(saved)
    assert "\n" not in str(error.value)
    assert not read


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"<!DOCTYPE html><html>Sign in</html>", "HTML"),
            (b"\n <html>", "HTML"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
            (b"PK\x03\x04" + b"\0" * 100, "gptile convert"),
            (b"", "empty"),
            (b"\x10\x00", "cut short"),
            (b"\xff" * 8 + b"{}", "cut short"),
            (b"\x02\0\0\0\0\0\0\0{}" + b"\0" * 100, "cut short|not a safetensors"),
        ],
    )
    def test_what_is_not_safetensors_is_said_to_be_what_it_is(
        self, saved: Path, content: bytes, reason: str
    ) -> None:
        path = saved / "model.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=reason) as error:
            load(saved)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 0.999])
    def test_a_truncated_file(self, saved: Path, keep: float) -> None:
        path = saved / "model.safetensors"
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
        with pytest.raises(CheckpointError, match="cut short"):
            load(saved)

    def test_a_truncated_and_a_missing_shard(self, saved: Path) -> None:
        split_shards(saved, 3)
        shard = saved / "model-00002-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="00002-of-00003"):
            load(saved)
        shard.unlink()
        with pytest.raises(CheckpointError, match="missing shard model-00002-of-00003"):
            load(saved)

    @pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", 3, ["a"]])
    def test_an_index_cannot_lead_outside(self, saved: Path, name: object) -> None:
        (saved / "model.safetensors").unlink()
        index = saved / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"wte.weight": name}}))
        with pytest.raises(CheckpointError, match="not the name of a file beside it"):
            load(saved)

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "["])
    def test_an_index_that_is_none(self, saved: Path, content: str) -> None:
        (saved / "model.safetensors").unlink()
        (saved / "model.safetensors.index.json").write_text(content)
        with pytest.raises(UserError, match=r"index\.json"):
            load(saved)


class TestNotThere:
    @pytest.mark.parametrize(
        "source", ["./nowhere", "/nowhere/at/all", "x.safetensors", "a b", "../up", "a/b/c"]
    )
    def test_no_such_path(self, source: str) -> None:
        with pytest.raises(CheckpointError, match="no such file or directory"):
            load(source)

    def test_demo_is_the_bundled_one_whatever_lies_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "demo").mkdir()
        monkeypatch.chdir(tmp_path)
        assert open_checkpoint("demo").config.vocab_size == 2048
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            open_checkpoint("./demo")

    def test_a_json_file_and_an_unknown_home(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="pass its directory"):
            load(saved / "config.json")
        with pytest.raises(CheckpointError, match="nobody-here"):
            load("~nobody-here/model")

    def test_directories_that_are_not_checkpoints(self, saved: Path) -> None:
        (saved / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
            load(saved)
        (saved / "pytorch_model.bin").touch()
        with pytest.raises(CheckpointError, match="gptile convert"):
            load(saved)
        (saved / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            load(saved)

    def test_a_pickle_is_not_opened(self, saved: Path) -> None:
        path = saved / "pytorch_model.bin"
        path.touch()
        with pytest.raises(CheckpointError, match="gptile convert"):
            load(path)

    def test_a_revision_of_a_local_directory(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="revision"):
            load(saved, revision="main")


def test_generation_config_decides_the_ids(saved: Path) -> None:
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
    config = open_checkpoint(saved).config
    assert config.eos_token_ids == (4, 9)
    assert config.bos_token_id == 0
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": -4}))
    with pytest.raises(UserError, match=r"generation_config\.json: .*eos_token_id"):
        open_checkpoint(saved)


def test_a_foreign_tokeniser_leaves_the_model_usable(saved: Path) -> None:
    (saved / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    model, tokenizer = load(saved)
    assert tokenizer is None
    assert model(PROBE).logits.shape == (1, 5, 61)
    with pytest.raises(UserError, match="token ids, not on text"):
        open_checkpoint(saved).load_tokenizer()


def test_a_damaged_tokeniser_is_not_taken_for_none(saved: Path) -> None:
    (saved / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer\.json: not valid JSON"):
        load(saved)


def test_nothing_of_ours_needs_transformers(saved: Path, tmp_path: Path) -> None:
    """A blocked import of transformers does not hinder loading and generating."""
    blocked = tmp_path / "blocked" / "transformers"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise RuntimeError('imported')")
    program = f"from gptile import *; m, _ = load({str(saved)!r}); print(generate(m, [[1]]))"
    path = os.pathsep.join([str(blocked.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert "Completion" in run.stdout
    shutil.rmtree(blocked)
