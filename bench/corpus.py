"""Text to documents, documents to windows, windows to batches: what is scored, and in what company.

Policy. Text is UTF-8 and is taken byte for byte: no newline is added, stripped or translated. Only
a byte order mark at the very beginning is not text: it is removed, and a note says so. A special
token such as ``<|endoftext|>`` in a text is plain characters unless asked for. The first token of a
document has nothing before it and is not scored, unless bos_token_id is put in front of it; so a
document of one token, or none, counts for nothing.
"""

import codecs
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptile.kernels import IGNORE_INDEX
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, stop)`` of a document, which the model sees at once, to predict each next.

    Attributes:
        document: its index.
        first: the first token that is scored here, up to and with ``stop``; the predictions of
            those before it are an earlier window's, and they are context.
    """

    document: int
    start: int
    stop: int
    first: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def n_scored(self) -> int:
        return self.stop + 1 - self.first


@dataclass(frozen=True)
class Batch:
    """Windows padded on the right to the longest of them.

    Attributes:
        inputs: ``[B, T]`` ids, 0 in the padding.
        targets: ``[B, T]`` the id after each input; IGNORE_INDEX where nobody asks for its loss.
        weights: fp64 ``[2, B, T]``: what each target's loss counts, exactly (0 or 1), and in the
            loop of Hugging Face's documentation (see :meth:`Corpus.loop_tokens`).
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor


class Corpus:
    """Documents as token ids, cut into windows.

    Every token of a document but its first is scored exactly once: the first window scores all its
    targets, a later one those that no window before it did.

    Attributes:
        documents: 1-D int64 ids of each.
        windows: in the order of the documents, each document's from left to right.
    """

    def __init__(
        self, documents: Sequence[Sequence[int] | Tensor], window: int, stride: int
    ) -> None:
        """Cut the documents.

        Args:
            documents: token ids.
            window: inputs that the model sees at once, at most.
            stride: tokens from the start of a window to that of the next, at most ``window``: all
                the difference is context, so less stride is more context and more work.

        Raises:
            UserError: if nothing is left to score, or for a stride out of range.
        """
        if not 1 <= stride <= window:
            raise UserError(
                f"stride must be from 1 to the window, {window}, or tokens would be left out; "
                f"got {stride}"
            )
        self.documents = [torch.tensor(ids, dtype=torch.long) for ids in documents]
        self.windows: list[Window] = []
        for index, ids in enumerate(self.documents):
            start = scored = 0
            while scored < len(ids) - 1:
                stop = min(start + window, len(ids) - 1)
                self.windows.append(Window(index, start, stop, scored + 1))
                start, scored = start + stride, stop
        self._window = window
        if not self.windows:
            raise UserError(
                "nothing to score: no document has two tokens, and the first of each has nothing "
                "before it (--bos puts bos_token_id there)"
            )

    @property
    def n_scored(self) -> int:
        """Tokens scored: all but the first of each document."""
        return sum(window.n_scored for window in self.windows)

    def plan(self, batch_size: int, bucket: int) -> list[list[int]]:
        """Which windows share a batch, by index.

        Windows whose lengths fall into the same bucket, ``bucket`` tokens wide, are batched in
        their own order, so that at most ``bucket - 1`` tokens a row are padding; the longest
        buckets come first, for memory to run out at once if it will. A bucket as wide as the window
        holds everything.
        """
        buckets: defaultdict[int, list[int]] = defaultdict(list)
        for index, window in enumerate(self.windows):
            buckets[-(-window.length // bucket)].append(index)
        return [
            rows[at : at + batch_size]
            for _, rows in sorted(buckets.items(), reverse=True)
            for at in range(0, len(rows), batch_size)
        ]

    def batch(self, rows: Sequence[int]) -> Batch:
        """The batch of these windows."""
        longest = max(self.windows[row].length for row in rows)
        inputs = torch.zeros(len(rows), longest, dtype=torch.long)
        targets = torch.full_like(inputs, IGNORE_INDEX)
        weights = torch.zeros(2, *inputs.shape, dtype=torch.float64)
        for i, row in enumerate(rows):
            window = self.windows[row]
            ids = self.documents[window.document]
            inputs[i, : window.length] = ids[window.start : window.stop]
            exact = slice(window.first - window.start - 1, window.length)
            weights[0, i, exact] = 1
            loop, weight = self._loop_labels(window)
            weights[1, i, loop] = weight
            asked = slice(min(exact.start, loop.start), window.length)
            targets[i, asked] = ids[window.start + 1 : window.stop + 1][asked]
        return Batch(inputs, targets, weights)

    @property
    def loop_tokens(self) -> int:
        """The number of tokens that the loop of Hugging Face's documentation divides by.

        That is https://huggingface.co/docs/transformers/perplexity. Its windows are inputs and
        labels at once: one of W tokens predicts the last W - 1 of them, where ours predicts the
        token after the window too. A window takes for labels the n tokens that are new in it, and
        the mean loss of its labels counts n - 1 times. Where windows overlap all n have a
        predecessor, so the weight is one short; where they do not (stride = window) the first of
        each window is never predicted. (Versions of the page before counted otherwise: the
        unweighted mean over windows, and, earliest, n times the mean, divided by all tokens.)

        The loop itself yields NaN where stride = window and one token is left for the last window;
        here it counts for nothing, as its weight, n - 1 = 0, says.
        """
        return sum(self._loop_end(window) - window.first for window in self.windows)

    def _loop_end(self, window: Window) -> int:
        """One past the last label of the loop: the window's end, or the document's."""
        return window.stop + (window.length < self._window)

    def _loop_labels(self, window: Window) -> tuple[slice, float]:
        """The positions of the inputs whose targets are labels of the loop, and their weight."""
        first = max(window.first - 1, window.start + 1)
        end = self._loop_end(window)
        labels = slice(first - window.start - 1, end - window.start - 1)
        return labels, (end - window.first) / (end - first) if end > first else 0.0


def read_documents(raw: bytes, name: str, field: str | None) -> tuple[list[str], list[str]]:
    """The documents in a file's bytes, and notes on what was done to them.

    Args:
        raw: UTF-8 text.
        name: of the file, for errors.
        field: of the objects of a JSONL file, one a line, that holds the text; None for plain text,
            which is one document. Lines of white space are skipped.

    Raises:
        UserError: for an empty file, or one that is not what it should be, naming the line.
    """
    notes = []
    if raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        notes.append(f"{name} began with a byte order mark, which was not scored")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({error})") from None
    if field is None:
        documents = [text]
    else:
        lines = enumerate(text.split("\n"), 1)
        documents = [_field(line, field, f"{name}:{at}") for at, line in lines if line.strip()]
    if not any(documents):
        raise UserError(f"{name}: there is no text in it")
    return documents, notes


def _field(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); one object a line is expected") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is expected, not {type(record).__name__}")
    if not isinstance(record.get(field), str):
        found = ", ".join(map(repr, record)) or "none"
        raise UserError(f"{where}: no text in {field!r} (the object's fields: {found})")
    return record[field]


def encode_documents(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    config: GPT2Config,
    *,
    special_tokens: bool = False,
    bos: bool = False,
    limit: int | None = None,
) -> list[list[int]]:
    """Token ids of each document.

    Args:
        special_tokens: take the texts of special tokens for those tokens.
        bos: put bos_token_id in front of each document, so that its first token is scored too.
        limit: keep this many tokens in all, from the beginning; the last document is cut.

    Raises:
        UserError: for a text that is not Unicode, or a model without a bos_token_id to put there.
    """
    prefix: list[int] = []
    if bos:
        if config.bos_token_id is None or config.bos_token_id >= config.vocab_size:
            raise UserError(
                f"bos: the config's bos_token_id is {config.bos_token_id}, not a token of its "
                f"{config.vocab_size}"
            )
        prefix = [config.bos_token_id]
    encoded: list[list[int]] = []
    for index, text in enumerate(documents):
        try:
            ids = prefix + tokenizer.encode(text, allow_special=special_tokens)
        except UserError as error:
            raise UserError(f"document {index + 1}: {error}") from None
        if limit is not None:
            ids = ids[:limit]
            limit -= len(ids)
        encoded.append(ids)
        if limit == 0:
            break
    return encoded
