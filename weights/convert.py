"""Turn checkpoints that are pickles, or of another layout or dtype, into Hugging Face directories
of safetensors. The one place that reads pickle, and only with ``weights_only=True``."""

import dataclasses
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer
from gptile.weights.checkpoint import (
    StoredTensor,
    add_tensor,
    build_model,
    open_checkpoint,
    parameter_shapes,
    read_config,
)
from gptile.weights.errors import CheckpointError
from gptile.weights.files import local_path, shard_paths
from gptile.weights.names import (
    CONFIG_FILE,
    HEAD,
    PICKLE_FILE,
    PICKLE_INDEX_FILE,
    PICKLE_SUFFIXES,
    TOKEN_EMBEDDING,
)
from gptile.weights.safetensors_file import FLOAT_DTYPES, dtype_name
from gptile.weights.save import atomic_directory, write_model

# nanoGPT rounds GPT-2's vocabulary up to a multiple of 64; the rows between have no token.
_NANOGPT_PADDED_VOCAB, _GPT2_VOCAB = 50304, 50257
_NANOGPT_ARGS = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout"}


@dataclass
class _Source:
    """A checkpoint that was opened: its tensors by canonical name, and how they lie."""

    config: GPT2Config
    tensors: dict[str, StoredTensor]
    conv1d: bool


def convert(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_from: Path | None = None,
    vocab_size: int | None = None,
) -> GPT2:
    """Write ``source`` as a Hugging Face directory of safetensors at ``target``.

    Args:
        source: a directory with ``pytorch_model.bin`` (or its shards and index), such a file, a
            nanoGPT ``ckpt.pt``, or a local safetensors checkpoint.
        target: directory to make.
        dtype: to store; default the dtype of the source's token embedding.
        tokenizer_from: directory whose tokeniser files to add; default the source's.
        vocab_size: drop the embedding rows from this id on; by default nanoGPT's padded 50304
            becomes 50257 and anything else is kept.

    Returns:
        The model that was written.

    Raises:
        UserError: if the source cannot be read as a GPT-2, or ``target`` exists.
        OSError: if it cannot be written; nothing is left behind.
    """
    source = local_path(source)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or directory")
    directory = source if source.is_dir() else source.parent
    with atomic_directory(target) as staging:
        found = _open(source, directory)
        if vocab_size is None and not found.conv1d:
            padded = found.config.vocab_size == _NANOGPT_PADDED_VOCAB
            vocab_size = _GPT2_VOCAB if padded else None
        if vocab_size is not None:
            _trim_vocabulary(found, vocab_size, source)
        if dtype is None:
            embedding = found.tensors.get(TOKEN_EMBEDDING)
            dtype = FLOAT_DTYPES.get(embedding.dtype if embedding else "", torch.float32)
        model = build_model(found.config, found.tensors, source, conv1d=found.conv1d, dtype=dtype)
        if tokenizer_from is not None:
            Tokenizer.from_directory(tokenizer_from, model.config)
        write_model(model, staging, tokenizer_from=tokenizer_from or directory)
    return model


def _open(source: Path, directory: Path) -> _Source:
    pickles: tuple[Path, ...] = ()
    if source.suffix in PICKLE_SUFFIXES and source.is_file():
        pickles = (source,)
    elif source.is_dir() and not any(source.glob("*.safetensors")):
        if (source / PICKLE_FILE).exists():
            pickles = (source / PICKLE_FILE,)
        elif (source / PICKLE_INDEX_FILE).exists():
            pickles = shard_paths(source / PICKLE_INDEX_FILE)
    if not pickles:
        checkpoint = open_checkpoint(source)
        return _Source(checkpoint.config, checkpoint.stored_tensors(), conv1d=True)

    objects = [_load_pickle(path) for path in pickles]
    if isinstance(objects[0], dict) and {"model", "model_args"} <= objects[0].keys():
        return _open_nanogpt(objects[0], source)
    tensors: dict[str, StoredTensor] = {}
    for path, state in zip(pickles, objects, strict=True):
        _add_state_dict(tensors, state, path)
    if not (directory / CONFIG_FILE).exists():
        raise CheckpointError(f"{directory}: no {CONFIG_FILE} beside {pickles[0].name}")
    return _Source(read_config(directory), tensors, conv1d=True)


def _load_pickle(path: Path) -> Any:
    try:
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: refused: not a PyTorch file of plain tensors, and anything else in a pickle "
            "may run code"
        ) from None
    except Exception as error:  # a damaged pickle fails in any way there is
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{path}: damaged or not a PyTorch file ({reason})") from None


def _add_state_dict(tensors: dict[str, StoredTensor], state: object, path: Path) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state dict")
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: the key {key!r} is not a name, so no state dict")
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {key} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta:
            raise CheckpointError(f"{path}: {key} is not a plain tensor with values")
        add_tensor(tensors, _stored(key, path, value))


def _stored(key: str, path: Path, tensor: Tensor) -> StoredTensor:
    return StoredTensor(key, path, tuple(tensor.shape), dtype_name(tensor.dtype), lambda: tensor)


def _open_nanogpt(saved: dict[str, Any], path: Path) -> _Source:
    args = saved["model_args"]
    if not isinstance(args, dict) or not _NANOGPT_ARGS - {"bias", "dropout"} <= args.keys():
        raise CheckpointError(f"{path}: model_args lacks the shape of a nanoGPT model")
    if unknown := sorted(args.keys() - _NANOGPT_ARGS):
        raise CheckpointError(f"{path}: model_args has {unknown[0]!r}, which nanoGPT does not")
    tensors: dict[str, StoredTensor] = {}
    _add_state_dict(tensors, saved["model"], path)
    head, embedding = tensors.get(HEAD), tensors.get(TOKEN_EMBEDDING)
    untied = head and embedding and not torch.equal(head.read(), embedding.read())
    gpt2_vocabulary = args["vocab_size"] in (_GPT2_VOCAB, _NANOGPT_PADDED_VOCAB)
    end_of_text = _GPT2_VOCAB - 1 if gpt2_vocabulary else None
    dropout = args.get("dropout", 0.0)
    try:
        config = GPT2Config(
            vocab_size=args["vocab_size"],
            n_positions=args["block_size"],
            n_embd=args["n_embd"],
            n_layer=args["n_layer"],
            n_head=args["n_head"],
            activation_function="gelu",  # nanoGPT's nn.GELU() is the erf form
            tie_word_embeddings=not untied,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )
    except UserError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not args.get("bias", True):
        # nanoGPT may train without biases; a bias of zero is the same function.
        for name, shape in parameter_shapes(config).items():
            if name.endswith(".bias") and name not in tensors:
                tensors[name] = _stored(name, path, torch.zeros(shape))
    return _Source(config, tensors, conv1d=False)


def _trim_vocabulary(found: _Source, vocab_size: int, source: Path) -> None:
    rows = found.config.vocab_size
    if not 0 < vocab_size <= rows:
        raise CheckpointError(f"{source}: cannot keep {vocab_size} of {rows} embedding rows")
    found.config = dataclasses.replace(found.config, vocab_size=vocab_size)
    for name in (TOKEN_EMBEDDING, HEAD):
        tensor = found.tensors.get(name)
        if tensor is not None and tensor.shape and tensor.shape[0] == rows:
            kept = tensor.read()[:vocab_size]
            found.tensors[name] = _stored(tensor.key, tensor.file, kept)
