"""One small result of each kind, in the form that the commands write."""

from typing import Any


def rung(name: str, seconds: float, **measures: Any) -> dict[str, Any]:
    samples = [seconds, 1.02 * seconds, 0.99 * seconds]
    return {"subject": {"rung": name}, "ok": True, "seconds": samples, **measures}


def _operation(layer: int | None, error: float) -> dict[str, Any]:
    subject = {"dtype": "float32", "kernels": "auto", "section": "forward", "quantity": "output"}
    references = {"eager": 2e-7, "sdpa": 2e-7, "allowed": 3.6e-7}
    return {"subject": {**subject, "layer": layer}, "ok": True, "error": error, **references}


def _provider(name: str, seconds: float) -> dict[str, Any]:
    subject = {"operation": "layer_norm", "case": "gpt2", "dtype": "float32", "pass": "forward"}
    rates = {"flops": 8e6, "bytes": 6e6, "roofline": 0.5}
    return {**rung("", seconds), "subject": {**subject, "provider": name}, **rates}


def _engine(name: str, seconds: float) -> dict[str, Any]:
    sizes = {"batch": 1, "prompt_tokens": 32, "new_tokens": 16}
    subject = {"engine": name, "precision": "float32", "task": "decode", **sizes}
    return {**rung("", seconds), "subject": subject, "tokens_per_second": 1 / seconds}


EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "parity": [_operation(None, 1e-8), _operation(0, 1e-7), _operation(1, 2e-7)],
    "kernels": [_provider("gptile", 1e-3), _provider("eager", 2e-3)],
    "model": [_engine("gptile", 0.04), _engine("transformers-sdpa", 0.05)],
    "ladder": [
        rung("plain", 2.0),
        rung("batched", 0.5, speedup={"ratio": 4.0, "low": 3.8, "high": 4.2}),
        {"subject": {"rung": "kernels"}, "skipped": "no GPU here"},
    ],
    "profile": [
        {"subject": {"operation": "aten::addmm"}, "self_seconds": 0.2, "share": 0.8, "calls": 12},
        {"subject": {"timeline": "cpu memory"}, "times": [0.0, 0.1, 0.2], "bytes": [0, 500, 200]},
    ],
    "evaluation": [rung("batch 1", 2.0), rung("batch 16", 1.0)],
}
