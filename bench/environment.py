"""Where and how a result came about: machine, clocks, versions, commit and command."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

NO_GPU = "no GPU here"
"""Why something was not run."""
PACKAGES = (
    "gptile",
    "torch",
    "triton",
    "transformers",
    "numpy",
    "safetensors",
    "liger-kernel",
    "flash-attn",
    "xformers",
    "flag-gems",
    "onnxruntime",
    "ctranslate2",
    "llama-cpp-python",
    "openvino",
    "openvino-genai",
    "numba",
)
"""Whose versions a result carries, where they are installed."""


def environment(device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
    """What a reader needs to judge a measurement, and to repeat it.

    Clocks are in MHz and memory in bytes. ``commit`` is None outside a checkout, and ends in
    ``+`` where files differ from it. ``load_average`` is that of the last minute: above the number
    of cores the machine had other work too.
    """
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "seed": seed,
        "device": "cuda" if torch.device(device).type == "cuda" else "cpu",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "versions": _versions(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = _gpu(torch.device(device))
    return found


def _cpu() -> dict[str, Any]:
    clocks = psutil.cpu_freq()
    return {
        "name": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "clock": clocks.current if clocks else None,
        "memory": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    try:
        import pynvml
    except ImportError:
        return {**found, "driver": None, "why": "nvidia-ml-py is not installed: no clocks, driver"}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        return {
            **found,
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "clock": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "clock_limit": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
    except pynvml.NVMLError as error:  # AMD's, or a part that the driver does not report
        return {**found, "driver": None, "why": str(error)}


def _commit() -> str | None:
    """Of the checkout this file lies in, if it is one of GPTile's."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}+" if _git(root, "status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
