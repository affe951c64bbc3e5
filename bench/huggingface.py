"""The one place that imports transformers.

transformers probes for Hugging Face's own library called ``kernels`` and, with this repository's
root on ``sys.path`` (as ``python -m`` puts it there), finds our folder of that name instead. So the
import happens with such directories off the path.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gptile.model.errors import UserError


@contextmanager
def _our_kernels_off_path() -> Iterator[None]:
    saved = list(sys.path)
    sys.path[:] = [entry for entry in saved if not Path(entry, "kernels", "ops.py").exists()]
    try:
        yield
    finally:
        sys.path[:] = saved


def import_transformers() -> Any:
    """The transformers module, with what GPT-2 needs of it already imported.

    Raises:
        UserError: if it is not installed.
    """
    with _our_kernels_off_path():
        try:
            import transformers
        except ImportError:
            raise UserError(
                "transformers is needed: in the repository, pip install '.[bench]'"
            ) from None
        import transformers.integrations.hub_kernels
        import transformers.models.gpt2.modeling_gpt2
        from transformers.utils.import_utils import is_kernels_available

        is_kernels_available()  # remembers its answer
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load_reference(
    directory: Path,
    dtype: torch.dtype,
    attention: str = "eager",
    device: torch.device | str = "cpu",
) -> Any:
    """GPT2LMHeadModel in evaluation mode, from a local directory.

    Args:
        attention: ``eager`` (plain products and softmax) or ``sdpa`` (PyTorch's fused one).

    Raises:
        UserError: where transformers finds no checkpoint.
    """
    transformers = import_transformers()
    # The flag forces fp32 scores, the same function but for rounding; in fp64 it only fails.
    exact = {"reorder_and_upcast_attn": False} if dtype == torch.float64 else {}
    try:
        model = transformers.GPT2LMHeadModel.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, local_files_only=True, **exact
        )
    except OSError as error:
        raise UserError(f"transformers cannot read {directory}: {error}") from None
    return model.to(device).eval()
