"""Several processes score what one does, to the last bit, and fail together."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest


def processes(n: int, *args: str) -> subprocess.CompletedProcess:
    """Python with these arguments, under torchrun where n is more than one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return subprocess.run(
        [sys.executable, *(launcher if n > 1 else []), *args],
        # As torchrun itself sets it.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five documents, which 2 processes cannot share evenly, nor 3."""
    path = tmp_path_factory.mktemp("corpus") / "five.jsonl"
    texts = ["First Citizen:\n", "Before we proceed", "any further, hear me speak. " * 9, "a", "We"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def runs(five: Path) -> dict[int, dict[str, Any]]:
    """The record of a run on 1, 2 and 3 processes."""
    found = {}
    for n in (1, 2, 3):
        args = ("-m", "gptile", "evaluate", str(five), "--json", "--bos", "--batch-size", "1")
        run = processes(n, *args)
        assert run.returncode == 0, run.stderr
        (line,) = run.stdout.splitlines()  # the first process tells, and no other
        found[n] = json.loads(line)
    return found


def test_the_result_is_the_same_to_the_last_bit(runs: dict[int, dict[str, Any]]) -> None:
    rows = {}
    for n, record in runs.items():
        assert record["settings"]["processes"] == n
        (row,) = record["rows"]
        rows[n] = {k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}
    assert rows[1] == rows[2] == rows[3]


def test_five_documents_count_five(runs: dict[int, dict[str, Any]]) -> None:
    for record in runs.values():
        documents = record["rows"][0]["documents"]
        assert len(documents) == 5
        assert all(document["nll"] > 0 for document in documents)
        assert record["rows"][0]["tokens"] == sum(document["tokens"] for document in documents)


SCRIPTED = """
    import sys
    from types import SimpleNamespace

    import torch
    from gptile.bench.corpus import Corpus
    from gptile.bench.evaluation import processes, summarise, window_sums
    from gptile.model.tokenizer import Tokenizer

    def model(ids, targets, **_):
        return SimpleNamespace(loss=torch.where(ids == 4, 4.0, 1.0))

    cpu = torch.device("cpu")
    letters = Tokenizer({bytes([i]): i for i in range(256)}, {})
    corpus = Corpus([[4] * 6, [1, 1]], 8, 8)
    with processes(cpu) as (rank, n):
        plan = corpus.plan(1, 8)[rank::n]
        assert [len(plan), n] == [1, 2]
        if sys.argv[1:] == ["fail"] and rank == 1:
            raise SystemExit("planted")
        score = summarise(corpus, window_sums([model], corpus, plan, devices=[cpu]), letters)
    sys.stdout.write(f"{rank} {score.total} {score.n_tokens} {score.nll}\\n")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "scripted.py"
    path.write_text(textwrap.dedent(SCRIPTED))
    return str(path)


def test_processes_are_weighted_by_their_tokens(script: str) -> None:
    """5 tokens of loss 4 in one, 1 of loss 1 in the other: 21/6, not the mean of their means."""
    run = processes(2, script)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0 21.0 6 3.5", "1 21.0 6 3.5"]


def test_an_error_in_one_process_ends_all(script: str) -> None:
    run = processes(2, script, "fail")
    assert run.returncode != 0
    assert "planted" in run.stderr
    assert run.stdout == ""
