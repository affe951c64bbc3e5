"""Our model and transformers' as engines, see :mod:`gptile.bench.engines`.

Both generate as their users do: ours through :func:`gptile.model.generation.generate`, transformers
through ``generate``. What that costs beside the network is part of their times.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptile.bench.engines import Ids, Setup
from gptile.bench.huggingface import import_transformers, load_reference
from gptile.kernels import Ops
from gptile.model.generation import DecodeStep, generate
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingParams
from gptile.weights import open_checkpoint

LEARNING_RATE = 1e-4


class _Model(ABC):
    """What the two have in common: a module with a loss."""

    def __init__(self, setup: Setup, *, compiled: bool, training: bool) -> None:
        torch.set_num_threads(setup.threads)
        self.device = torch.device(setup.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # whose memory is counted
        self.dtype: torch.dtype = getattr(torch, setup.precision)
        self.weight_bytes = self.cache_bytes = self.dtype.itemsize
        # In 16 bits a model is trained under autocast; its weights stay in fp32.
        held = torch.float32 if training and self.dtype.itemsize == 2 else self.dtype
        self.autocast = training and held != self.dtype
        self.model = self._load(setup, held)
        self.compiled = compiled
        self._loss = torch.compile(self.loss) if compiled else self.loss
        if training:
            parameters = self.model.parameters()
            self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    @abstractmethod
    def _load(self, setup: Setup, dtype: torch.dtype) -> Any:
        """The model in evaluation mode, its parameters in ``dtype``."""

    @abstractmethod
    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of each id after those before it."""

    def reset(self) -> None:
        """Before other sizes: torch.compile would make its second graph general, and slower."""
        if self.compiled:
            torch.compiler.reset()

    def tensor(self, ids: Ids) -> Tensor:
        return torch.tensor(ids, device=self.device)

    def score(self, ids: Ids) -> float:
        with torch.inference_mode():
            return float(self._loss(self.tensor(ids)))

    def step(self, ids: Ids) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.autocast):
            loss = self._loss(self.tensor(ids))
        loss.backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return loss.item()


class Gptile(_Model):
    """Ours, on the kernels it chooses by itself or on PyTorch's operations."""

    def __init__(
        self,
        setup: Setup,
        *,
        kernels: str = "auto",
        compiled: bool = False,
        training: bool = False,
    ) -> None:
        self.ops = Ops.torch() if kernels == "torch" else None
        super().__init__(setup, compiled=compiled, training=training)

    def _load(self, setup: Setup, dtype: torch.dtype) -> Any:
        checkpoint = open_checkpoint(setup.source)
        return checkpoint.load_model(dtype=dtype, device=self.device, ops=self.ops)

    def loss(self, ids: Tensor) -> Tensor:
        loss = self.model(ids[:, :-1], ids[:, 1:].contiguous(), logits_for="none").loss
        assert loss is not None
        return loss

    def generate(self, prompts: Ids, n_new: int) -> Ids:
        return _greedy_ids(self.model, prompts, n_new)

    def logits(self, ids: Ids) -> Any:
        def step(ids: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
            logits: Tensor = self.model(ids[:, None], cache=cache, slots=slots).logits[:, 0]
            return logits

        return _cached_logits(self.model, self.tensor(ids), step)


class GptileFast:
    """Ours with the decode steps that :class:`~gptile.model.cpu_decoder.CPUDecoder` compiles."""

    def __init__(self, setup: Setup) -> None:
        from gptile.model.cpu_decoder import CPUDecoder, set_threads

        set_threads(setup.threads)
        self.model = open_checkpoint(setup.source).load_model()
        self.decode_step = CPUDecoder(self.model, setup.precision)
        self.weight_bytes = {"float32": 4, "bfloat16": 2, "int8": 1}[setup.precision]
        self.cache_bytes = 4

    def generate(self, prompts: Ids, n_new: int) -> Ids:
        return _greedy_ids(self.model, prompts, n_new, self.decode_step)

    def logits(self, ids: Ids) -> Any:
        return _cached_logits(self.model, torch.tensor(ids), self.decode_step)


def _greedy_ids(model: GPT2, prompts: Ids, n_new: int, step: DecodeStep | None = None) -> Ids:
    params = SamplingParams(max_new_tokens=n_new, temperature=0, stop_token_ids=())
    return [completion.ids for completion in generate(model, prompts, params, decode_step=step)]


@torch.inference_mode()
def _cached_logits(model: GPT2, ids: Tensor, step: DecodeStep) -> Any:
    """Half of the ids as a prompt, the others one by one."""
    n_rows, n_tokens = ids.shape
    weight, half = model.wte.weight, n_tokens // 2
    cache = KVCache(model.config, n_rows, n_tokens, dtype=weight.dtype, device=weight.device)
    prompt = model(ids[:, :half], cache=cache).logits
    slots = torch.arange(n_rows, device=ids.device)
    steps = [step(column, cache, slots) for column in ids[:, half:].T]
    return _array(torch.cat([prompt, torch.stack(steps, 1)], 1))


class Transformers(_Model):
    """GPT2LMHeadModel with eager or sdpa attention.

    ``compiled`` is a static cache, whose decoding steps ``generate`` compiles, and torch.compile
    around the loss.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        attention: str,
        compiled: bool = False,
        training: bool = False,
    ) -> None:
        self.transformers = import_transformers()
        self.attention = attention
        super().__init__(setup, compiled=compiled, training=training)
        self.settings: dict[str, Any] = {}
        if compiled:
            config = self.transformers.CompileConfig()
            config._compile_all_devices = True  # without it, generate compiles on a GPU only
            self.settings = {"cache_implementation": "static", "compile_config": config}

    def _load(self, setup: Setup, dtype: torch.dtype) -> Any:
        return load_reference(setup.source, dtype, self.attention, self.device)

    def loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=ids, use_cache=False).loss
        return loss

    def generate(self, prompts: Ids, n_new: int) -> Ids:
        inputs = self.tensor(prompts)
        found = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=n_new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **self.settings,
        )
        return found[:, inputs.shape[1] :].tolist()

    @torch.inference_mode()
    def logits(self, ids: Ids) -> Any:
        """Without a cache: transformers' own stays unchecked but for the ids it leads to."""
        return _array(self.model(self.tensor(ids), use_cache=False).logits)


def _array(logits: Tensor) -> Any:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return np.asarray(logits.to(wide).cpu())
