"""Where the time and the memory of a prefill, of decode steps or of training steps go.

torch.profiler records what ran. The model's operations appear in it as ranges named after where
they belong, "layer 3/attention", outside the blocks "model/embedding"; on a GPU the same ranges are
NVTX's, for Nsight Systems. They are around forward operations: what backward runs stands under
autograd's own names. Recording costs time itself, above all on short operations: shares mislead
less than times, and speed is for ``gptile bench model`` to measure.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from gptile.bench.checkpoints import checkpoint_directory
from gptile.bench.environment import NO_GPU
from gptile.bench.result import Result, save_record
from gptile.bench.workloads import use_ops, workload, wrap_ops
from gptile.kernels import Ops
from gptile.model.config import GPT2Config
from gptile.model.gpt2 import GPT2
from gptile.weights import open_checkpoint
from gptile.weights.save import atomic_directory

NOTES = [
    "recording slows short operations most: trust shares more than times",
    "an operation's memory is what it allocated less what it freed; over time, all tensors' "
    "memory above its lowest moment",
]
_POINTS = 1000
"""Of a timeline at most; each is the highest of what it stands for."""
_MICROSECOND = 1e-6


def ranged(ops: Ops, layer: int | None, device: torch.device) -> Ops:
    """Each operation in a range named after it and its layer."""
    place = "model" if layer is None else f"layer {layer}"

    def wrap(name: str, operation: Callable) -> Callable:
        label = f"{place}/{name}"

        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(label):
                if device.type != "cuda":
                    return operation(*args, **kwargs)
                with torch.cuda.nvtx.range(label):
                    return operation(*args, **kwargs)

        return call

    return wrap_ops(ops, wrap)


def profile_model(
    source: str,
    task: str,
    *,
    rows: int,
    tokens: int,
    steps: int,
    dtype: torch.dtype,
    device: torch.device,
    choose_ops: Callable[[GPT2Config], Ops | None],
    output: Path | None,
    seed: int = 0,
) -> dict[str, Any]:
    """The record of a profile, see :func:`profile_task`.

    Args:
        source: a checkpoint, see :func:`~gptile.bench.checkpoints.checkpoint_directory`.
        dtype, device: of the model.
        choose_ops: its operations, from its config; None for what runs best.
        output: a new directory for the record, a Chrome trace and a plot; complete or not there.

    Raises:
        UserError: if there is no such checkpoint, ``output`` exists, or the context is too short.
    """
    settings = {"model": source, "task": task, "rows": rows, "tokens": tokens, "steps": steps}
    settings["dtype"] = str(dtype).removeprefix("torch.")
    with ExitStack() as stack:
        if output:  # refuse before the long work, not after it
            from gptile.bench.figures import save_figure
            from gptile.bench.plots import plot_profile
        staging = stack.enter_context(atomic_directory(output)) if output else None
        checkpoint = open_checkpoint(stack.enter_context(checkpoint_directory(source)))
        model = checkpoint.load_model(dtype=dtype, device=device, ops=choose_ops(checkpoint.config))
        trace = staging / "trace.json.gz" if staging else None
        found = profile_task(
            model, task, rows=rows, tokens=tokens, steps=steps, seed=seed, trace=trace
        )
        record = Result("profile", settings, found, NOTES, device.type, seed).record()
        if staging:
            save_record(record, staging / "profile.json")
            save_figure(plot_profile(record), staging / "profile.png")
    return record


def profile_task(
    model: GPT2, task: str, *, rows: int, tokens: int, steps: int, seed: int, trace: Path | None
) -> list[dict[str, Any]]:
    """Record a task of :func:`~gptile.bench.workloads.workload`, once it is warm.

    Args:
        model: in evaluation mode; its operations are wrapped by this call.
        task: ``prefill``, ``decode`` or ``train``.
        rows, tokens: prompts and tokens of each.
        steps: prefills, decode steps or training steps to record.
        seed: of the ids.
        trace: where to write a Chrome trace, ``.json`` or ``.json.gz``.

    Returns:
        a row for each operation (``self_seconds`` without what it called, ``share`` of all such
        time, ``calls``, and ``memory`` in bytes, allocated less freed), for each range
        (``total_seconds``), a timeline of the memory of tensors, and one of the GPU's load.
    """
    device, plain = model.wte.weight.device, model.ops
    generator = torch.Generator().manual_seed(seed)
    n_steps = steps if task == "decode" else 0
    ids = torch.randint(model.config.vocab_size, (rows, tokens + n_steps), generator=generator)
    use_ops(model, lambda layer: ranged(plain, layer, device))
    work = workload(model, task, ids.to(device), n_steps)
    work.run()
    model.zero_grad()  # freed while recording, it would be missing from the memory's count
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with (
        _watching(device) as load,
        profile(activities=activities, record_shapes=True, profile_memory=True) as profiler,
    ):
        for _ in range(1 if task == "decode" else steps):
            work.run()
        if on_gpu:
            torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    found = profiler.key_averages()
    return [*_operations(found, on_gpu), *_ranges(found, on_gpu), _memory(profiler, device), load]


def _operations(averages: Iterable[Any], on_gpu: bool) -> list[dict[str, Any]]:
    """On a GPU its kernels and copies, else what the CPU ran."""
    which = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = [
        {
            "subject": {"operation": one.key},
            "self_seconds": _MICROSECOND
            * (one.self_device_time_total if on_gpu else one.self_cpu_time_total),
            "calls": one.count,
            "memory": one.self_device_memory_usage if on_gpu else one.self_cpu_memory_usage,
        }
        for one in averages
        if one.device_type == which and not _is_range(one) and one.key != "[memory]"
    ]
    total = sum(row["self_seconds"] for row in rows)
    for row in rows:
        row["share"] = row["self_seconds"] / total
    return sorted(rows, key=lambda row: -row["self_seconds"])


def _ranges(averages: Iterable[Any], on_gpu: bool) -> list[dict[str, Any]]:
    return [
        {
            "subject": {"range": one.key},
            "total_seconds": _MICROSECOND
            * (one.device_time_total if on_gpu else one.cpu_time_total),
            "calls": one.count,
        }
        for one in averages
        if _is_range(one) and one.device_type == DeviceType.CPU
    ]


def _is_range(average: Any) -> bool:
    return average.key.startswith(("layer ", "model/"))


def _memory(profiler: profile, device: torch.device) -> dict[str, Any]:
    """Bytes of tensors over the recording, above its lowest moment."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    held, points = 0, [(0.0, 0)]
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type() == kind:
            held += event.nbytes()
            points.append(((event.start_ns() - results.trace_start_ns()) * 1e-9, held))
    lowest = min(held for _, held in points)
    points = thinned([(when, held - lowest) for when, held in points])
    return {
        "subject": {"timeline": f"{device.type} memory"},
        "times": [when for when, _ in points],
        "bytes": [held for _, held in points],
    }


def thinned(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most :data:`_POINTS` of them, evenly many for each and the highest kept."""
    size = -(-len(points) // _POINTS)
    chunks = (points[start : start + size] for start in range(0, len(points), size))
    return [max(chunk, key=lambda point: point[1]) for chunk in chunks]


@contextmanager
def _watching(device: torch.device) -> Iterator[dict[str, Any]]:
    """A row that fills, in a thread, with the GPU's load by NVML: seconds, per cent of the time
    that a kernel ran, and bytes in use by all processes. The driver averages load over up to a
    second, so a short recording shows what came before it too."""
    row: dict[str, Any] = {"subject": {"timeline": "gpu"}}
    if device.type != "cuda":
        yield row | {"skipped": NO_GPU}
        return
    try:
        import pynvml
    except ImportError:
        why = "nvidia-ml-py is needed: in the repository, pip install '.[bench]'"
        yield row | {"skipped": why}
        return
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError as error:  # AMD's, or a part whose load the driver does not report
        yield row | {"skipped": f"NVML: {error}"}
        return
    row |= {"times": [], "utilisation": [], "used": []}
    started, over = time.perf_counter(), threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            row["times"].append(time.perf_counter() - started)
            row["utilisation"].append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            row["used"].append(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield row
    finally:
        over.set()
        thread.join()
