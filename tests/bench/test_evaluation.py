"""Scores are transformers' own, whatever the batches; nothing but the text is scored; and nothing
waits for the device on the way."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptile.bench import evaluation
from gptile.bench.corpus import Batch, Corpus, encode_documents
from gptile.bench.evaluation import (
    ROWS_PER_CHUNK,
    Score,
    perplexity,
    summarise,
    window_sums,
    without_full_logits,
)
from gptile.bench.huggingface import load_reference
from gptile.kernels import IGNORE_INDEX, Ops
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer
from gptile.weights import save_checkpoint
from gptile.weights.files import DEMO

CPU = torch.device("cpu")
LETTERS = Tokenizer({bytes([i]): i for i in range(256)}, {})
LENGTHS = [1, 2, 7, 7, 30]
# What .item(), float() and bool() of a tensor come to, and operations whose size is a value.
WAITS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}


def score(
    model: Callable[..., Any],
    documents: Sequence[Sequence[int]],
    window: int = 32,
    stride: int | None = None,
    batch_size: int = 3,
    bucket: int = 8,
    **kwargs: Any,
) -> Score:
    corpus = Corpus(documents, window, stride or window)
    sums = window_sums([model], corpus, corpus.plan(batch_size, bucket), devices=[CPU], **kwargs)
    return summarise(corpus, sums, LETTERS)


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(61) for _ in range(n)] for n in lengths]


def scripted(ahead: int) -> Callable[..., SimpleNamespace]:
    """A model that is certain of the id ``ahead`` of each it reads, on texts that count up."""

    def model(ids: Tensor, targets: Tensor, *, logits_for: str, reduction: str) -> SimpleNamespace:
        assert (logits_for, reduction) == ("none", "none")
        logits = 30.0 * F.one_hot(ids + ahead, 64).float()
        losses = F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none"
        )
        return SimpleNamespace(loss=losses)

    return model


@torch.no_grad()
def truth(model: GPT2, ids: Sequence[int]) -> float:
    """Nats of a document that fits the context, in fp64, by itself."""
    logits = model(torch.tensor([ids[:-1]])).logits[0].double()
    return float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))


class TestTheShift:
    def test_happens_exactly_once(self) -> None:
        counting = [list(range(1, 31)), list(range(5, 9))]
        assert score(scripted(1), counting).nll < 1e-10
        assert score(scripted(2), counting).nll > 20
        assert score(scripted(0), counting).nll > 20

    def test_happens_once_in_overlapping_windows(self) -> None:
        counting = [list(range(1, 61))]
        found = score(scripted(1), counting, window=16, stride=5)
        assert found.nll < 1e-10
        assert found.loop_nll == pytest.approx(0, abs=1e-10)

    def test_never_reads_the_next_row(self) -> None:
        """Each document goes on where the one before it ends: a label that leaked from there would
        be predicted, and counted."""
        found = score(scripted(1), [[1, 2, 3], [4, 5], [6, 7, 8, 9]], batch_size=3, bucket=32)
        assert [d.n_tokens for d in found.documents] == [2, 1, 3]


class TestPadding:
    def test_documents_score_alone_what_they_score_together(self, model: GPT2) -> None:
        documents = texts(LENGTHS)
        documents[4][3] = documents[2][2] = 0  # the id that also pads, in the middle
        together = score(model, documents, batch_size=5, bucket=32)
        assert [d.n_tokens for d in together.documents] == [0, 1, 6, 6, 29]
        assert together.n_tokens == 42
        for ids, found in zip(documents[1:], together.documents[1:], strict=True):
            assert found.nll == pytest.approx(score(model, [ids]).total, rel=1e-6)
            assert found.nll == pytest.approx(truth(model, ids), rel=1e-6)
        assert together.documents[0].nll == 0

    def test_that_is_scored_is_seen(self, model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
        """A planted fault: one pad more is a target of each shorter row."""
        real = Corpus.batch

        def leaky(self: Corpus, rows: Sequence[int]) -> Batch:
            batch = real(self, rows)
            for row, n in enumerate(self.windows[row].length for row in rows):
                batch.targets[row, n : n + 1] = 0
                batch.weights[:, row, n : n + 1] = 1
            return batch

        documents = texts(LENGTHS)
        right = score(model, documents, batch_size=5, bucket=32)
        monkeypatch.setattr(Corpus, "batch", leaky)
        wrong = score(model, documents, batch_size=5, bucket=32)
        assert abs(wrong.nll - right.nll) > 1e-3 * right.nll


class TestTheResult:
    # The model is made once, and scoring does not change it.
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(lambda n: max(n) > 1),
        st.integers(1, 12),
        st.integers(1, 40),
        st.randoms(use_true_random=False),
    )
    def test_depends_on_no_order_batch_size_or_bucket(
        self, model: GPT2, lengths: list[int], batch_size: int, bucket: int, draw: random.Random
    ) -> None:
        documents = texts(lengths)
        order = list(range(len(documents)))
        draw.shuffle(order)
        one = score(model, documents, stride=20, batch_size=1, bucket=32)
        other = score(
            model, [documents[i] for i in order], stride=20, batch_size=batch_size, bucket=bucket
        )
        assert other.n_tokens == one.n_tokens == sum(max(n - 1, 0) for n in lengths)
        assert other.nll == pytest.approx(one.nll, rel=1e-6)
        for place, i in enumerate(order):
            a, b = other.documents[place], one.documents[i]
            assert (a.n_tokens, a.n_bytes) == (b.n_tokens, b.n_bytes)
            assert a.nll == pytest.approx(b.nll, rel=1e-6)

    def test_is_weighted_by_tokens_and_not_by_documents(self) -> None:
        """5 tokens of loss 4 and 1 of loss 1: 21/6, where the mean of means is 2.5."""

        def model(ids: Tensor, targets: Tensor, **_: Any) -> SimpleNamespace:
            loss = torch.where(ids == 4, 4.0, 1.0)
            return SimpleNamespace(loss=loss.where(targets != IGNORE_INDEX, 0))

        found = score(model, [[4] * 6, [1, 1]], batch_size=1)
        assert found.nll == 21 / 6
        assert found.total == 21

    def test_is_the_same_on_replicas_bit_by_bit(self, model: GPT2) -> None:
        corpus = Corpus(texts(LENGTHS), 32, 32)
        plan = corpus.plan(1, 8)
        one = window_sums([model], corpus, plan, devices=[CPU])
        assert torch.equal(one, window_sums([model] * 3, corpus, plan, devices=[CPU] * 3))

    def test_has_bits_per_byte_of_the_scored_tokens(self, model: GPT2) -> None:
        words = Tokenizer({bytes([i]): i for i in range(256)} | {b"ab": 256}, {})
        corpus = Corpus([[97, 256, 98], [99]], 32, 32)
        found = summarise(corpus, torch.tensor([[6.0], [0.0]]), words)
        assert found.n_bytes == 3  # "ab" and "b": the first "a" and the lone "c" are not scored
        assert found.bits_per_byte == pytest.approx(6 / math.log(2) / 3)

    def test_that_is_not_finite_is_an_error(self) -> None:
        def broken(ids: Tensor, targets: Tensor, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(loss=torch.where(ids == 3, torch.nan, 1.0))

        with pytest.raises(UserError, match="document 2: its loss is nan"):
            score(broken, [[1, 2], [1, 3, 1]])

    def test_of_a_hopeless_model_has_an_infinite_perplexity(self) -> None:
        assert perplexity(1e4) == math.inf
        assert perplexity(1.5) == math.exp(1.5)

    def test_in_16_bits_is_near_and_of_a_compiled_model_the_same(self, model: GPT2) -> None:
        documents = texts([40, 40])
        exact = score(model, documents)
        for dtype in (torch.bfloat16, torch.float16):
            found = score(model, documents, autocast=dtype)
            assert found.nll != exact.nll
            assert found.nll == pytest.approx(exact.nll, rel=torch.finfo(dtype).eps)
        found = score(torch.compile(model, backend="aot_eager"), documents)
        assert found.nll == pytest.approx(exact.nll, rel=1e-6)


class Recorder(TorchDispatchMode):
    """Names of the operations that ran, and the rows of what ended in ``n_columns``."""

    def __init__(self, n_columns: int = -1) -> None:
        super().__init__()
        self.names: list[str] = []
        self.n_columns = n_columns
        self.most_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(out, Tensor) and out.dim() and out.shape[-1] == self.n_columns:
            self.most_rows = max(self.most_rows, out.numel() // self.n_columns)
        return out


class TestWaiting:
    def waits(self, model: Callable[..., Any]) -> int:
        with Recorder() as recorder:
            score(model, texts([40] * 6), batch_size=2)
        return sum(name in WAITS for name in recorder.names)

    def test_no_step_reads_a_value(self, model: GPT2) -> None:
        assert self.waits(model) == 0

    def test_a_step_that_does_is_seen(self, model: GPT2) -> None:
        def impatient(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            assert output.loss.sum().item() > 0
            assert (output.loss >= 0).all()
            return output

        assert self.waits(impatient) == 2 * 6

    def test_a_batch_can_be_launched_where_no_value_exists(
        self, small_model: Callable[..., GPT2]
    ) -> None:
        """On the meta device, where every copy to the host, not only of a number, is an error."""
        model = small_model().to("meta")
        batch = Corpus(texts(LENGTHS), 32, 32).batch([0, 1, 2])
        sums = evaluation.launch(model, torch.device("meta"), batch, None)
        assert sums.shape == (2, 3)
        assert sums.dtype == torch.float64

        def impatient(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            output.loss.tolist()
            return output

        with pytest.raises(RuntimeError, match="meta"):
            evaluation.launch(impatient, torch.device("meta"), batch, None)


class TestFullLogits:
    @torch.inference_mode()
    def most_rows(self, model: GPT2, ops: Ops) -> tuple[int, float]:
        model = GPT2(model.config, ops)
        torch.manual_seed(1)
        model.init_weights()
        with Recorder(n_columns=61) as recorder:
            found = score(model.eval(), texts([32] * 40), batch_size=40)
        return recorder.most_rows, found.nll

    def test_are_never_made(self, model: GPT2) -> None:
        rows, nll = self.most_rows(model, without_full_logits(Ops.torch()))
        assert rows == ROWS_PER_CHUNK
        all_rows, expected = self.most_rows(model, Ops.torch())
        assert all_rows == 40 * 31
        assert nll == pytest.approx(expected, rel=1e-6)

    def test_the_fused_kernel_scores_the_same(self, small_model: Callable[..., GPT2]) -> None:
        documents = texts([7, 3, 12])
        torch.manual_seed(0)
        reference = small_model()
        fused = GPT2(reference.config, without_full_logits(Ops.triton()))
        fused.load_state_dict(reference.state_dict())
        assert fused.ops == Ops.triton()
        expected = score(reference, documents).nll
        assert score(fused.eval(), documents).nll == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def documented_loop(reference: Any, ids: list[int], window: int, stride: int) -> float:
    """Perplexity by the definition on Hugging Face's page, with transformers: every window's loss
    of its own new labels, as ``labels=`` means it, times one less than their number."""
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        labels = torch.tensor([ids[begin:end]])
        labels[:, : previous - begin] = IGNORE_INDEX
        mean = reference(torch.tensor([ids[begin:end]]), labels=labels).loss.item()
        n_counted = end - previous - 1
        total, count, previous = total + mean * n_counted, count + n_counted, end
        if end == len(ids):
            break
    return math.exp(total / count)


@pytest.fixture(scope="module")
def pair(
    small_model: Callable[..., GPT2], tmp_path_factory: pytest.TempPathFactory
) -> tuple[GPT2, Any]:
    """A model of ours and the same in transformers."""
    torch.manual_seed(0)
    model = small_model()
    directory = tmp_path_factory.mktemp("reference") / "model"
    save_checkpoint(model, directory)
    return model, load_reference(directory, torch.float32)


class TestTransformers:
    @pytest.mark.parametrize("n", [2, 15, 16, 18, 32, 40, 100])
    @pytest.mark.parametrize("stride", [1, 5, 8, 15, 16])
    def test_the_loop_of_the_documentation(
        self, pair: tuple[GPT2, Any], n: int, stride: int
    ) -> None:
        model, reference = pair
        (ids,) = texts([n], seed=n)
        found = score(model, [ids], window=16, stride=stride)
        assert found.loop_nll is not None
        expected = documented_loop(reference, ids, 16, stride)
        assert perplexity(found.loop_nll) == pytest.approx(expected, rel=1e-5)

    def test_that_loop_is_not_the_exact_mean(self, pair: tuple[GPT2, Any]) -> None:
        model, _ = pair
        (ids,) = texts([100])
        for stride in (5, 16):
            found = score(model, [ids], window=16, stride=stride)
            assert found.loop_nll != pytest.approx(found.nll, rel=1e-4)

    def test_where_the_loop_divides_nothing_by_nothing_it_counts_nothing(
        self, pair: tuple[GPT2, Any]
    ) -> None:
        model, reference = pair
        (ids,) = texts([33])  # the third window of 16 has one token left, and no label
        assert math.isnan(documented_loop(reference, ids, 16, 16))
        found = score(model, [ids], window=16, stride=16)
        assert found.loop_nll is not None
        expected = documented_loop(reference, ids[:32], 16, 16)
        assert perplexity(found.loop_nll) == pytest.approx(expected, rel=1e-5)

    def test_the_demo_on_tinyshakespeare(
        self, demo: tuple[GPT2, Tokenizer], shakespeare: Path
    ) -> None:
        """transformers' own ``labels=`` loss, a window at a time, weighted by its tokens: windows
        of 256 tokens that share one predict 255 each."""
        model, tokenizer = demo
        text = shakespeare.read_bytes().decode()
        (ids,) = encode_documents([text], tokenizer, model.config, limit=10_000)
        reference = load_reference(DEMO, torch.float32)
        parts = []
        with torch.no_grad():
            for start in range(0, len(ids) - 1, 255):
                window = torch.tensor([ids[start : start + 256]])
                mean = reference(window, labels=window).loss.item()
                parts.append(mean * (window.shape[1] - 1))
        expected = math.fsum(parts) / (len(ids) - 1)
        corpus = Corpus([ids], 255, 255)
        sums = window_sums([model], corpus, corpus.plan(16, 64), devices=[CPU])
        found = summarise(corpus, sums, tokenizer)
        assert found.n_tokens == 9_999
        assert found.nll == pytest.approx(expected, abs=1e-6)
