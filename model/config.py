"""The architecture of a GPT-2, read from and written to a Hugging Face ``config.json``."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptile.kernels import ACTIVATIONS
from gptile.model.errors import UserError

# Fields of Hugging Face configs that change neither the numbers nor the ids of a causal language
# model: provenance, training and output switches, heads of other tasks, generation defaults (which
# `generate` takes from its caller).
_INERT_FIELDS = frozenset(
    """
    architectures _name_or_path name_or_path transformers_version torch_dtype dtype n_ctx use_cache
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    task_specific_params finetuning_task problem_type num_labels _num_labels id2label label2id
    tokenizer_class prefix sep_token_id decoder_start_token_id return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing output_past
    chunk_size_feed_forward _commit_hash _attn_implementation _attn_implementation_autoset
    attn_implementation max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    n_special predict_special_tokens xla_device tie_encoder_decoder transformers.js_config license
    """.split()
)
# Fields that would change the network; we implement only these values of them.
_FIXED_FIELDS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
# Far beyond any GPT-2, and small enough that no shape overflows.
_LARGEST = {
    "vocab_size": 2**24,
    "n_positions": 2**24,
    "n_embd": 2**20,
    "n_layer": 1024,
    "n_head": 2**20,
    "n_inner": 2**24,
}
# The attribute names other architectures use for the same things.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class GPT2Config:
    """Every field that changes the numbers, under its Hugging Face name; defaults are GPT-2 124M's.

    Raises:
        UserError: for a value the network cannot have.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    initializer_range: float = 0.02
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, most in _LARGEST.items():
            value = getattr(self, name)
            if name == "n_inner" and value is None:
                continue
            ok = _is_int(value) and 0 < value <= most
            _require(ok, self, name, f"a whole number from 1 to {most}")
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 <= value < 1, self, name, "in [0, 1)")
        for name in ("layer_norm_epsilon", "initializer_range"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 < value < 1e30, self, name, "a positive number")
        for field in dataclasses.fields(self):
            if field.type is bool:
                value = getattr(self, field.name)
                _require(isinstance(value, bool), self, field.name, "true or false")
        if not isinstance(self.activation_function, str) or (
            self.activation_function not in ACTIVATIONS
        ):
            raise UserError(
                f"config: activation_function {self.activation_function!r} is not supported; "
                f"one of {', '.join(ACTIVATIONS)} is"
            )
        if self.n_embd % self.n_head:
            raise UserError(
                f"config: n_embd {self.n_embd} is not divisible by n_head {self.n_head}"
            )
        # Checkpoints trained with a foreign tokeniser may keep GPT-2's default 50256 beyond a
        # smaller vocabulary, so an id out of range is allowed: it is simply never produced.
        for name in ("bos_token_id", "pad_token_id"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and value >= 0), self, name, "an id or null")
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        _require(
            all(_is_int(i) and i >= 0 for i in self.eos_token_ids),
            self,
            "eos_token_id",
            "an id, a list of ids or null",
        )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text; empty when there is none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def attention_scale(self, layer: int) -> float:
        """The factor on the attention scores of a layer (counted from 0)."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "GPT2Config":
        """Read the fields of a ``config.json``.

        Raises:
            UserError: for a field this implementation does not know or honour, or a bad value.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            name = _ALIASES.get(name, name)
            if name in known:
                if name in kept and kept[name] != value:
                    raise UserError(f"config: {name} is given twice: {kept[name]} and {value}")
                kept[name] = value
            elif name in _FIXED_FIELDS:
                if value not in _FIXED_FIELDS[name]:
                    raise UserError(f"config: {name} = {value!r} is not supported")
            elif name not in _INERT_FIELDS and value is not None:
                raise UserError(
                    f"config: unknown field {name!r} = {value!r}; it may change the numbers, so "
                    "remove it from config.json only if you know that it does not"
                )
        return cls(**kept)

    @classmethod
    def from_json(cls, path: Path) -> "GPT2Config":
        """Read a ``config.json``; errors name the file."""
        fields = read_json_object(path)
        try:
            return cls.from_dict(fields)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields of a ``config.json`` that transformers loads as the same network."""
        fields = dataclasses.asdict(self)
        if isinstance(self.eos_token_id, tuple):
            fields["eos_token_id"] = list(self.eos_token_id)
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **fields}


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: if the file is missing, is not UTF-8 JSON or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _require(ok: bool, config: GPT2Config, name: str, what: str) -> None:
    if not ok:
        raise UserError(f"config: {name} must be {what}, got {getattr(config, name)!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


PRESETS: dict[str, GPT2Config] = {
    "distilgpt2": GPT2Config(n_layer=6),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}
"""The published sizes, by hub name."""
