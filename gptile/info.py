"""What ``gptile info`` says of a checkpoint, from its config and the headers of its files."""

import math
from collections import Counter
from typing import Any

from gptile.model.tokenizer import TokenizerError
from gptile.weights import open_checkpoint
from gptile.weights.checkpoint import check_tensors, with_embedding


def describe(model: str, revision: str | None = None) -> dict[str, Any]:
    """A record of a checkpoint, every tensor checked by name and shape; of the weights only the
    headers are read.

    Raises:
        UserError: if the checkpoint is not whole, or not a GPT-2 we run.
    """
    checkpoint = open_checkpoint(model, revision)
    config = checkpoint.config
    stored = with_embedding(config, checkpoint.stored_tensors())
    parameters = check_tensors(config, stored, checkpoint.files.directory, conv1d=True)
    dtypes = Counter(tensor.dtype for tensor in stored.values())
    try:
        tokenizer = checkpoint.load_tokenizer()
        text = f"byte-level BPE, {tokenizer.n_vocab:,} tokens"
    except TokenizerError as error:
        text = f"none: {error}"
    return {
        "directory": str(checkpoint.files.directory),
        "files": ", ".join(path.name for path in checkpoint.files.weights),
        "bytes": sum(path.stat().st_size for path in checkpoint.files.weights),
        "stored_as": ", ".join(dtypes),
        "parameters": sum(math.prod(shape) for shape in parameters.values()),
        "layers": config.n_layer,
        "heads": config.n_head,
        "head_dim": config.head_dim,
        "width": config.n_embd,
        "mlp_width": config.inner_dim,
        "context": config.n_positions,
        "vocabulary": config.vocab_size,
        "activation": config.activation_function,
        "tied_head": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "tokeniser": text,
        "kv_cache_bytes_per_token_fp32": 2 * config.n_layer * config.n_embd * 4,
    }
