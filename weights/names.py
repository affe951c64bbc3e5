"""How checkpoints name their files, and name and lay out GPT-2's tensors."""

import re

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_FILE, PICKLE_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What ``generation_config.json`` has in common with ``config.json``."""

# Wrappers of torch.compile, (D)DP and DeepSpeed, FSDP, and activation checkpointing: they insert
# their name anywhere in a path.
_WRAPPERS = {
    "_orig_mod",
    "module",
    "_forward_module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}
# Attributes under which checkpoints hold the trunk; only at the start of a path.
_ROOTS = {"transformer", "model"}
# Causal masks that old versions of transformers (and nanoGPT) saved as buffers.
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# Hugging Face's Conv1D keeps the weights of these four maps as [in, out].
_CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")

HEAD, TOKEN_EMBEDDING = "lm_head.weight", "wte.weight"


def canonical_name(name: str) -> str:
    """Our parameter name for a checkpoint's key: wrappers and the trunk's prefix dropped."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _ROOTS:
        parts = parts[1:]
    return ".".join(parts)


def is_mask_buffer(name: str) -> bool:
    """Whether a canonical name is a stored causal mask, which carries no information."""
    return _MASK_BUFFER.fullmatch(name) is not None


def is_conv1d(name: str) -> bool:
    """Whether Hugging Face stores this parameter transposed to ours."""
    return _CONV1D.fullmatch(name) is not None


def hugging_face_name(name: str) -> str:
    """The key GPT2LMHeadModel saves this parameter under."""
    return name if name == HEAD else f"transformer.{name}"
