"""A deployment, as far as it goes without a GPU: requests of any size in a process of its own. It
prints, as JSON, what Triton had to compile and how many entries it loaded from its cache.

    python deployment.py MODEL TARGET DTYPE BATCH
"""

import json
import sys
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptile.bench.checkpoints import read_sizes
from gptile.bench.compiler import compiling_for
from gptile.bench.dry_run import chunk, dry_run, generation, hollow_model, scoring
from gptile.kernels.jit import triton

source, target, dtype, batch = sys.argv[1:]
config, tokenizer = read_sizes(source)
model = hollow_model(config, getattr(torch, dtype))
longest = config.n_positions
missed: dict[str, list[Any]] = {}
loaded = 0
size: list[Any] = []


def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
    global loaded
    loaded += cache_hit
    if not cache_hit:
        missed[f"{src.fn.__name__} {src.signature} {src.attrs}"] = [*size]


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    st.integers(1, int(batch)),
    st.integers(1, longest - 2),
    st.integers(1, longest),
    st.sampled_from([1.0, 1.2]),
    st.sampled_from([None, tokenizer]),
)
def serve(n_rows: int, n_tokens: int, max_len: int, penalty: float, given_tokenizer: Any) -> None:
    size[:] = n_rows, n_tokens, max_len, penalty
    for _ in generation(model, n_rows, n_tokens, 2, tokenizer=given_tokenizer, penalty=penalty):
        pass
    # Decode steps whose cache is longer.
    new = min(max_len, longest - n_tokens)
    steps = generation(model, n_rows, n_tokens, new, tokenizer=given_tokenizer)
    next(steps)
    next(steps, None)
    chunk(model, min(n_tokens, max_len), n_rows, max_len)
    scoring(model, n_rows, max_len)


triton.knobs.compilation.listener = listen
with (
    compiling_for(target),
    dry_run(lambda kernel, grid, args, options: kernel.warmup(*args, grid=grid, **options)),
):
    serve()
print(json.dumps({"missed": missed, "loaded": loaded}))
