"""Environment verification: what this machine has, what will run where and why, and for each
problem the next step to take."""

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from gptile.kernels.ops import MIN_CAPABILITY, Ops
from gptile.model.errors import UserError
from gptile.model.generation import generate
from gptile.model.sampling import SamplingParams
from gptile.weights import load


@dataclass(frozen=True)
class Check:
    """One finding. ``note`` is worth knowing and stops nothing; ``fail`` stops something."""

    name: str
    status: Literal["ok", "note", "fail"]
    finding: str
    next_step: str = ""


def examine() -> list[Check]:
    """Run every check; none raises."""
    checks: list[Check] = []
    for name, check in (
        ("Python", _python),
        ("PyTorch", _pytorch),
        ("CPU", _cpu),
        ("memory", _memory),
        ("CUDA", _cuda),
        ("Triton", _triton),
        ("hub cache", _hub),
        ("forward pass", _forward_pass),
        ("what runs where", _plan),
    ):
        try:
            checks.append(check(name))
        except Exception as error:  # a check that breaks is itself a finding
            step = "report this with the output of gptile doctor --json"
            checks.append(Check(name, "fail", f"{type(error).__name__}: {error}", step))
    return checks


def _python(name: str) -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Check(name, "fail", found, "use Python 3.10 to 3.13")
    return Check(name, "ok", found)


def _pytorch(name: str) -> Check:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    return Check(name, "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def _cpu(name: str) -> Check:
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{os.cpu_count()} cores, {capability}"
    if not _fast_16_bit_cpu():
        return Check(
            name,
            "note",
            f"{found}, no native 16-bit products",
            "keep --dtype float32 on this CPU: 16-bit types are far slower",
        )
    return Check(name, "ok", f"{found}, native bf16 products")


def _fast_16_bit_cpu() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _memory(name: str) -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    if memory.available < 2**30:
        return Check(
            name, "note", found, "GPT-2 124M needs about 1 GiB; close something or use demo"
        )
    return Check(name, "ok", found)


def _cuda(name: str) -> Check:
    driver = Path("/proc/driver/nvidia/version")
    if torch.cuda.is_available():
        parts = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            arch = f"sm_{properties.major}{properties.minor}"
            if torch.version.hip:
                arch = properties.gcnArchName
            parts.append(
                f"{properties.name} {arch}, {free / 2**30:.1f} GiB free of {total / 2**30:.1f}"
            )
        return Check(name, "ok", "; ".join(parts))
    if driver.exists() and not torch.version.cuda:
        return Check(
            name, "fail", "a GPU driver is here but PyTorch is a CPU build", "reinstall PyTorch"
        )
    if driver.exists():
        step = "update the driver, or install a PyTorch built for the CUDA it supports"
        return Check(name, "fail", "a GPU driver is here but CUDA does not start", step)
    return Check(name, "note", "no NVIDIA GPU or driver", "none needed: everything runs on the CPU")


def _triton(name: str) -> Check:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        step = "pip install triton" if platform.system() == "Linux" else "Triton needs Linux"
        return Check(name, "note", "not installed", step)
    if not torch.cuda.is_available():
        return Check(name, "ok", f"{version}, without a GPU to run on")
    capability = torch.cuda.get_device_capability()
    if not torch.version.hip and capability < MIN_CAPABILITY:
        found = f"{version}, but sm_{capability[0]}{capability[1]} is older than sm_80"
        return Check(name, "note", found, "PyTorch operations are used on this GPU")
    compilers = [os.environ.get("CC"), "gcc", "clang", "cc"]
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        found = f"{version}, but no C compiler, which its launcher needs"
        return Check(name, "fail", found, "install gcc, or use --kernels torch")
    return Check(name, "ok", version)


def _hub(name: str) -> Check:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        return Check(name, "note", f"{cache}, offline by HF_HUB_OFFLINE", "unset it to download")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Check(
            name, "fail", f"{cache} is not writable", "set HF_HOME to a writable directory"
        )
    return Check(name, "ok", str(cache))


def _forward_pass(name: str) -> Check:
    try:
        started = time.perf_counter()
        model, tokenizer = load("demo", device=_default_device())
        loaded = time.perf_counter() - started
        greedy = SamplingParams(temperature=0, max_new_tokens=16)
        text = generate(model, "ROMEO:", greedy, tokenizer=tokenizer)[0].text
    except UserError as error:
        return Check(name, "fail", str(error), "reinstall gptile: the demo checkpoint is damaged")
    except RuntimeError as error:  # of the driver, or of Triton's launcher
        found = " ".join(str(error).split())
        return Check(name, "fail", found, "generate runs with --device cpu or --kernels torch")
    found = f"demo on {_default_device()}, loaded in {loaded:.2f} s; ROMEO: continues as {text!r}"
    return Check(name, "ok", found)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _plan(name: str) -> Check:
    device = _default_device()
    why = "a CUDA device is here" if device == "cuda" else "no CUDA device is here"
    kernels = "PyTorch" if Ops.default(torch.device(device)) == Ops.torch() else "Triton"
    return Check(name, "ok", f"{device} by default, because {why}; {kernels} operations, float32")
