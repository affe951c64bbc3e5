"""Read a Hugging Face checkpoint into a model, strictly: every tensor accounted for by name and
shape before the first byte of weights is read."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptile.kernels import Ops
from gptile.model.config import GPT2Config, read_json_object
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2, default_ops
from gptile.model.tokenizer import NoTokenizerError, Tokenizer
from gptile.weights.errors import CheckpointError
from gptile.weights.files import CheckpointFiles, find_checkpoint
from gptile.weights.names import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    HEAD,
    TOKEN_EMBEDDING,
    TOKEN_ID_FIELDS,
    canonical_name,
    is_conv1d,
    is_mask_buffer,
)
from gptile.weights.safetensors_file import FLOAT_DTYPES, open_safetensors

_SHOWN = 4
"""How many tensors of a kind an error names."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, as stored; its values are read when asked for.

    Attributes:
        key: its name in the file.
        file: where it is.
        dtype: a safetensors name, such as "F32".
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def build_model(
    config: GPT2Config,
    stored: Mapping[str, StoredTensor],
    where: Path,
    *,
    conv1d: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
) -> GPT2:
    """A model in evaluation mode with its weights. Peak memory: the parameters plus one tensor.

    Args:
        config: of the network.
        stored: tensors by canonical name.
        where: they come from, for errors.
        conv1d: whether the four Conv1D weights are stored ``[in, out]``, as Hugging Face does.
        dtype: of the parameters.
        device: of the parameters.
        ops: default :func:`~gptile.model.gpt2.default_ops`.

    Raises:
        CheckpointError: naming each tensor that is missing, unknown, misshapen, not a float, or
            too large for ``dtype``.
    """
    stored = with_embedding(config, stored)
    shapes = check_tensors(config, stored, where, conv1d=conv1d)
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied(stored[HEAD], stored[TOKEN_EMBEDDING])
    state: dict[str, Tensor] = {}
    # Largest first: its temporary copy is gone before the rest of the parameters are resident.
    for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
        state[name] = torch.empty(shapes[name], dtype=dtype, device=device)
        tensor = stored[name].read()
        state[name].copy_(tensor.t() if conv1d and is_conv1d(name) else tensor)
        if dtype == torch.float16 and state[name].isinf().any() and not tensor.isinf().any():
            raise CheckpointError(
                f"{where}: {stored[name].key} has values beyond float16 (up to "
                f"{tensor.abs().max().item():.3g}); use bfloat16 or float32"
            )
        del tensor
    with torch.device("meta"):
        model = GPT2(config, ops or default_ops(config, torch.device(device), dtype))
    model.load_state_dict(state, assign=True)
    return model.eval()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and whose config was read."""

    files: CheckpointFiles
    config: GPT2Config

    def load_model(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
    ) -> GPT2:
        """The model; see :func:`build_model`."""
        return build_model(
            self.config,
            self.stored_tensors(),
            self.files.directory,
            conv1d=True,
            dtype=dtype,
            device=device,
            ops=ops,
        )

    def load_tokenizer(self) -> Tokenizer:
        """The tokeniser in the checkpoint's directory.

        Raises:
            TokenizerError: if it has none, or not a GPT-2 one, or a damaged one.
        """
        return Tokenizer.from_directory(self.files.directory, self.config)

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the files by its canonical name, stored causal masks left out."""
        found: dict[str, StoredTensor] = {}
        for path in self.files.weights:
            with open_safetensors(path) as file:
                views = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            for key, view in views.items():
                add_tensor(
                    found,
                    StoredTensor(
                        key,
                        path,
                        tuple(view.get_shape()),
                        view.get_dtype(),
                        partial(_read_tensor, path, key),
                    ),
                )
        return found


def _read_tensor(path: Path, key: str) -> Tensor:
    with open_safetensors(path) as file:
        return file.get_tensor(key)


def add_tensor(found: dict[str, StoredTensor], tensor: StoredTensor) -> None:
    """File a tensor under its canonical name, unless it is a stored causal mask.

    Raises:
        CheckpointError: if another key is the same parameter.
    """
    name = canonical_name(tensor.key)
    if is_mask_buffer(name):
        return
    if name in found:
        raise CheckpointError(
            f"{tensor.file}: {tensor.key} and {found[name].key} are the same parameter"
        )
    found[name] = tensor


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint (see :func:`~gptile.weights.files.find_checkpoint`) and read its config.

    The ids in ``generation_config.json``, where it has them, replace the config's, as they do in
    transformers' ``generate``.

    Raises:
        UserError: if it is not there, or is not a GPT-2 that we can run exactly.
    """
    files = find_checkpoint(source, revision)
    return Checkpoint(files, read_config(files.directory))


def read_config(directory: Path) -> GPT2Config:
    """``config.json``, with the ids that ``generation_config.json`` has instead of its own.

    Raises:
        UserError: naming the file that is missing or wrong.
    """
    config = GPT2Config.from_json(directory / CONFIG_FILE)
    path = directory / GENERATION_CONFIG_FILE
    if not path.exists():
        return config
    generation = read_json_object(path)
    ids: dict[str, Any] = {n: generation[n] for n in TOKEN_ID_FIELDS if n in generation}
    try:
        return dataclasses.replace(config, **ids)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load(
    source: str | Path = "demo",
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
) -> tuple[GPT2, Tokenizer | None]:
    """The model and its tokeniser, None where the checkpoint has none of GPT-2's kind.

    Example:
        >>> model, tokenizer = load("gpt2", device="cuda", dtype=torch.bfloat16)

    Raises:
        UserError: see :func:`open_checkpoint` and :func:`build_model`.
    """
    checkpoint = open_checkpoint(source, revision)
    model = checkpoint.load_model(dtype=dtype, device=device, ops=ops)
    try:
        return model, checkpoint.load_tokenizer()
    except NoTokenizerError:
        return model, None


def with_embedding(
    config: GPT2Config, stored: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """A tied matrix may be stored under the head's name alone; it is the embedding."""
    if config.tie_word_embeddings and HEAD in stored and TOKEN_EMBEDDING not in stored:
        others = {name: tensor for name, tensor in stored.items() if name != HEAD}
        return {TOKEN_EMBEDDING: stored[HEAD], **others}
    return stored


def parameter_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, as the model keeps it."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT2(config).named_parameters()}


def check_tensors(
    config: GPT2Config, stored: Mapping[str, StoredTensor], where: Path, *, conv1d: bool
) -> dict[str, tuple[int, ...]]:
    """Check that every parameter is stored, in its shape, as a float, and nothing else is.

    A tied head may be stored beside the embedding it is.

    Returns:
        The shape of every parameter, as the model keeps it.

    Raises:
        CheckpointError: naming what does not fit.
    """
    shapes = parameter_shapes(config)
    expected = {
        name: shape[::-1] if conv1d and is_conv1d(name) else shape for name, shape in shapes.items()
    }
    allowed = expected.keys() | {HEAD}
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"missing {_some(missing)}")
    if unknown := [t.key for name, t in stored.items() if name not in allowed]:
        problems.append(f"unknown {_some(unknown)}")
    known = [(stored[name], shape) for name, shape in expected.items() if name in stored]
    problems += [
        f"{tensor.key} is {list(tensor.shape)} where the config makes it {list(shape)}"
        for tensor, shape in known
        if tensor.shape != shape
    ][:_SHOWN]
    problems += [
        f"{tensor.key} is {tensor.dtype}, not a float"
        for tensor, _ in known
        if tensor.dtype not in FLOAT_DTYPES
    ][:_SHOWN]
    if problems:
        raise CheckpointError(f"{where}: weights do not fit the config: {'; '.join(problems)}")
    return shapes


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    if head.shape != embedding.shape or not torch.equal(head.read(), embedding.read()):
        raise CheckpointError(
            f"{head.file}: {head.key} differs from {embedding.key} though the config ties them; "
            'if the head is a separate one, set "tie_word_embeddings": false in config.json'
        )
