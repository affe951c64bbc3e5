"""Hub ids against a server on this machine that speaks the hub's protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gptile.model.gpt2 import GPT2
from gptile.weights import save_checkpoint
from gptile.weights.files import DEMO

COMMIT = "c" * 40


class Hub:
    """Serves one repository, ``owner/model``, and remembers what was asked of it."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(body=True)

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def answer(self, body: bool) -> None:
                path = self.path.split("?")[0]
                hub.requests.append((self.command, path))
                hub.tokens.add(self.headers.get("authorization"))
                parts = path.strip("/").split("/")
                if path.startswith("/api/models/owner/model"):
                    revision = parts[5] if len(parts) > 5 else "main"
                    if revision not in ("main", COMMIT):
                        return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                    names = sorted(p.name for p in hub.files.iterdir())
                    listing = {
                        "id": "owner/model",
                        "sha": COMMIT,
                        "siblings": [{"rfilename": name} for name in names],
                    }
                    return self.send(200, json.dumps(listing).encode(), {}, body)
                if parts[:3] == ["owner", "model", "resolve"]:
                    file = hub.files / parts[4]
                    content = file.read_bytes()
                    etag = hashlib.sha256(content).hexdigest()
                    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
                    return self.send(200, content, headers, body)
                if "gated" in parts:
                    return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
                return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

            def send(self, code: int, content: bytes, headers: dict, body: bool = True) -> None:
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def downloaded(self) -> set[str]:
        return {p.split("/")[-1] for method, p in self.requests if method == "GET" and "res" in p}

    def gptile(self, cache: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
        self.requests.clear()
        return subprocess.run(
            [sys.executable, "-m", "gptile", *args],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
                "HF_ENDPOINT": self.url,
                "HF_HOME": str(cache),
                "HF_HUB_DISABLE_XET": "1",
                "NO_PROXY": "127.0.0.1",
                **env,
            },
            capture_output=True,
            text=True,
            cwd=cache,
        )


@pytest.fixture
def hub(model: GPT2, tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "files"
    save_checkpoint(model, files)
    for name in (
        "pytorch_model.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "README.md",
        "onnx.safetensors",
    ):
        (files / name).write_text("large and not needed")
    hub = Hub(files)
    yield hub
    hub.server.shutdown()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir()
    return path


def test_only_what_is_needed_is_fetched_and_then_found_in_the_cache(hub: Hub, cache: Path) -> None:
    ids = ("generate", "--model", "owner/model", "--ids", "1 2", "--temperature", "0")
    first = hub.gptile(cache, *ids)
    assert first.returncode == 0, first.stderr
    assert hub.downloaded() == {"config.json", "generation_config.json", "model.safetensors"}
    again = hub.gptile(cache, *ids)
    assert again.stdout == first.stdout
    assert hub.downloaded() == set()
    hub.server.shutdown()
    offline = hub.gptile(cache, *ids, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout
    assert hub.requests == []


def test_a_dead_hub_falls_back_to_the_cache(hub: Hub, cache: Path) -> None:
    first = hub.gptile(cache, "info", "owner/model", "--json")
    dead = hub.gptile(cache, "info", "owner/model", "--json", HF_ENDPOINT="http://127.0.0.1:9")
    assert dead.returncode == 0, dead.stderr
    assert json.loads(dead.stdout) == json.loads(first.stdout)


@pytest.mark.parametrize("kind", ["vocab", "json"])
def test_one_form_of_the_tokeniser_is_fetched(hub: Hub, cache: Path, kind: str) -> None:
    (hub.files / "tokenizer.json").write_text("{}")
    wanted = {"tokenizer.json"}
    if kind == "vocab":
        for name in ("vocab.json", "merges.txt"):
            (hub.files / name).write_bytes((DEMO / name).read_bytes())
        wanted = {"vocab.json", "merges.txt"}
    hub.gptile(cache, "info", "owner/model")
    assert hub.downloaded() & {"tokenizer.json", "vocab.json", "merges.txt"} == wanted


def test_shards_are_fetched_by_their_index(hub: Hub, cache: Path) -> None:
    (hub.files / "model.safetensors").rename(hub.files / "part.safetensors")
    index = {"weight_map": {"wte.weight": "part.safetensors"}}
    (hub.files / "model.safetensors.index.json").write_text(json.dumps(index))
    run = hub.gptile(cache, "info", "owner/model", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["files"] == "part.safetensors"
    assert "onnx.safetensors" not in hub.downloaded()


def test_revision_and_token_are_honoured(hub: Hub, cache: Path) -> None:
    args = ("info", "owner/model", "--revision", COMMIT)
    assert hub.gptile(cache, *args, HF_TOKEN="hf_secret").returncode == 0
    assert "Bearer hf_secret" in hub.tokens
    run = hub.gptile(cache, "info", "owner/model", "--revision", "v9", HF_TOKEN="hf_secret")
    assert run.returncode == 2
    assert "no such revision" in run.stderr
    assert "hf_secret" not in run.stderr + run.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [("owner/other", "neither a local path nor a model on the hub"), ("owner/gated", "gated")],
)
def test_what_cannot_be_had_is_one_line(hub: Hub, cache: Path, name: str, reason: str) -> None:
    run = hub.gptile(cache, "info", name)
    assert run.returncode == 2
    assert reason in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""


def test_only_a_pickle_on_the_hub(hub: Hub, cache: Path) -> None:
    (hub.files / "model.safetensors").unlink()
    run = hub.gptile(cache, "info", "owner/model")
    assert run.returncode == 2
    assert "gptile convert" in run.stderr
    assert "pytorch_model.bin" not in hub.downloaded()


def test_never_fetched_and_offline(hub: Hub, cache: Path) -> None:
    run = hub.gptile(cache, "info", "owner/model", HF_HUB_OFFLINE="1")
    assert run.returncode == 2
    assert "not in the hub cache" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
