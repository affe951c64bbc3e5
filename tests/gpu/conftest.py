"""Where the checks of this directory run: at full size on a GPU, under the mark ``gpu``, and cut
down in the interpreter, which proves the checks themselves where there is no GPU."""

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import pytest
import torch

from gptile.kernels import Ops
from gptile.kernels.launch import Shape, interpreting

GPU = pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")
MOST = {"rows": 2, "tokens": 10, "vocab": 70, "in": 70, "out": 40, "few": 3, "cols": 70}
MOST |= {"heads": 2, "length": 70}


def pick(wanted: str) -> str:
    """That device, or a skip that says what is missing."""
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if wanted == "cuda" and interpreting():
        pytest.skip("kernels are interpreted on the CPU: TRITON_INTERPRET=0 pytest -m gpu")
    if wanted == "cuda" and Ops.default(torch.device("cuda")) != Ops.triton():
        pytest.skip("needs a GPU that can run the kernels")
    if wanted == "cpu" and not interpreting():
        pytest.skip("needs TRITON_INTERPRET=1")
    return wanted


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), GPU])
def device(request: pytest.FixtureRequest) -> str:
    return pick(request.param)


@pytest.fixture(params=[GPU])
def gpu(request: pytest.FixtureRequest) -> str:
    """For what the interpreter cannot show."""
    return pick(request.param)


@pytest.fixture
def cases(device: str) -> Callable[[ModuleType], Mapping[str, Shape]]:
    """The cases of a kernel file; in the interpreter the first and the last, cut down."""

    def choose(module: ModuleType) -> Mapping[str, Shape]:
        if device == "cuda":
            return module.CASES
        names = [*module.CASES]
        return {
            name: {n: min(size, MOST.get(n, size)) for n, size in module.CASES[name].items()}
            for name in (names[0], names[-1])
        }

    return choose


@pytest.fixture
def room(device: str) -> Callable[[float], None]:
    """Skips where the GPU has fewer gigabytes free."""

    def check(gigabytes: float) -> None:
        if device == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0] / 1e9
            if free < gigabytes:
                pytest.skip(f"needs {gigabytes} GB of the GPU's memory; {free:.1f} GB are free")

    return check


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """fp32 products are fp32's, and no library rounds the partial sums of 16-bit ones: PyTorch's
    error is what ours is measured by."""
    matmul = torch.backends.cuda.matmul
    reduced = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = {name: getattr(matmul, name) for name in ("allow_tf32", *reduced)}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for name in before:
        setattr(matmul, name, False)
    yield
    torch.set_float32_matmul_precision(precision)
    for name, value in before.items():
        setattr(matmul, name, value)
