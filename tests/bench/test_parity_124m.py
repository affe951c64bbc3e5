"""A random model of GPT-2's own size, written by transformers and read by us."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gptile.bench.huggingface import import_transformers
from gptile.bench.parity import compare

N_PARAMETERS = 124_439_808


@pytest.fixture(scope="module")
def gpt2_124m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = import_transformers()
    directory = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return directory


def test_parity_at_124m(gpt2_124m: Path) -> None:
    lines = compare(gpt2_124m, n_tokens=12, n_greedy=6).lines
    assert [str(line) for line in lines if not line.ok] == []


def test_loading_peaks_at_little_more_than_the_parameters(gpt2_124m: Path) -> None:
    program = f"""
        import gptile.model.generation, gptile.weights

        def kilobytes(field):
            for line in open("/proc/self/status"):
                if line.startswith(field):
                    return int(line.split()[1])

        before = kilobytes("VmRSS")
        model = gptile.weights.open_checkpoint({str(gpt2_124m)!r}).load_model()
        print(model.num_parameters(), (kilobytes("VmHWM") - before) * 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    n_parameters, peak = map(int, output.split())
    assert n_parameters == N_PARAMETERS
    assert peak <= 1.2 * 4 * N_PARAMETERS, f"{peak / (4 * N_PARAMETERS):.3f} x the parameters"
