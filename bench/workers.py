"""One process an engine, resident while the others are measured.

Engines that shared a process would share its allocator, its thread pools and the libraries that
happened to be loaded first. A worker gets its number of threads through the environment, before
anything is imported, does what it is asked over a pipe, one line of JSON a request and one a
reply, and takes times and memory itself. Between requests it waits for a line, and uses no CPU.

Thread pools spin for a while after their work, hoping for more: a fifth of a second by default in
the one that CTranslate2 brings. Passive waiting would take that from an engine as people run it, so
:class:`Worker` is left its habits and every request comes :data:`SETTLE` seconds after the last.
"""

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptile.bench.engines import Setup, load_class

SETTLE = 0.3
"""Seconds before each timed request, for the threads of whoever worked last to fall asleep."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): VmHWM becomes what is resident now


class WorkerError(Exception):
    """What a worker said when it failed, or its last words if it died."""


class Worker:
    """The process. A context manager: leaving it ends the process, whatever it is doing."""

    def __init__(self, threads: int) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        environment = dict.fromkeys(THREAD_VARIABLES, str(threads))
        # The working directory stays off the path: see gptile.bench.huggingface.
        environment = {**os.environ, **environment, "PYTHONSAFEPATH": "1"}
        environment.pop("TRITON_INTERPRET", None)  # the interpreter is never timed
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from gptile.bench.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends them all
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            with suppress(BrokenPipeError):  # what it never read
                assert pipe is not None
                pipe.close()

    def convert(self, made_by: str, setup: Setup) -> None:
        """Make a peer's files; then the process has served, its memory is not the engine's."""
        self._ask({"do": "convert", "made_by": made_by, "setup": _plain(setup)})

    def open(self, made_by: str, setup: Setup, **settings: Any) -> dict[str, Any]:
        """Load an engine; its attributes that are numbers."""
        request = {"do": "open", "made_by": made_by, "setup": _plain(setup), "settings": settings}
        found: dict[str, Any] = self._ask(request)
        return found

    def call(self, method: str, *arguments: Any, save: Path | None = None) -> dict[str, Any]:
        """Call a method of the engine.

        Args:
            save: write what it returns there, an array in NumPy's format.

        Returns:
            ``value``, unless it was saved; ``seconds``; bytes of ``memory`` held before it and of
            ``peak_memory`` during it: resident of the process, or on CUDA tensors. None where the
            system does not say.

        Raises:
            WorkerError: if that fails.
        """
        time.sleep(SETTLE)
        where = None if save is None else str(save)
        request = {"do": "call", "method": method, "arguments": arguments, "save": where}
        found: dict[str, Any] = self._ask(request)
        return found

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead; its silence says so next
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["value"]

    def _last_words(self) -> str:
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process died ({how}){': ' * bool(said)}{said}"


def _plain(setup: Setup) -> dict[str, Any]:
    fields = dataclasses.asdict(setup)
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in fields.items()
    }


def serve() -> None:
    """What the process does until its parent closes the pipe."""
    # Libraries print: replies keep the pipe, and everything else goes where errors go.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    state = _State()
    for line in sys.stdin:
        try:
            reply = {"value": state.handle(json.loads(line))}
        except Exception as error:  # whatever a library raises is its engine's row, not our end
            traceback.print_exc()
            words = str(error).strip().splitlines()
            reply = {"error": f"{type(error).__name__}: {words[0]}" if words else repr(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class _State:
    """The engine and where it computes."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.cuda = False

    def handle(self, request: dict[str, Any]) -> Any:
        if request["do"] == "call":
            return self._call(request["method"], request["arguments"], request["save"])
        setup = Setup(**request["setup"])
        setup = dataclasses.replace(
            setup, source=Path(setup.source), converted=Path(setup.converted)
        )
        made_by = load_class(request["made_by"])
        if request["do"] == "convert":
            made_by.convert(setup)  # type: ignore[attr-defined]
            return None
        self.cuda = setup.device != "cpu"
        self.engine = made_by(setup, **request["settings"])
        numbers = vars(type(self.engine)) | vars(self.engine)
        return {name: value for name, value in numbers.items() if isinstance(value, (int, float))}

    def _call(self, method: str, arguments: list[Any], save: str | None) -> dict[str, Any]:
        function = getattr(self.engine, method)
        gc.collect()
        gc.disable()
        held = self._reset_peak()
        try:
            started = time.perf_counter()
            value = function(*arguments)
            seconds = time.perf_counter() - started
        finally:
            gc.enable()
        peak = None if held is None else self._peak()
        found = {"seconds": seconds, "memory": held, "peak_memory": peak}
        if save is None:
            return {**found, "value": value}
        import numpy as np

        np.save(save, value)
        return found

    def _reset_peak(self) -> int | None:
        """Forget the highest memory so far; what is held now."""
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        with suppress(OSError):
            _RESET.write_text(_RESET_PEAK, encoding="ascii")
            return _resident("VmRSS")
        return None

    def _peak(self) -> int | None:
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        return _resident("VmHWM")


def _resident(field: str) -> int | None:
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None
