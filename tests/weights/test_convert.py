"""Pickles of transformers and nanoGPT become the same model in safetensors, and nothing in a pickle
runs."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gptile.bench.huggingface import import_transformers, load_reference
from gptile.model.gpt2 import GPT2
from gptile.weights import CheckpointError, load, save_checkpoint
from gptile.weights.convert import convert
from gptile.weights.files import DEMO

PROBE = torch.tensor([[1, 2, 3, 4, 5]])


class NanoGPT(nn.Module):
    """nanoGPT's function, written from its description: Linear layers, erf GELU, optional biases;
    parameter names as its checkpoints have them."""

    def __init__(self, args: dict) -> None:
        super().__init__()
        n, bias = args["n_embd"], args["bias"]
        self.args = args
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(args["vocab_size"], n),
                "wpe": nn.Embedding(args["block_size"], n),
                "h": nn.ModuleList(self.block(n, bias) for _ in range(args["n_layer"])),
                "ln_f": nn.LayerNorm(n, bias=bias),
            }
        )
        self.lm_head = nn.Linear(n, args["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)

    @staticmethod
    def block(n: int, bias: bool) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "ln_1": nn.LayerNorm(n, bias=bias),
                "attn": nn.ModuleDict(
                    {"c_attn": nn.Linear(n, 3 * n, bias), "c_proj": nn.Linear(n, n, bias)}
                ),
                "ln_2": nn.LayerNorm(n, bias=bias),
                "mlp": nn.ModuleDict(
                    {"c_fc": nn.Linear(n, 4 * n, bias), "c_proj": nn.Linear(4 * n, n, bias)}
                ),
            }
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        t, n_head = self.transformer, self.args["n_head"]
        x = t["wte"](ids) + t["wpe"](torch.arange(ids.shape[1]))
        for block in t["h"]:
            q, k, v = block["attn"]["c_attn"](block["ln_1"](x)).chunk(3, -1)
            q, k, v = (y.unflatten(-1, (n_head, -1)).transpose(1, 2) for y in (q, k, v))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            mask = torch.ones(scores.shape[-2:]).triu(1).bool()
            y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
            x = x + block["attn"]["c_proj"](y.transpose(1, 2).flatten(2))
            mlp = block["mlp"]
            x = x + mlp["c_proj"](F.gelu(mlp["c_fc"](block["ln_2"](x))))
        return self.lm_head(t["ln_f"](x))


ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 70, "bias": True}


def nanogpt_file(path: Path, rename: Callable[[str], str] = str, **args: object) -> NanoGPT:
    model = NanoGPT({**ARGS, **args})
    state = {rename(key): tensor for key, tensor in model.state_dict().items()}
    saved = {
        "model": state,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        "model_args": {**ARGS, **args, "dropout": 0.0},
        "iter_num": 3,
        "best_val_loss": torch.tensor(3.3),
        "config": {"out_dir": "out"},
    }
    torch.save(saved, path)
    return model


class TestNanoGPT:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module."])
    def test_the_function_is_kept(self, tmp_path: Path, bias: bool, prefix: str) -> None:
        path = tmp_path / "ckpt.pt"
        original = nanogpt_file(path, lambda key: prefix + key, bias=bias)
        convert(path, tmp_path / "out")
        loaded, tokenizer = load(tmp_path / "out")
        torch.testing.assert_close(loaded(PROBE).logits, original(PROBE), rtol=1e-5, atol=1e-5)
        assert tokenizer is None
        reference = load_reference(tmp_path / "out", torch.float32)
        torch.testing.assert_close(reference(PROBE).logits, original(PROBE), rtol=1e-4, atol=1e-4)
        assert loaded.config.eos_token_ids == ()

    def test_the_padded_vocabulary_is_trimmed(self, tmp_path: Path, gpt2_bpe: Path) -> None:
        path = tmp_path / "ckpt.pt"
        original = nanogpt_file(path, vocab_size=50304)
        convert(path, tmp_path / "out", tokenizer_from=gpt2_bpe)
        loaded, tokenizer = load(tmp_path / "out")
        assert loaded.config.vocab_size == 50257
        assert loaded.config.eos_token_id == 50256
        expected = original(PROBE)[..., :50257]
        torch.testing.assert_close(loaded(PROBE).logits, expected, rtol=1e-5, atol=1e-5)
        assert tokenizer.encode("hello ") == [31373, 220]

    def test_the_size_of_the_vocabulary_can_be_chosen(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        original = nanogpt_file(path)
        convert(path, tmp_path / "out", vocab_size=65)
        loaded, _ = load(tmp_path / "out")
        torch.testing.assert_close(loaded(PROBE).logits, original(PROBE)[..., :65])
        for size in (0, 71):
            with pytest.raises(CheckpointError, match=f"cannot keep {size} of 70"):
                convert(path, tmp_path / "other", vocab_size=size)

    def test_a_head_of_its_own_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        nanogpt_file(path)
        saved = torch.load(path, weights_only=True)
        saved["model"]["lm_head.weight"] = saved["model"]["lm_head.weight"] * 2
        torch.save(saved, path)
        model = convert(path, tmp_path / "out")
        assert not model.config.tie_word_embeddings
        assert torch.equal(model.head_weight, model.wte.weight * 2)

    def test_a_shape_that_is_none_is_named_with_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        torch.save({"model": {}, "model_args": {**ARGS, "n_head": 3}}, path)
        with pytest.raises(CheckpointError, match=r"ckpt\.pt: .*n_head 3"):
            convert(path, tmp_path / "out")

    def test_a_fork_with_more_to_it_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        torch.save({"model": {}, "model_args": {**ARGS, "n_kv_head": 1}}, path)
        with pytest.raises(CheckpointError, match="n_kv_head"):
            convert(path, tmp_path / "out")
        torch.save({"model": {}, "model_args": {"n_layer": 1}}, path)
        with pytest.raises(CheckpointError, match="model_args"):
            convert(path, tmp_path / "out")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A directory with pytorch_model.bin, as older transformers saved it."""
    transformers = import_transformers()
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=3, initializer_range=0.2
    )
    directory = tmp_path / "pickled"
    directory.mkdir()
    reference = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(directory)
    state = reference.state_dict()
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril().to(torch.uint8)
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(state, directory / "pytorch_model.bin")
    torch.save(reference.eval()(PROBE).logits, tmp_path / "logits")
    return directory


class TestPyTorchModelBin:
    @pytest.mark.parametrize("source", ["", "pytorch_model.bin"])
    def test_directory_and_file(self, pickled: Path, source: str, tmp_path: Path) -> None:
        convert(pickled / source, tmp_path / "out")
        expected = torch.load(tmp_path / "logits", weights_only=True)
        torch.testing.assert_close(
            load(tmp_path / "out")[0](PROBE).logits, expected, rtol=1e-5, atol=1e-5
        )

    def test_shards(self, pickled: Path, tmp_path: Path) -> None:
        state = torch.load(pickled / "pytorch_model.bin", weights_only=True)
        (pickled / "pytorch_model.bin").unlink()
        names = list(state)
        weight_map = {}
        for shard in range(2):
            file = f"pytorch_model-{shard}.bin"
            torch.save({name: state[name] for name in names[shard::2]}, pickled / file)
            weight_map |= dict.fromkeys(names[shard::2], file)
        index = pickled / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        convert(pickled, tmp_path / "out")
        expected = torch.load(tmp_path / "logits", weights_only=True)
        torch.testing.assert_close(
            load(tmp_path / "out")[0](PROBE).logits, expected, rtol=1e-5, atol=1e-5
        )

    def test_generation_config_decides_the_ids(self, pickled: Path, tmp_path: Path) -> None:
        (pickled / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
        assert convert(pickled, tmp_path / "out").config.eos_token_ids == (4, 9)

    def test_the_legacy_format(self, pickled: Path, tmp_path: Path) -> None:
        path = pickled / "pytorch_model.bin"
        state = torch.load(path, weights_only=True)
        torch.save(state, path, _use_new_zipfile_serialization=False)
        assert convert(pickled, tmp_path / "out").config.n_layer == 2


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


class TestRefused:
    def test_code_in_a_pickle_does_not_run(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"
        for path, write in (
            (tmp_path / "a.pt", torch.save),
            (tmp_path / "b.bin", lambda obj, path: path.write_bytes(pickle.dumps(obj))),
        ):
            write({"model": Payload(mark)}, path)
            with pytest.raises(CheckpointError, match=str(path)) as error:
                convert(path, tmp_path / "out")
            assert "\n" not in str(error.value)
            assert not mark.exists()
            assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("content", [b"", b"<html>", b"PK\x03\x04 not a zip", b"\x80\x02."])
    def test_damaged_files(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "ckpt.pt"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(path)):
            convert(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_truncated_file(self, pickled: Path, tmp_path: Path) -> None:
        path = pickled / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:-2000])
        with pytest.raises(CheckpointError, match="pytorch_model"):
            convert(pickled, tmp_path / "out")

    @pytest.mark.parametrize(
        "saved",
        [[1, 2], {"a": 1}, torch.ones(2), {3: torch.ones(2)}, {"a": torch.ones(2).to_sparse()}],
    )
    def test_what_is_not_a_state_dict(self, pickled: Path, tmp_path: Path, saved: object) -> None:
        torch.save(saved, pickled / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="not a"):
            convert(pickled, tmp_path / "out")

    def test_no_config_no_source_no_room(self, pickled: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="exists already"):
            convert(pickled, tmp_path)
        with pytest.raises(CheckpointError, match="no such"):
            convert(tmp_path / "nowhere", tmp_path / "out")
        (pickled / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            convert(pickled, tmp_path / "out")

    def test_a_tokeniser_of_another_model(self, pickled: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="61 rows"):
            convert(pickled, tmp_path / "out", tokenizer_from=DEMO)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_safetensors_to_another_dtype(
    model: GPT2, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    save_checkpoint(model, tmp_path / "a", dtype=torch.bfloat16)
    written = convert(tmp_path / "a", tmp_path / "b", dtype=dtype)
    assert written.wte.weight.dtype == (dtype or torch.bfloat16)
    assert torch.equal(
        load(tmp_path / "b")[0].wte.weight,
        load(tmp_path / "a")[0].wte.weight.to(dtype).float()
        if dtype
        else load(tmp_path / "a")[0].wte.weight,
    )
