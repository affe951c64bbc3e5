"""GPT-2 from scratch, equal to transformers: ``from gptile import load, generate``.

Names are imported on first use, so that the command line answers ``--help`` without PyTorch.
"""

from importlib import import_module
from importlib.metadata import version
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptile.kernels import Ops
    from gptile.model.config import PRESETS, GPT2Config
    from gptile.model.drafting import DraftModel, PromptLookup
    from gptile.model.errors import UserError
    from gptile.model.generation import Completion, TokenEvent, generate, stream
    from gptile.model.gpt2 import GPT2, GPT2Output
    from gptile.model.kv_cache import ContextLengthError, KVCache
    from gptile.model.sampling import SamplingParams
    from gptile.model.tokenizer import Tokenizer, TokenizerError
    from gptile.weights import Checkpoint, CheckpointError, load, open_checkpoint, save_checkpoint

# The other rooms may lie elsewhere on the path: beside an installed gptile when this one is the
# working directory's.
__path__ = extend_path(__path__, __name__)
__version__ = version("gptile")

_HOMES = {
    "Ops": "kernels",
    "GPT2Config": "model.config",
    "PRESETS": "model.config",
    "DraftModel": "model.drafting",
    "PromptLookup": "model.drafting",
    "UserError": "model.errors",
    "Completion": "model.generation",
    "TokenEvent": "model.generation",
    "generate": "model.generation",
    "stream": "model.generation",
    "GPT2": "model.gpt2",
    "GPT2Output": "model.gpt2",
    "ContextLengthError": "model.kv_cache",
    "KVCache": "model.kv_cache",
    "SamplingParams": "model.sampling",
    "Tokenizer": "model.tokenizer",
    "TokenizerError": "model.tokenizer",
    "Checkpoint": "weights",
    "CheckpointError": "weights",
    "load": "weights",
    "open_checkpoint": "weights",
    "save_checkpoint": "weights",
}
__all__ = [
    "GPT2",
    "PRESETS",
    "Checkpoint",
    "CheckpointError",
    "Completion",
    "ContextLengthError",
    "DraftModel",
    "GPT2Config",
    "GPT2Output",
    "KVCache",
    "Ops",
    "PromptLookup",
    "SamplingParams",
    "TokenEvent",
    "Tokenizer",
    "TokenizerError",
    "UserError",
    "generate",
    "load",
    "open_checkpoint",
    "save_checkpoint",
    "stream",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gptile' has no attribute {name!r}")
    return getattr(import_module(f"gptile.{_HOMES[name]}"), name)
