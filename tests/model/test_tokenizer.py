"""Exact ids against Hugging Face's tokenizers, the public cases, and what must be refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, pre_tokenizers, trainers

from gptile.model.config import GPT2Config
from gptile.model.tokenizer import TextStream, Tokenizer, TokenizerError, byte_to_char
from gptile.weights.files import DEMO

# Characters that the word pattern and UTF-8 treat in all their ways.
TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(list(" \n\t'sdtrvemlLaAzZ019٣½\u00a0\u2003\x1c\x85é字😀\u200d")),
    ),
    max_size=60,
)


def reference_for(directory: Path) -> Reference:
    reference = Reference(
        models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    )
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    return reference


@pytest.fixture(scope="module")
def gpt2(gpt2_bpe: Path) -> Tokenizer:
    return Tokenizer.from_directory(gpt2_bpe)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0" * 17, [8269, 10535, 830]),
        ("2023 12345 1234", [1238, 1954, 17031, 2231, 1105, 2682]),
        ("hello   world", [31373, 220, 220, 995]),
        ("hello ", [31373, 220]),
        ("I'LL I'll", [40, 6, 3069, 314, 1183]),
        ("a\u00a0b", [64, 1849, 65]),
        ("a\x1cb", [64, 216, 65]),
        ("y is ?", [88, 318, 5633]),
        (" ", [220]),
        ("", []),
        ("Hello, world!", [15496, 11, 995, 0]),
    ],
)
def test_published_ids(gpt2: Tokenizer, text: str, ids: list[int]) -> None:
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text


@settings(deadline=None, max_examples=300)
@given(text=TEXT)
def test_gpt2_ids_equal_hugging_faces(gpt2: Tokenizer, gpt2_bpe: Path, text: str) -> None:
    ids = gpt2.encode(text)
    assert ids == _reference(gpt2_bpe).encode(text).ids
    assert gpt2.decode(ids) == text


@settings(deadline=None, max_examples=300)
@given(text=TEXT)
def test_demo_ids_equal_hugging_faces(text: str) -> None:
    tokenizer = _demo()
    ids = tokenizer.encode(text)
    assert ids == _reference(DEMO).encode(text).ids
    assert tokenizer.decode(ids) == text


_cache: dict[Path, object] = {}


def _reference(directory: Path) -> Reference:
    return _cache.setdefault(directory, reference_for(directory))  # type: ignore[return-value]


def _demo() -> Tokenizer:
    return _cache.setdefault(Path(), Tokenizer.from_directory(DEMO))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "count"), [("a" * 100_000, 25_000), ("^" * 1_000_000, 250_000), (" " * 100_000, 10**5)]
)
def test_long_runs_are_not_quadratic(gpt2: Tokenizer, text: str, count: int) -> None:
    assert len(gpt2.encode(text)) == count


def test_no_clean_up_of_spaces(gpt2: Tokenizer) -> None:
    assert gpt2.decode([5633]) == " ?"
    assert gpt2.decode([14512]) == " !="


class TestSpecialTokens:
    def test_in_user_text_they_are_text(self, gpt2: Tokenizer) -> None:
        text = "a<|endoftext|>b"
        assert 50256 not in gpt2.encode(text)
        assert gpt2.decode(gpt2.encode(text)) == text

    def test_unless_asked_for(self, gpt2: Tokenizer) -> None:
        assert gpt2.encode("a<|endoftext|>b", allow_special=True) == [64, 50256, 65]
        assert gpt2.decode([50256]) == "<|endoftext|>"


@pytest.mark.parametrize("id", [-1, 50257, 50303, 10**12])
def test_ids_without_text_are_refused_by_number(gpt2: Tokenizer, id: int) -> None:
    with pytest.raises(TokenizerError, match=str(id)):
        gpt2.decode([15496, id])


def test_lone_surrogates_are_refused(gpt2: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="Unicode"):
        gpt2.encode("a\ud800b")


class TestStreaming:
    @settings(deadline=None, max_examples=200)
    @given(text=TEXT)
    def test_pieces_join_to_the_text_and_never_split_a_character(self, text: str) -> None:
        tokenizer = _demo()
        stream = TextStream(tokenizer)
        pieces = [stream.push(id) for id in tokenizer.encode(text)] + [stream.finish()]
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)

    @settings(deadline=None, max_examples=200)
    @given(ids=st.lists(st.integers(0, 255), max_size=12))
    def test_any_bytes_stream_as_they_decode(self, ids: list[int]) -> None:
        tokenizer = _demo()
        stream = TextStream(tokenizer)
        text = "".join([*map(stream.push, ids), stream.finish()])
        assert text == tokenizer.decode(ids)

    @settings(deadline=None, max_examples=300)
    @given(
        text=st.text("ab\n", max_size=30),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    def test_text_ends_before_the_first_stop_string(self, text: str, stops: list[str]) -> None:
        tokenizer = _demo()
        stream = TextStream(tokenizer, stops)
        shown = ""
        for id in (tokenizer.encode(char)[0] for char in text):  # a token a character
            shown += stream.push(id)
            if stream.stopped:
                break
            assert not any(stop in shown for stop in stops)
        shown += stream.finish()
        # The stop string that is complete first ends the text; ties go to the longer one.
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        assert stream.stopped == bool(ends)
        assert shown == (text[: min(ends)[1]] if ends else text)

    def test_a_stop_string_across_tokens(self, gpt2: Tokenizer) -> None:
        stream = TextStream(gpt2, ["world!"])
        pieces = [stream.push(id) for id in gpt2.encode("Hello, world! Yes")[:4]]
        assert pieces == ["Hello", ",", " ", ""]
        assert stream.stopped
        assert stream.push(gpt2.encode(" more")[0]) == ""
        assert stream.finish() == ""


def write_files(directory: Path, vocab: dict, merges: list[str], **settings: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges), encoding="utf-8")
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_vocab() -> dict[str, int]:
    return {char: id for id, char in enumerate(byte_to_char().values())}


class TestFiles:
    def test_a_merge_may_be_a_hash(self, tmp_path: Path) -> None:
        vocab = byte_vocab() | {"##": 256}
        tokenizer = Tokenizer.from_directory(write_files(tmp_path, vocab, ["# #"]))
        assert tokenizer.encode("##") == [256]

    def test_special_tokens_may_come_first(self, tmp_path: Path) -> None:
        vocab = {"<s>": 0, "<pad>": 1} | {c: id + 2 for c, id in byte_vocab().items()}
        tokenizer = Tokenizer.from_directory(write_files(tmp_path, vocab | {"ab": 258}, ["a b"]))
        assert tokenizer.special_tokens == {"<s>": 0, "<pad>": 1}
        assert tokenizer.encode("ab<s>")[0] == 258
        assert tokenizer.encode("<s>ab", allow_special=True) == [0, 258]

    def test_a_prefix_space_is_added_where_the_checkpoint_wants_it(self, tmp_path: Path) -> None:
        directory = write_files(tmp_path, byte_vocab(), [], add_prefix_space=True)
        tokenizer = Tokenizer.from_directory(directory)
        assert tokenizer.decode(tokenizer.encode("a")) == " a"
        assert tokenizer.decode(tokenizer.encode(" a")) == " a"

    def test_tokenizer_json_gives_the_same_ids(self, tmp_path: Path, gpt2_bpe: Path) -> None:
        reference_for(gpt2_bpe).save(str(tmp_path / "tokenizer.json"))
        from_json = Tokenizer.from_directory(tmp_path)
        text = "Il était une fois 12345 don't\n\n  (…) 😀"
        assert from_json.encode(text) == Tokenizer.from_directory(gpt2_bpe).encode(text)

    def test_tokenizer_json_with_added_tokens(self, tmp_path: Path) -> None:
        trained = Reference(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<eos>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(["the cat sat on the mat, the hat"] * 3, trainer)
        trained.save(str(tmp_path / "tokenizer.json"))
        ours = Tokenizer.from_directory(tmp_path)
        assert ours.special_tokens == {"<eos>": 0, "<pad>": 1}
        assert ours.encode("the cat hat") == trained.encode("the cat hat").ids
        assert ours.encode("<eos>", allow_special=True) == [0]

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"model": {"type": "Unigram", "vocab": []}}, "byte-level"),
            ({"model": {"type": "WordPiece", "vocab": {}}}, "byte-level"),
            ({"pre_tokenizer": {"type": "Whitespace"}}, "byte-level"),
            ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "byte-level"),
            ({"pre_tokenizer": None}, "byte-level"),
            ({"normalizer": {"type": "NFC"}}, "byte-level"),
            ({"post_processor": {"type": "TemplateProcessing"}}, "byte-level"),
            ({"added_tokens": [{"id": 256, "content": "x y", "special": False}]}, "ordinary text"),
            ({"model": "BPE"}, "format"),
            ({"model": []}, "format"),
            ({"pre_tokenizer": "ByteLevel"}, "format"),
            ({"added_tokens": {"a": 1}}, "format"),
            ({"added_tokens": [{"content": "x"}]}, "format"),
            ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [1]}}, "format"),
        ],
    )
    def test_foreign_kinds_are_refused(self, tmp_path: Path, change: dict, reason: str) -> None:
        spec = {
            "model": {"type": "BPE", "vocab": byte_vocab(), "merges": []},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "normalizer": None,
            "added_tokens": [],
        }
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(spec))
        Tokenizer.from_directory(tmp_path)
        path.write_text(json.dumps({**spec, **change}))
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_directory(tmp_path)

    @pytest.mark.parametrize(
        ("vocab", "merges", "settings", "reason"),
        [
            ({}, [], {"tokenizer_class": "T5Tokenizer"}, "T5Tokenizer"),
            ({}, [], {"tokenizer_class": []}, "format"),
            ({}, [], {"add_bos_token": True}, "add_bos_token"),
            ({"ab": 256}, [], {}, "no merge makes"),
            ({"\u0120ab": 256}, [], {}, "no merge makes"),
            ({"ab": 257, "cd": 256}, ["a b", "c d"], {}, "merge order"),
            ({"ab": 258}, ["a b"], {}, "not 0 to"),
            ({"ab": 3}, ["a b"], {}, "not 0 to"),
            ({"ab": "256"}, ["a b"], {}, "whole number"),
            ({}, ["a b"], {}, "merge"),
            ({"abc": 256}, ["a b c"], {}, "merge"),
        ],
    )
    def test_what_tiktoken_would_not_reproduce_is_refused(
        self, tmp_path: Path, vocab: dict, merges: list[str], settings: dict, reason: str
    ) -> None:
        directory = write_files(tmp_path, byte_vocab() | vocab, merges, **settings)
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_directory(directory)

    def test_a_sequence_of_one_is_that_one(self, tmp_path: Path) -> None:
        cutter = {"type": "ByteLevel", "add_prefix_space": False}
        spec = {
            "model": {"type": "BPE", "vocab": byte_vocab() | {"ab": 256}, "merges": [["a", "b"]]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cutter]},
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        assert Tokenizer.from_directory(tmp_path).encode("ab") == [256]

    @pytest.mark.parametrize("form", ["added_tokens.json", "tokenizer_config.json"])
    def test_added_tokens_are_read_wherever_they_stand(self, tmp_path: Path, form: str) -> None:
        content: dict = {"<|im_end|>": 256}
        if form == "tokenizer_config.json":
            token = {"content": "<|im_end|>", "special": True}
            content = {"added_tokens_decoder": {"256": token}}
        (write_files(tmp_path, byte_vocab(), []) / form).write_text(json.dumps(content))
        config = GPT2Config(vocab_size=260, eos_token_id=256)
        tokenizer = Tokenizer.from_directory(tmp_path, config)
        assert tokenizer.n_vocab == 257
        assert tokenizer.decode([256]) == "<|im_end|>"
        assert tokenizer.encode("<|im_end|>", allow_special=True) == [256]
        assert 256 not in tokenizer.encode("<|im_end|>")

    def test_an_end_of_text_that_could_never_come_is_refused(self, tmp_path: Path) -> None:
        directory = write_files(tmp_path, byte_vocab(), [])
        with pytest.raises(TokenizerError, match="eos_token_id 256 is not in the tokeniser"):
            Tokenizer.from_directory(directory, GPT2Config(vocab_size=260, eos_token_id=256))
        # Beyond the model's rows it can do no harm.
        Tokenizer.from_directory(directory, GPT2Config(vocab_size=260, eos_token_id=50256))

    def test_a_missing_byte_is_refused(self, tmp_path: Path) -> None:
        vocab = {char: id for id, char in enumerate(list(byte_vocab())[:-1])}
        with pytest.raises(TokenizerError, match="1 of the 256 bytes"):
            Tokenizer.from_directory(write_files(tmp_path, vocab, []))

    def test_no_files_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match="token ids, not on text"):
            Tokenizer.from_directory(tmp_path)

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (GPT2Config(vocab_size=44928, eos_token_id=3), "44928 rows"),
            (GPT2Config(eos_token_id=2), "ordinary token '#'"),
        ],
    )
    def test_a_vocabulary_that_is_not_the_models_is_refused(
        self, gpt2_bpe: Path, config: GPT2Config, reason: str
    ) -> None:
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_directory(gpt2_bpe, config)

    def test_a_padded_vocabulary_is_not(self, gpt2_bpe: Path) -> None:
        assert Tokenizer.from_directory(gpt2_bpe, GPT2Config(vocab_size=50304)).n_vocab == 50257
