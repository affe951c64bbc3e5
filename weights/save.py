"""Write a model as a Hugging Face directory, all of it or nothing."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import TOKENIZER_FILES
from gptile.weights.errors import CheckpointError
from gptile.weights.names import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKEN_ID_FIELDS,
    WEIGHTS_FILE,
    hugging_face_name,
    is_conv1d,
)
from gptile.weights.safetensors_file import write_safetensors


def save_checkpoint(
    model: GPT2,
    directory: Path,
    *,
    tokenizer_from: Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` and a tokeniser.

    Args:
        model: a tied head is written once, as the token embedding.
        directory: made by this call; exists afterwards only if everything was written.
        tokenizer_from: directory whose tokeniser files to copy.
        dtype: of the stored tensors; default the model's.
        overwrite: replace ``directory`` if it exists.

    Raises:
        CheckpointError: if the directory exists and ``overwrite`` is false.
        OSError: if it cannot be written; nothing is left behind.
    """
    with atomic_directory(directory, overwrite=overwrite) as staging:
        write_model(model, staging, tokenizer_from=tokenizer_from, dtype=dtype)


def write_model(
    model: GPT2, directory: Path, *, tokenizer_from: Path | None, dtype: torch.dtype | None = None
) -> None:
    """The files of :func:`save_checkpoint`, into an existing directory."""
    config = model.config.to_dict()
    stored = dtype or model.wte.weight.dtype
    write_json(directory / CONFIG_FILE, {**config, "dtype": str(stored).removeprefix("torch.")})
    write_json(
        directory / GENERATION_CONFIG_FILE,
        {name: config[name] for name in TOKEN_ID_FIELDS if config[name] is not None},
    )
    write_safetensors(directory / WEIGHTS_FILE, hugging_face_tensors(model), stored)
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, directory)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokeniser's files that ``source`` has."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def hugging_face_tensors(model: GPT2, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter (or its gradient) once, under Hugging Face's name and in its layout; views,
    not copies."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        assert tensor is not None, f"{name} has no gradient"
        tensors[hugging_face_name(name)] = tensor.t() if is_conv1d(name) else tensor
    return tensors


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def atomic_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` if the block succeeds and vanishes if not.

    Raises:
        CheckpointError: if ``target`` exists and ``overwrite`` is false, or is not a directory.
    """
    target = target.absolute()
    if target.exists() and not (overwrite and target.is_dir()):
        raise CheckpointError(f"{target} exists already; choose another path or remove it")
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    retired = staging.with_name(staging.name + ".old")
    try:
        staging.chmod(0o755)
        yield staging
        if target.exists():
            target.rename(retired)
        staging.rename(target)
    except BaseException:
        if retired.exists():
            retired.rename(target)
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):  # not empty: another has used it meanwhile
            for parent in made:
                parent.rmdir()
        raise
    if retired.exists():
        shutil.rmtree(retired)
