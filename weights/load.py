"""Read a Hugging Face checkpoint into a model, strictly: every tensor accounted for by name and
shape before the first byte of weights is read."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptile.kernels import Ops
from gptile.model.config import GPT2Config, read_json_object
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer, TokenizerError
from gptile.weights.errors import CheckpointError
from gptile.weights.files import CheckpointFiles, find_checkpoint
from gptile.weights.names import (
    HEAD,
    TOKEN_EMBEDDING,
    canonical_name,
    is_conv1d,
    is_mask_buffer,
)
from gptile.weights.safetensors_file import open_safetensors
from gptile.weights.save import CONFIG_FILE, GENERATION_CONFIG_FILE

_FLOATS = {"F64", "F32", "F16", "BF16"}
_SHOWN = 4


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not yet read."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        with open_safetensors(self.file) as file:
            return file.get_tensor(self.key)


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
        """The model with its weights, in evaluation mode.

        Peak memory is the parameters plus one tensor.

        Raises:
            CheckpointError: naming each tensor that is missing, unknown, misshapen or not a float.
        """
        stored = self.stored_tensors()
        with torch.device("meta"):
            model = GPT2(self.config, ops)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        _check(stored, shapes, self.files.directory)
        if self.config.tie_word_embeddings and (head := stored.pop(HEAD, None)):
            _check_tied(head, stored[TOKEN_EMBEDDING])
        state: dict[str, Tensor] = {}
        # Largest first: its temporary copy is gone before the rest of the parameters are resident.
        for name in sorted(shapes, key=lambda n: -torch.Size(shapes[n]).numel()):
            tensor = stored[name].read()
            state[name] = torch.empty(shapes[name], dtype=dtype, device=device)
            state[name].copy_(tensor.t() if is_conv1d(name) else tensor)
            del tensor
        model.load_state_dict(state, assign=True)
        return model.eval()

    def load_tokenizer(self) -> Tokenizer:
        """The tokeniser in the checkpoint's directory.

        Raises:
            TokenizerError: if it has none, or not a GPT-2 one: the model then runs on ids only.
        """
        return Tokenizer.from_directory(self.files.directory, self.config)

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the files by its canonical name, stored causal masks left out."""
        found: dict[str, StoredTensor] = {}
        for path in self.files.weights:
            with open_safetensors(path) as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    name = canonical_name(key)
                    if is_mask_buffer(name):
                        continue
                    if name in found:
                        raise CheckpointError(
                            f"{path}: {key} and {found[name].key} are the same parameter"
                        )
                    view = file.get_slice(key)
                    found[name] = StoredTensor(key, path, tuple(view.get_shape()), view.get_dtype())
        return found


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint (see :func:`~gptile.weights.files.find_checkpoint`) and read its config.

    The ids in ``generation_config.json``, where it has them, replace the config's, as they do in
    transformers' ``generate``.

    Raises:
        UserError: if it is not there, or is not a GPT-2 that we can run exactly.
    """
    files = find_checkpoint(source, revision)
    config = GPT2Config.from_json(files.directory / CONFIG_FILE)
    generation_path = files.directory / GENERATION_CONFIG_FILE
    if generation_path.exists():
        generation = read_json_object(generation_path)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids: dict[str, Any] = {name: generation[name] for name in names if name in generation}
        config = dataclasses.replace(config, **ids)
    return Checkpoint(files, config)


def load(
    source: str | Path = "demo",
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
) -> tuple[GPT2, Tokenizer | None]:
    """The model and its tokeniser, None where the checkpoint has none that fits.

    Example:
        >>> model, tokenizer = load("gpt2", device="cuda", dtype=torch.bfloat16)

    Raises:
        UserError: see :func:`open_checkpoint` and :meth:`Checkpoint.load_model`.
    """
    checkpoint = open_checkpoint(source, revision)
    model = checkpoint.load_model(dtype=dtype, device=device, ops=ops)
    try:
        return model, checkpoint.load_tokenizer()
    except TokenizerError:
        return model, None


def _check(
    stored: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], where: Path
) -> None:
    def expected(name: str) -> tuple[int, ...]:
        return shapes[name][::-1] if is_conv1d(name) else shapes[name]

    problems = []
    if missing := [name for name in shapes if name not in stored]:
        problems.append(f"missing {_some(missing)}")
    # A tied model may store its head too; `_check_tied` compares it.
    if unknown := [t.key for n, t in stored.items() if n not in shapes and n != HEAD]:
        problems.append(f"unknown {_some(unknown)}")
    known = {name: tensor for name, tensor in stored.items() if name in shapes}
    problems += [
        f"{tensor.key} is {list(tensor.shape)}, the config makes it {list(expected(name))}"
        for name, tensor in known.items()
        if tensor.shape != expected(name)
    ][:_SHOWN]
    problems += [
        f"{tensor.key} is {tensor.dtype}, not a float"
        for tensor in known.values()
        if tensor.dtype not in _FLOATS
    ][:_SHOWN]
    if problems:
        raise CheckpointError(f"{where}: the weights do not fit the config: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    if head.shape != embedding.shape or not torch.equal(head.read(), embedding.read()):
        raise CheckpointError(
            f"{head.file}: {head.key} differs from {embedding.key} though the config ties them; "
            'if the head is a separate one, set "tie_word_embeddings": false in config.json'
        )
