"""Engines that people pick for a GPT-2 on a CPU, as :class:`~gptile.bench.engines.Engine`.

None of them imports PyTorch here: their files are made beforehand, by
:mod:`gptile.bench.conversions`, in another process. Each runs on as many threads as the others, and
is otherwise set up as it comes.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gptile.bench.engines import Ids, Setup
from gptile.model.errors import UserError

ONNX_FILE = "model.onnx"
OPENVINO_FILE = "model.xml"
GGUF_FILE = "model.gguf"


def has_cpu_flag(flag: str) -> bool:
    """Whether the CPU has it, by Linux's account; False elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and flag in cpuinfo.read_text(encoding="utf-8")


def _converted(setup: Setup, name: str) -> str:
    return str(setup.converted / name)


class CTranslate2:
    """``Generator`` with ``compute_type`` float32 or int8 (weights by row, activations as they
    come)."""

    cache_bytes = 4

    def __init__(self, setup: Setup) -> None:
        import ctranslate2

        kind = {"float32": "float32", "int8": "int8_float32"}[setup.precision]
        self.weight_bytes = 4 if setup.precision == "float32" else 1
        self.generator = ctranslate2.Generator(
            str(setup.converted), device="cpu", compute_type=kind, intra_threads=setup.threads
        )

    @staticmethod
    def convert(setup: Setup) -> None:
        from gptile.bench.conversions import to_ctranslate2

        to_ctranslate2(setup.source, setup.converted)

    def generate(self, prompts: Ids, n_new: int) -> Ids:
        found = self.generator.generate_batch(
            _words(prompts), max_length=n_new, include_prompt_in_result=False, end_token=[]
        )
        return [result.sequences_ids[0] for result in found]

    def logits(self, ids: Ids) -> Any:
        """Without the cache, whose logits it does not give away."""
        return np.array(self.generator.forward_batch(ids))

    def score(self, ids: Ids) -> float:
        found = self.generator.score_batch(_words(ids), max_input_length=0)
        return -float(np.mean([result.log_probs for result in found]))


def _words(ids: Ids) -> list[list[str]]:
    return [[str(id) for id in row] for row in ids]


class _Stepper:
    """Greedy decoding for an engine that runs one step at a time."""

    def start(self, n_rows: int, n_tokens: int) -> None:
        """Empty the cache; so many tokens a row are to come."""
        raise NotImplementedError

    def step(self, ids: Any, keep: Any) -> Any:
        """Append ``ids [B, T]`` and return the logits ``[B, n, V]`` of the positions ``keep``."""
        raise NotImplementedError

    def generate(self, prompts: Ids, n_new: int) -> Ids:
        ids = np.array(prompts, dtype=np.int64)
        self.start(len(ids), ids.shape[1] + n_new - 1)
        found = []
        for _ in range(n_new):
            logits = self.step(ids, np.array([ids.shape[1] - 1]))
            ids = logits[:, -1].argmax(-1)[:, None].astype(np.int64)
            found.append(ids)
        return np.concatenate(found, 1).tolist()

    def logits(self, ids: Ids) -> Any:
        """Half of the ids as a prompt, the others one by one."""
        rows = np.array(ids, dtype=np.int64)
        half = rows.shape[1] // 2
        self.start(*rows.shape)
        parts = [np.array(self.step(rows[:, :half], np.arange(half)))]
        for column in range(half, rows.shape[1]):
            parts.append(np.array(self.step(rows[:, column : column + 1], np.arange(1))))
        return np.concatenate(parts, 1)


class OnnxRuntime(_Stepper):
    """``InferenceSession`` on the CPU; K and V stay in its own buffers between steps."""

    cache_bytes = 4

    def __init__(self, setup: Setup) -> None:
        import onnxruntime

        self.weight_bytes = 4 if setup.precision == "float32" else 1
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = setup.threads
        options.inter_op_num_threads = 1
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.session = onnxruntime.InferenceSession(
            _converted(setup, ONNX_FILE), options, providers=["CPUExecutionProvider"]
        )
        inputs = self.session.get_inputs()
        self.past = {i.name: i.shape for i in inputs if i.name.startswith("past.")}
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.held: dict[str, Any] = {}

    @staticmethod
    def convert(setup: Setup) -> None:
        from gptile.bench.conversions import to_onnx, to_onnx_int8

        convert = to_onnx if setup.precision == "float32" else to_onnx_int8
        convert(setup.source, setup.converted)

    def start(self, n_rows: int, n_tokens: int) -> None:
        self.held = {
            name: self.value(np.zeros((n_rows, n_head, 0, head_dim), np.float32))
            for name, (_, n_head, _, head_dim) in self.past.items()
        }

    def step(self, ids: Any, keep: Any) -> Any:
        inputs = {"ids": self.value(ids), "keep": self.value(keep), **self.held}
        logits, *present = self.session.run_with_ort_values(self.outputs, inputs)
        self.held = dict(zip(self.past, present, strict=True))
        return logits.numpy()


class OpenVino(_Stepper):
    """A compiled model on the CPU whose K and V are its state, as OpenVINO's own pipelines have
    it. bfloat16 is its inference precision (float32 otherwise: where a CPU has bfloat16, that is
    its default); int8 is NNCF's compression of the weights, symmetric and by channel."""

    def __init__(self, setup: Setup) -> None:
        import openvino

        narrow = setup.precision == "bfloat16"
        self.weight_bytes = {"float32": 4, "bfloat16": 2, "int8": 1}[setup.precision]
        self.cache_bytes = 2 if narrow else 4
        compiled = openvino.Core().compile_model(
            _converted(setup, OPENVINO_FILE),
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32",
                "KV_CACHE_PRECISION": "bf16" if narrow else "f32",
                "INFERENCE_NUM_THREADS": setup.threads,
                "PERFORMANCE_HINT": "LATENCY",
            },
        )
        self.request = compiled.create_infer_request()

    @staticmethod
    def convert(setup: Setup) -> None:
        from gptile.bench.conversions import to_openvino

        to_openvino(setup.source, setup.converted, setup.precision)

    def start(self, n_rows: int, n_tokens: int) -> None:
        self.request.reset_state()

    def step(self, ids: Any, keep: Any) -> Any:
        self.request.infer({"ids": ids, "keep": keep}, share_inputs=True)
        return self.request.get_tensor("logits").data


_LLAMA_ERROR = 4  # GGML_LOG_LEVEL_ERROR


def _log_error(level: int, text: bytes, _: Any) -> None:
    if level == _LLAMA_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaCpp(_Stepper):
    """llama.cpp's C interface as llama-cpp-python exposes it: its ``Llama`` class takes a single
    sequence, and needs a tokeniser. The cache is fp32 beside fp32 weights, else fp16, the default.

    Where the CPU has AMX, weights are not repacked for it, with which version 0.3.36 crashes
    (https://github.com/ggml-org/llama.cpp/issues/20824).
    """

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        self.library = library = llama_cpp
        exact = setup.precision == "float32"
        self.weight_bytes = {"float32": 4.0, "float16": 2.0, "int8": 34 / 32}[setup.precision]
        self.cache_bytes = 4 if exact else 2
        self.cache_type = library.GGML_TYPE_F32 if exact else library.GGML_TYPE_F16
        self.threads = setup.threads
        self.log = library.llama_log_callback(_log_error)  # the library keeps no reference
        library.llama_log_set(self.log, None)
        library.llama_backend_init()
        parameters = library.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = not has_cpu_flag("amx_int8")
        path = _converted(setup, GGUF_FILE).encode()
        self.model = library.llama_model_load_from_file(path, parameters)
        if not self.model:
            raise UserError("llama.cpp cannot load the file that was made for it")
        vocabulary = library.llama_model_get_vocab(self.model)
        self.n_vocab = library.llama_vocab_n_tokens(vocabulary)
        self.context: Any = None
        self.size = (0, 0)
        self.filled = 0

    @staticmethod
    def convert(setup: Setup) -> None:
        from gptile.bench.conversions import to_gguf

        to_gguf(setup.source, setup.converted, setup.precision)

    def start(self, n_rows: int, n_tokens: int) -> None:
        library = self.library
        if self.context is None or n_rows != self.size[0] or n_tokens > self.size[1]:
            if self.context is not None:
                library.llama_free(self.context)
            self.size = (n_rows, n_tokens)
            parameters = library.llama_context_default_params()
            parameters.n_ctx = n_rows * n_tokens
            parameters.n_batch = n_rows * n_tokens
            parameters.n_seq_max = n_rows
            parameters.n_threads = parameters.n_threads_batch = self.threads
            parameters.type_k = parameters.type_v = self.cache_type
            self.context = library.llama_init_from_model(self.model, parameters)
            if not self.context:
                raise UserError("llama.cpp cannot make a context")
        library.llama_memory_clear(library.llama_get_memory(self.context), False)
        self.filled = 0

    def step(self, ids: Any, keep: Any) -> Any:
        library = self.library
        n_rows, n_tokens = ids.shape
        batch = library.llama_batch_init(n_rows * n_tokens, 0, 1)
        wanted = set(keep.tolist())
        for row in range(n_rows):
            for column in range(n_tokens):
                index = row * n_tokens + column
                batch.token[index] = int(ids[row, column])
                batch.pos[index] = self.filled + column
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = row
                batch.logits[index] = column in wanted
        batch.n_tokens = n_rows * n_tokens
        status = library.llama_decode(self.context, batch)
        library.llama_batch_free(batch)
        if status:
            raise UserError(f"llama.cpp's llama_decode returned {status}")
        self.filled += n_tokens
        address = library.llama_get_logits(self.context)
        shape = (n_rows, len(wanted), self.n_vocab)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)
