"""Byte-level BPE built from a checkpoint's own vocabulary files, encoded by tiktoken.

GPT-2's scheme (https://github.com/openai/gpt-2, ``encoder.py``): a regular expression cuts text
into words, each byte of a word is one symbol, and the merges join symbols. Files store a byte as a
printable character; ids are in merge order, so they serve tiktoken as ranks.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tiktoken

from gptile.model.config import GPT2Config, read_json_object
from gptile.model.errors import UserError

# GPT-2's word pattern, with possessive quantifiers so that it stays linear on long runs.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKENIZER_FILES = (
    VOCAB_FILE,
    MERGES_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    ADDED_TOKENS_FILE,
)
# What a token that no merge makes and no file declares must look like to be taken for a control
# token: <|endoftext|>, <pad>, [MASK].
_CONTROL_TOKEN = re.compile(r"<.+>|\[.+\]")

_BYTE_LEVEL_CLASSES = {
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
}


class TokenizerError(UserError):
    """The checkpoint has no tokeniser this class can reproduce, or the text or ids do not fit."""


class NoTokenizerError(TokenizerError):
    """The checkpoint has no tokeniser, or one of another kind: it runs on token ids."""


class Tokenizer:
    """Text to GPT-2 token ids and back, without loss.

    Attributes:
        n_vocab: one more than the highest id; ids of a model at or above it have no text.
        special_tokens: ids of tokens that plain text never produces, by their text.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
        *,
        add_prefix_space: bool = False,
    ) -> None:
        """Use :meth:`from_directory` unless the ranks are at hand.

        Args:
            ranks: id of every ordinary token; ids order the merges. All 256 bytes are among them.
            special_tokens: text and id of every other token.
            add_prefix_space: encode as if text began with a space.
        """
        self.special_tokens = dict(special_tokens)
        self.add_prefix_space = add_prefix_space
        self._encoding = tiktoken.Encoding(
            name="gptile",
            pat_str=WORD_PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=self.special_tokens,
        )
        self._bytes = {id: token for token, id in ranks.items()}
        self._bytes.update((id, text.encode()) for text, id in self.special_tokens.items())
        self.n_vocab = max(self._bytes) + 1

    @classmethod
    def from_directory(cls, directory: Path, config: GPT2Config | None = None) -> "Tokenizer":
        """Read ``vocab.json`` and ``merges.txt``, else ``tokenizer.json``.

        Args:
            directory: of the checkpoint.
            config: of the checkpoint, to refuse a vocabulary that is not the model's.

        Raises:
            NoTokenizerError: if there are none, or they describe another kind of tokeniser.
            TokenizerError: if they are damaged, or their ids do not fit the config.
        """
        try:
            if (directory / VOCAB_FILE).exists() and (directory / MERGES_FILE).exists():
                tokenizer = cls._from_vocab_and_merges(directory, config)
            elif (directory / TOKENIZER_FILE).exists():
                tokenizer = cls._from_tokenizer_json(directory, config)
            else:
                raise NoTokenizerError(
                    f"{directory}: no GPT-2 tokeniser ({VOCAB_FILE} with {MERGES_FILE}, or "
                    f"{TOKENIZER_FILE}); the model runs on token ids, not on text"
                )
        except UserError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{directory}: the tokeniser's files are not in their format "
                f"({type(error).__name__}: {error})"
            ) from None
        if config is not None:
            tokenizer._check_fits(config, directory)
        return tokenizer

    @classmethod
    def _from_vocab_and_merges(cls, directory: Path, config: GPT2Config | None) -> "Tokenizer":
        path = directory / MERGES_FILE
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: not UTF-8 text ({error})") from None
        if lines[0].startswith("#version"):
            lines = lines[1:]
        merges = [tuple(line.split(" ")) for line in lines if line.strip()]
        vocab = read_json_object(directory / VOCAB_FILE)
        settings, added = _read_settings(directory, config)
        ranks, special = _split_vocabulary(vocab, merges, added, path)
        return cls(ranks, special, add_prefix_space=bool(settings.get("add_prefix_space")))

    @classmethod
    def _from_tokenizer_json(cls, directory: Path, config: GPT2Config | None) -> "Tokenizer":
        path = directory / TOKENIZER_FILE
        spec = read_json_object(path)
        model = spec["model"]
        splitter = spec.get("pre_tokenizer") or {}
        if splitter.get("type") == "Sequence" and len(splitter["pretokenizers"]) == 1:
            splitter = splitter["pretokenizers"][0]
        after = spec.get("post_processor") or {"type": "ByteLevel"}
        byte_level_bpe = (
            model.get("type", "BPE") == "BPE"
            and isinstance(model.get("vocab"), dict)
            and isinstance(model.get("merges"), list)
            and not model.get("byte_fallback")
            and not model.get("ignore_merges")
            and not model.get("continuing_subword_prefix")
            and not model.get("end_of_word_suffix")
            and splitter.get("type") == "ByteLevel"
            and splitter.get("use_regex", True)
            and spec.get("normalizer") is None
            and after["type"] == "ByteLevel"
        )
        if not byte_level_bpe:
            raise NoTokenizerError(
                f"{path}: not GPT-2's byte-level BPE; the model runs on token ids, not on text"
            )
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        _, added = _read_settings(directory, config)
        added |= _added_tokens(((t["id"], t) for t in spec.get("added_tokens") or []), config, path)
        ranks, special = _split_vocabulary(model["vocab"], merges, added, path)
        # The flag's default in that format is true.
        return cls(ranks, special, add_prefix_space=bool(splitter.get("add_prefix_space", True)))

    def _check_fits(self, config: GPT2Config, where: Path) -> None:
        if self.n_vocab > config.vocab_size:
            raise TokenizerError(
                f"{where}: the tokeniser has ids up to {self.n_vocab - 1}, the model only "
                f"{config.vocab_size} rows: it is not this model's; use token ids"
            )
        special_ids = set(self.special_tokens.values())
        for id in config.eos_token_ids:
            if self.n_vocab <= id < config.vocab_size:
                raise TokenizerError(
                    f"{where}: eos_token_id {id} is not in the tokeniser (ids 0 to "
                    f"{self.n_vocab - 1}): it is not this model's, or not whole; use token ids"
                )
            if id < self.n_vocab and id not in special_ids:
                raise TokenizerError(
                    f"{where}: eos_token_id {id} is the ordinary token "
                    f"{self._bytes.get(id, b'').decode(errors='replace')!r} of the tokeniser: it "
                    "is not this model's; use token ids"
                )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text, nothing stripped or added; ``""`` gives ``[]``.

        Args:
            text: any text; special tokens in it are plain characters ...
            allow_special: ... unless this asks for their ids.

        Raises:
            TokenizerError: for lone surrogates, which no UTF-8 text can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text is not valid Unicode: {error}") from None
        if self.add_prefix_space and text and not text.startswith(" "):
            text = " " + text
        if allow_special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token.

        Raises:
            TokenizerError: for an id that has none.
        """
        try:
            return self._bytes[id]
        except KeyError:
            raise TokenizerError(
                f"token id {id} is not in the vocabulary (ids 0 to {self.n_vocab - 1})"
            ) from None

    def first_difference(self, other: "Tokenizer") -> int | None:
        """The lowest id that is not the same bytes in the other; None if there is none."""
        if self._bytes == other._bytes:
            return None
        ids = self._bytes.keys() | other._bytes.keys()
        return min(id for id in ids if self._bytes.get(id) != other._bytes.get(id))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: for an id that has no text.
        """
        return b"".join(self.token_bytes(id) for id in ids).decode(errors="replace")


class TextStream:
    """Text of one growing sequence of tokens, in pieces that never split a character.

    The pieces joined are ``decode`` of all ids. With stop strings the text ends before the first of
    them, so a tail that may begin one is held back until it is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, id: int) -> str:
        """Add a token, return the text that is now certain; sets ``stopped`` at a stop string."""
        return self._release(self._utf8.decode(self._tokenizer.token_bytes(id)))

    def finish(self) -> str:
        """The rest of the text."""
        text = self._release(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        if self.stopped:
            return ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@cache
def byte_to_char() -> dict[int, str]:
    """How GPT-2's files write a byte: itself where printable, else a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(0x100 + len(table) - len(printable))
    return table


def _read_settings(
    directory: Path, config: GPT2Config | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """``tokenizer_config.json``, and the tokens that it and ``added_tokens.json`` add, by text.

    Raises:
        TokenizerError: for a kind of tokeniser, or a setting, that would give other ids.
    """
    path = directory / TOKENIZER_CONFIG_FILE
    settings = read_json_object(path) if path.exists() else {}
    kind = settings.get("tokenizer_class")
    if kind is not None and kind not in _BYTE_LEVEL_CLASSES:
        raise NoTokenizerError(
            f"{path}: tokenizer_class {kind} is not GPT-2's byte-level BPE; "
            "the model runs on token ids, not on text"
        )
    for name in ("add_bos_token", "add_eos_token"):
        if settings.get(name):
            raise TokenizerError(f"{path}: {name} is not supported; use token ids")
    decoder = settings.get("added_tokens_decoder") or {}
    added = _added_tokens(((int(id), token) for id, token in decoder.items()), config, path)
    extra = directory / ADDED_TOKENS_FILE
    return settings, added | (read_json_object(extra) if extra.exists() else {})


def _added_tokens(
    entries: Iterable[tuple[int, Mapping[str, Any]]], config: GPT2Config | None, path: Path
) -> dict[str, int]:
    """Ids of added tokens by their text.

    Raises:
        TokenizerError: for one that counts as ordinary text: Hugging Face cuts text at it, we not.
    """
    control: set[int | None] = set()
    if config is not None:
        control = {*config.eos_token_ids, config.bos_token_id, config.pad_token_id}
    added = {}
    for id, token in entries:
        if token.get("special") is False and id not in control:
            raise TokenizerError(
                f"{path}: the added token {token['content']!r} is ordinary text, which is not "
                "supported; use token ids"
            )
        added[token["content"]] = id
    return added


def _split_vocabulary(
    vocab: Mapping[str, Any],
    merges: list[tuple[str, ...]],
    added: Mapping[str, int],
    path: Path,
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Ordinary tokens (bytes and results of merges) by their bytes, special tokens by their text.

    Raises:
        TokenizerError: where tiktoken would not reproduce the vocabulary.
    """
    ids: dict[str, int] = {**vocab, **added}
    if any(type(id) is not int or id < 0 for id in ids.values()):
        raise TokenizerError(f"{path}: a token's id is not a whole number")
    if sorted(ids.values()) != list(range(len(ids))):
        raise TokenizerError(f"{path}: the ids of {len(ids)} tokens are not 0 to {len(ids) - 1}")
    char_to_byte = {char: byte for byte, char in byte_to_char().items()}
    if missing := [byte for char, byte in char_to_byte.items() if char not in vocab]:
        raise TokenizerError(
            f"{path}: {len(missing)} of the 256 bytes are missing (0x{missing[0]:02x} first), so "
            "not every text can be encoded; use token ids"
        )
    ranks = {bytes([byte]): ids[char] for char, byte in char_to_byte.items()}
    previous = -1
    for merge in merges:
        token = "".join(merge)
        if len(merge) != 2 or token not in vocab or any(part not in vocab for part in merge):
            raise TokenizerError(f"{path}: merge {' '.join(merge)!r} is not of two known tokens")
        if ids[token] <= previous:
            raise TokenizerError(
                f"{path}: ids are not in merge order at {token!r} (id {ids[token]}); use token ids"
            )
        previous = ids[token]
        ranks[bytes(char_to_byte[char] for char in token)] = ids[token]
    ordinary = set(ranks.values())
    special = {token: id for token, id in ids.items() if id not in ordinary}
    for token in special.keys() - added.keys():
        if not _CONTROL_TOKEN.fullmatch(token):
            raise TokenizerError(
                f"{path}: no merge makes the token {token!r}: the merges are cut short or of "
                "another vocabulary"
            )
    return ranks, special
