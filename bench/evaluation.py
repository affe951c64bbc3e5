"""What a text scores: negative log-likelihood, perplexity, bits per byte.

The loss of each token is fp32 (whatever the products are in); a window's sum is taken on the
device in fp64, nothing waits for it, and the sums of all windows come to the host at the end, once.
The host adds them exactly (``math.fsum``). So the order of the documents, the batch size and the
buckets change a result only as far as they change the rounding of the model's products, in fp32
below 1e-6 relative; counts are exact. Which windows share a batch depends on the corpus alone, and
process r of n takes batches r, r + n, ...: the number of processes changes not one bit (on the CPU,
where each has the same number of threads).

A cache of keys and values has no place here. It spares generation, one token at a time, from
computing the past again; to score a text all its tokens are given, and one pass has every past in
it already. What overlapping windows compute twice cannot be kept either: positions are absolute, so
in the next window the same token has another embedding.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gptile.bench.corpus import Batch, Corpus
from gptile.bench.timing import interleave
from gptile.kernels import Ops
from gptile.kernels.linear_cross_entropy import linear_cross_entropy_reference
from gptile.model.errors import UserError
from gptile.model.tokenizer import Tokenizer

ROWS_PER_CHUNK = 512
"""Of logits that PyTorch's loss makes at a time: within 6 % of the fastest on the CPU it was
measured on, for vocabularies of 2048 and of 50257."""

Model: TypeAlias = Callable[..., Any]
"""A GPT2, compiled or not."""


def without_full_logits(ops: Ops) -> Ops:
    """The operations with a loss that never holds all logits: Triton's does not anyway, PyTorch's
    then takes a chunk of rows at a time."""
    if ops.linear_cross_entropy is not linear_cross_entropy_reference:
        return ops
    return ops.replace(linear_cross_entropy=_chunked_losses)


def _chunked_losses(x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    if reduction != "none":
        raise ValueError(f"reduction is {reduction!r}; evaluation takes each token's loss, none")
    chunks = zip(
        x.flatten(0, -2).split(ROWS_PER_CHUNK), targets.flatten().split(ROWS_PER_CHUNK), strict=True
    )
    losses = [linear_cross_entropy_reference(rows, weight, t, "none") for rows, t in chunks]
    return torch.cat(losses).view(targets.shape)


@contextmanager
def processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """This process's rank and how many there are, joined to each other under torchrun: by NCCL on
    GPUs, by gloo on the CPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, 1
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield dist.get_rank(), dist.get_world_size()
    # Not after an error: the others wait for a sum that will not come, and torchrun ends them.
    dist.destroy_process_group()


@torch.inference_mode()
def window_sums(
    models: Sequence[Model],
    corpus: Corpus,
    plan: Sequence[Sequence[int]],
    *,
    devices: Sequence[torch.device],
    autocast: torch.dtype | None = None,
    on_batch: Callable[[Sequence[int]], object] = lambda _: None,
) -> Tensor:
    """Score windows of a corpus.

    Args:
        models: replicas, in evaluation mode; batches go to them in turn.
        plan: the batches, see :meth:`Corpus.plan`; where processes are joined, this one's.
        devices: of the replicas.
        autocast: 16-bit dtype of the matrix products.
        on_batch: called when a batch is launched.

    Returns:
        fp64 ``[2, windows]`` on the CPU: sums of losses in nats, exactly, and weighted as the loop
        of Hugging Face's documentation does; of all processes that are joined.
    """
    replicas = list(zip(models, devices, strict=True))
    parts = []
    for i, rows in enumerate(plan):
        parts.append(launch(*replicas[i % len(replicas)], corpus.batch(rows), autocast))
        on_batch(rows)
    # Each sum is one process's and 0 elsewhere, so adding them up rounds nothing.
    sums = torch.zeros(2, len(corpus.windows), dtype=torch.float64, device=devices[0])
    if parts:
        order = torch.tensor([row for rows in plan for row in rows])
        sums[:, order] = torch.cat([part.to(devices[0]) for part in parts], dim=1)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.cpu()


def launch(
    model: Model,
    device: torch.device,
    batch: Batch,
    autocast: torch.dtype | None,
) -> Tensor:
    """The sums of a batch, fp64 ``[2, B]`` on the device, which is not waited for."""
    pinned = device.type == "cuda"
    inputs, targets, weights = (
        (part.pin_memory() if pinned else part).to(device, non_blocking=True)
        for part in (batch.inputs, batch.targets, batch.weights)
    )
    with torch.autocast(device.type, autocast) if autocast else nullcontext():
        losses = model(inputs, targets, logits_for="none", reduction="none").loss
    return (losses.double() * weights).sum(-1)


@dataclass(frozen=True)
class DocumentScore:
    """What one document scores.

    Attributes:
        n_tokens: those scored.
        n_bytes: of their text.
        nll: negative log-likelihood of them together, in nats.
    """

    n_tokens: int
    n_bytes: int
    nll: float


@dataclass(frozen=True)
class Score:
    """What a corpus scores.

    Attributes:
        documents: in their order.
        loop_nll: nats a token as the loop of Hugging Face's documentation weights them
            (:attr:`Corpus.loop_tokens`); None where it counts no token.
    """

    documents: list[DocumentScore]
    loop_nll: float | None

    @property
    def n_tokens(self) -> int:
        return sum(document.n_tokens for document in self.documents)

    @property
    def n_bytes(self) -> int:
        return sum(document.n_bytes for document in self.documents)

    @property
    def total(self) -> float:
        """Nats of all scored tokens."""
        return math.fsum(document.nll for document in self.documents)

    @property
    def nll(self) -> float:
        """Nats a scored token."""
        return self.total / self.n_tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of the scored tokens' text; a first token that is not scored has no part."""
        return self.total / math.log(2) / self.n_bytes


def perplexity(nll: float) -> float:
    """``exp(nll)``, infinite where that is too large for fp64."""
    return math.exp(nll) if nll < 709 else math.inf


def summarise(corpus: Corpus, sums: Tensor, tokenizer: Tokenizer) -> Score:
    """Put the sums of :func:`window_sums` together.

    Raises:
        UserError: for a document whose loss is not finite.
    """
    exact, loop = sums.tolist()
    of_document: list[list[float]] = [[] for _ in corpus.documents]
    for window, nll in zip(corpus.windows, exact, strict=True):
        of_document[window.document].append(nll)
    documents = []
    for index, (ids, parts) in enumerate(zip(corpus.documents, of_document, strict=True)):
        scored = ids[1:].tolist()
        n_bytes = sum(len(tokenizer.token_bytes(id)) for id in scored)
        document = DocumentScore(len(scored), n_bytes, math.fsum(parts))
        if not math.isfinite(document.nll):
            raise UserError(
                f"document {index + 1}: its loss is {document.nll}: the weights are damaged, or "
                "16 bits do not hold this model's values (try --dtype float32)"
            )
        documents.append(document)
    n_loop = corpus.loop_tokens
    return Score(documents, math.fsum(loop) / n_loop if n_loop else None)


def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """How many times as long as in fp32 a matrix product of ``dtype`` takes here, measured."""
    a = torch.randn(512, 512, device=device)
    b = a.to(dtype)
    times = interleave(
        {"fp32": lambda: a @ a, "16 bits": lambda: b @ b}, rounds=5, warmup=1, device=device
    )
    return times["16 bits"].median / times["fp32"].median


def missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks on this machine, in words; empty where it can run."""
    kind, variable, default = ("C", "CC", "gcc") if device.type == "cuda" else ("C++", "CXX", "g++")
    if shutil.which(os.environ.get(variable, default)):
        return ""
    return f"torch.compile needs a {kind} compiler: install {default}, or set {variable}"
