"""Safetensors files on disk (https://huggingface.co/docs/safetensors): checked opening, and writing
tensor by tensor, so that neither holds a second copy of the model in memory."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptile.weights.errors import CheckpointError

FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes we read and write, by their safetensors names."""


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype; PyTorch's where it is not one of ours."""
    return next((name for name, known in FLOAT_DTYPES.items() if known == dtype), str(dtype))


def open_safetensors(path: Path) -> Any:
    """Open a file for memory-mapped reading; use as a context manager.

    Raises:
        CheckpointError: if it is missing or not a whole safetensors file, saying what it is.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {_diagnose(path, error)}") from None


def _diagnose(path: Path, error: Exception) -> str:
    if path.is_dir():
        return "a directory, not a safetensors file"
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(512)
    if size == 0:
        return "the file is empty; download it again"
    if start.lstrip()[:1] == b"<":
        return "an HTML or XML page, not safetensors: a failed download; fetch the file again"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights; run `git lfs pull` where it was cloned"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "a PyTorch pickle, not safetensors; run `gptile convert` on it first"
    if "MetadataIncompleteBuffer" in str(error) or "header" in str(error).lower():
        return f"damaged or cut short at {size:,} bytes ({error}); fetch the file again"
    return f"not a safetensors file ({error})"


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write a file that safetensors, and so transformers, reads. Flushed to disk on return.

    Args:
        path: of the file.
        tensors: any device and strides; one at a time is made contiguous and converted.
        dtype: to store them in; default each one's own.

    Raises:
        OSError: on a full disk and the like; what is then at ``path`` is not a whole file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        stored = dtype or tensor.dtype
        end = offset + tensor.numel() * stored.itemsize
        header[name] = {
            "dtype": dtype_name(stored),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            flat = tensor.detach().to("cpu", dtype or tensor.dtype).reshape(-1).contiguous()
            file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
