"""What is scored: the policy on text, windows that score each token once, batches whose padding and
context count for nothing."""

import json
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptile.bench.corpus import Corpus, encode_documents, read_documents
from gptile.kernels import IGNORE_INDEX
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer

LENGTHS = [1, 2, 7, 7, 30]


def documents(lengths: list[int]) -> list[list[int]]:
    """Of ids that are all different, from 1."""
    starts = [1 + sum(lengths[:i]) for i in range(len(lengths))]
    return [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]


class TestReading:
    @pytest.mark.parametrize(
        "text", ["a\nb\n", "a\r\nb\r\n\r\n", "\n\n a \n", "a\rb", "a\u2028b\x00"]
    )
    def test_a_text_is_taken_byte_for_byte(self, text: str) -> None:
        assert read_documents(text.encode(), "x", None) == ([text], [])

    def test_a_byte_order_mark_at_the_beginning_is_removed_and_reported(self) -> None:
        texts, notes = read_documents("\ufeffa\ufeffb".encode(), "x.txt", None)
        assert texts == ["a\ufeffb"]
        assert "x.txt" in notes[0]
        assert "byte order mark" in notes[0]
        line = json.dumps({"text": "\ufeffa"}, ensure_ascii=False)
        texts, notes = read_documents(b"\xef\xbb\xbf" + line.encode(), "x.jsonl", "text")
        assert texts == ["\ufeffa"]  # in a document it is a character like any other
        assert len(notes) == 1

    def test_jsonl_is_a_document_a_line(self) -> None:
        rows = ["a\nb ", "", "\u2028\u0085é", "{}"]
        lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=False) for text in rows]
        raw = "\r\n\n".join(lines).encode()
        assert read_documents(raw, "x", "text") == (rows, [])

    @pytest.mark.parametrize(
        ("raw", "field", "words"),
        [
            (b"", None, "no text"),
            (b"\xef\xbb\xbf", None, "no text"),
            (b"", "text", "no text"),
            (b'{"text": ""}\n{"text": ""}', "text", "no text"),
            (b"caf\xe9", None, "not UTF-8"),
            (b'{"text": "a"}\n{"text": 1}', "text", "x:2: no text in 'text'"),
            (b'{"body": "a"}', "text", "the object's fields: 'body'"),
            (b'{"text": "a"}\n[1]', "text", "x:2: a JSON object"),
            (b'{"text": "a"}\nplain', "text", "x:2: not JSON"),
            (b"[" * 100_000, "text", "x:1: not JSON"),
        ],
    )
    def test_wrong_input_is_one_clear_error(
        self, raw: bytes, field: str | None, words: str
    ) -> None:
        with pytest.raises(UserError, match=words):
            read_documents(raw, "x", field)


class TestEncoding:
    def test_special_tokens_are_text_unless_asked_for(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        (plain,) = encode_documents(["a<|endoftext|>b"], tokenizer, model.config)
        assert tokenizer.decode(plain) == "a<|endoftext|>b"
        assert model.config.eos_token_id not in plain
        (special,) = encode_documents(
            ["a<|endoftext|>b"], tokenizer, model.config, special_tokens=True
        )
        assert special[1] == model.config.eos_token_id
        assert len(special) == 3

    def test_bos_stands_before_every_document(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        found = encode_documents(["a", "", "ab"], tokenizer, model.config, bos=True)
        plain = encode_documents(["a", "", "ab"], tokenizer, model.config)
        assert found == [[model.config.bos_token_id, *ids] for ids in plain]

    def test_the_limit_is_a_number_of_tokens(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        texts = ["the king", "my lord of York", "peace"]
        whole = encode_documents(texts, tokenizer, model.config)
        for limit in range(1, sum(map(len, whole)) + 3):
            kept = encode_documents(texts, tokenizer, model.config, limit=limit)
            assert [*chain(*kept)] == [*chain(*whole)][:limit]

    def test_bos_needs_an_id_and_text_needs_unicode(self, model: GPT2) -> None:
        tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, {})
        config = type(model.config)(vocab_size=61, bos_token_id=None)
        with pytest.raises(UserError, match="bos_token_id is None"):
            encode_documents(["a"], tokenizer, config, bos=True)
        with pytest.raises(UserError, match="document 2: text is not valid Unicode"):
            encode_documents(["a", "\ud800"], tokenizer, config)


def scored(corpus: Corpus, batch_size: int, bucket: int, weighting: int = 0) -> dict[int, int]:
    """How often each id is a target that counts, and with which context before it: the ids of
    :func:`documents` tell all of it apart."""
    found: dict[int, int] = {}
    for rows in corpus.plan(batch_size, bucket):
        batch = corpus.batch(rows)
        counted = batch.weights[weighting] > 0
        for target, before in zip(batch.targets[counted], batch.inputs[counted], strict=True):
            assert target == before + 1  # shifted once, and never across documents
            found[int(target)] = found.get(int(target), 0) + 1
    return found


class TestWindows:
    @given(
        st.lists(st.integers(0, 40), min_size=1, max_size=6),
        st.integers(1, 12),
        st.data(),
    )
    def test_every_token_but_a_first_is_scored_exactly_once(
        self, lengths: list[int], window: int, data: st.DataObject
    ) -> None:
        stride = data.draw(st.integers(1, window))
        ids = documents(lengths)
        expected = [id for document in ids for id in document[1:]]
        if not expected:
            with pytest.raises(UserError, match="nothing to score"):
                Corpus(ids, window, stride)
            return
        corpus = Corpus(ids, window, stride)
        batch_size, bucket = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 15))
        found = scored(corpus, batch_size, bucket)
        assert sorted(found) == expected
        assert set(found.values()) == {1}
        assert corpus.n_scored == len(expected)
        assert sorted(row for rows in corpus.plan(batch_size, bucket) for row in rows) == list(
            range(len(corpus.windows))
        )

    def test_less_stride_is_more_context(self) -> None:
        for stride, least in ((8, 1), (4, 5), (1, 8)):
            later = Corpus([list(range(100))], 8, stride).windows[1:]
            assert {window.first - window.start for window in later} == {least}

    def test_a_stride_past_the_window_would_leave_tokens_out(self) -> None:
        for stride in (0, 9):
            with pytest.raises(UserError, match="stride must be from 1 to the window, 8"):
                Corpus([[1, 2, 3]], 8, stride)

    def test_documents_of_one_token_count_for_nothing(self) -> None:
        corpus = Corpus(documents(LENGTHS), 64, 64)
        assert [w.document for w in corpus.windows] == [1, 2, 3, 4]
        assert [w.n_scored for w in corpus.windows] == [1, 6, 6, 29]
        with pytest.raises(UserError, match="nothing to score"):
            Corpus([[1], [], [2]], 64, 64)


class TestBatches:
    def test_padding_is_on_the_right_and_no_target(self) -> None:
        corpus = Corpus(documents(LENGTHS), 64, 64)
        batch = corpus.batch(range(4))
        assert batch.inputs.shape == (4, 29)
        for row, n in enumerate((1, 6, 6, 29)):
            assert (batch.targets[row, :n] == batch.inputs[row, :n] + 1).all()
            assert (batch.targets[row, n:] == IGNORE_INDEX).all()
            assert batch.weights[:, row].sum(-1).tolist()[0] == n
            assert (batch.weights[:, row, n:] == 0).all()

    def test_a_real_zero_in_a_document_is_scored(self) -> None:
        """0 pads, and may be a token: the padding goes by lengths, not by ids."""
        batch = Corpus([[0, 0, 0], [5, 0]], 8, 8).batch([0, 1])
        assert batch.targets.tolist() == [[0, 0], [0, IGNORE_INDEX]]
        assert batch.weights[0].tolist() == [[1, 1], [1, 0]]

    def test_context_is_no_target(self) -> None:
        corpus = Corpus([list(range(1, 21))], 8, 3)
        batch = corpus.batch([1])
        assert (batch.weights[0, 0] > 0).tolist() == [False] * 5 + [True] * 3

    @given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 70))
    def test_rows_of_a_bucket_differ_by_less_than_its_width(
        self, lengths: list[int], bucket: int
    ) -> None:
        corpus = Corpus(documents(lengths), 64, 64)
        plan = corpus.plan(4, bucket)
        spans = [[corpus.windows[row].length for row in rows] for rows in plan]
        assert all(max(span) - min(span) < bucket for span in spans)
        assert all(len(rows) <= 4 for rows in plan)
        longest = [max(span) for span in spans]
        assert longest[0] > max(longest) - bucket  # the longest bucket comes first

    def test_a_bucket_as_wide_as_the_window_is_the_order_of_the_corpus(self) -> None:
        corpus = Corpus(documents(LENGTHS), 64, 64)
        assert corpus.plan(3, 64) == [[0, 1, 2], [3]]
        assert corpus.plan(3, 7) == [[3], [0, 1, 2]]
        assert corpus.plan(3, 1) == [[3], [1, 2], [0]]

    def test_targets_stay_in_the_document(self) -> None:
        corpus = Corpus(documents(LENGTHS), 4, 2)
        for row, window in enumerate(corpus.windows):
            batch = corpus.batch([row])
            own = set(corpus.documents[window.document].tolist())
            assert set(batch.targets[batch.targets != IGNORE_INDEX].tolist()) <= own
            assert batch.inputs.dtype == torch.long
