"""What several test files share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Before anything imports Triton: kernels then run in its interpreter, on CPU tensors, also where
# there is a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

from gptile.model.config import GPT2Config
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer
from gptile.weights import load
from gptile.weights.files import DEMO

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def gpt2_bpe() -> Path:
    """Directory of the real GPT-2 vocabulary."""
    directory = SHARED / "gpt2-bpe"
    if not directory.exists():
        pytest.skip("needs GPT-2's vocab.json and merges.txt in ../shared/gpt2-bpe")
    return directory


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """The text the demo was trained on."""
    path = SHARED / "data" / "tinyshakespeare.txt"
    if not path.exists():
        pytest.skip("needs ../shared/data/tinyshakespeare.txt")
    return path


@pytest.fixture(scope="session")
def demo() -> tuple[GPT2, Tokenizer]:
    model, tokenizer = load(DEMO)
    assert tokenizer is not None
    return model, tokenizer


@pytest.fixture(scope="session")
def small_model() -> Callable[..., GPT2]:
    """Makes models in evaluation mode, with every parameter random and attention that is not flat;
    keywords are config fields."""

    def make(dtype: torch.dtype = torch.float32, **fields: object) -> GPT2:
        defaults = {"vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 3}
        defaults |= {"initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": None}
        model = GPT2(GPT2Config(**{**defaults, **fields}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.to(dtype).eval()

    return make


@pytest.fixture
def model(small_model: Callable[..., GPT2]) -> GPT2:
    return small_model()
