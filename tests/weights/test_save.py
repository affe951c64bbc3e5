import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gptile.bench.huggingface import load_reference
from gptile.model.gpt2 import GPT2
from gptile.weights import CheckpointError, load, save_checkpoint
from gptile.weights.files import DEMO
from gptile.weights.save import atomic_directory

PROBE = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_save(
    small_model: Callable[..., GPT2], tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    model = small_model(tie_word_embeddings=tied, n_inner=40, activation_function="gelu")
    save_checkpoint(model, tmp_path / "model", dtype=dtype)
    reference = load_reference(tmp_path / "model", torch.float64)
    ours, _ = load(tmp_path / "model", dtype=torch.float64)
    torch.testing.assert_close(ours(PROBE).logits, reference(PROBE).logits, rtol=1e-9, atol=1e-9)
    if dtype == torch.float32:
        assert torch.equal(load(tmp_path / "model")[0](PROBE).logits, model(PROBE).logits)


def test_one_copy_of_a_tied_head_under_hugging_faces_names(model: GPT2, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == model.num_parameters()
    reference = load_reference(tmp_path / "model", torch.float32)
    expected = {f"transformer.{n}" for n, _ in reference.transformer.named_parameters()}
    assert tensors.keys() == expected


def test_tensors_begin_at_multiples_of_8_bytes(
    small_model: Callable[..., GPT2], tmp_path: Path
) -> None:
    for n_layer in (1, 2, 10):
        save_checkpoint(small_model(n_layer=n_layer), tmp_path / str(n_layer))
        raw = (tmp_path / str(n_layer) / "model.safetensors").read_bytes()
        assert int.from_bytes(raw[:8], "little") % 8 == 0


def test_a_failed_replacement_puts_the_old_back(
    model: GPT2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(model, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".model.") and not self.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input"):
        save_checkpoint(model, tmp_path / "model", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_a_failure_takes_the_parents_it_made_along(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_half(tmp_path / "a" / "b" / "model")
    assert list(tmp_path.iterdir()) == []


def test_tokeniser_and_ids_come_along(demo: tuple, tmp_path: Path) -> None:
    model, tokenizer = demo
    save_checkpoint(model, tmp_path / "copy", tokenizer_from=DEMO)
    again, its_tokenizer = load(tmp_path / "copy")
    assert again.config == model.config
    assert its_tokenizer.encode("Good morrow") == tokenizer.encode("Good morrow")
    generation = json.loads((tmp_path / "copy" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == model.config.eos_token_id


def test_an_existing_directory_is_left_alone_unless_told(model: GPT2, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "precious").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(model, target)
    assert [p.name for p in target.iterdir()] == ["precious"]
    save_checkpoint(model, target, overwrite=True)
    assert not (target / "precious").exists()
    assert torch.equal(load(target)[0](PROBE).logits, model(PROBE).logits)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def write_half(target: Path) -> None:
    with atomic_directory(target, overwrite=True) as staging:
        (staging / "half").touch()
        (staging / "no" / "such" / "directory").touch()


def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for existing in (False, True):
        if existing:
            target.mkdir()
            (target / "old").touch()
        with pytest.raises(FileNotFoundError):
            write_half(target)
        left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
        assert left == (["model", "model/old"] if existing else [])


def test_a_full_disk_leaves_nothing(model: GPT2, tmp_path: Path) -> None:
    """A limit on file size stands in for the full disk: both fail in write()."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    save_checkpoint(model, tmp_path / "source")
    program = f"""
        import sys
        from gptile.cli import main
        sys.argv = ["gptile", "convert", {str(tmp_path / "source")!r}, {str(tmp_path / "out")!r}]
        main()
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert run.returncode == 1, run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("gptile: error:")
    assert "Traceback" not in run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
