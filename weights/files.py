"""Find the files of a checkpoint: a local directory, a single file, or a Hugging Face hub id."""

import re
from dataclasses import dataclass
from pathlib import Path

from gptile.model.config import read_json_object
from gptile.weights.errors import CheckpointError
from gptile.weights.names import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLE_FILE,
    PICKLE_INDEX_FILE,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
)

DEMO = Path(__file__).parent / "demo"
"""The checkpoint that ships with the package."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class CheckpointFiles:
    """Where a checkpoint lies.

    Attributes:
        directory: holds the config and, where there are any, the tokeniser's files.
        weights: the safetensors files, one or all shards.
    """

    directory: Path
    weights: tuple[Path, ...]


def find_checkpoint(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """Resolve ``source``; a hub id is downloaded, only the files needed, into the hub's cache.

    Args:
        source: a directory, a ``.safetensors`` file beside its ``config.json``, a hub id
            (``gpt2``, ``owner/name``), or ``demo`` for the one in the package (a directory of that
            name is ``./demo``). What exists on disk wins over the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: if there is no such checkpoint, naming what is missing.
    """
    if str(source) == "demo":
        source = DEMO
    path = local_path(source)
    if path.exists() or path == DEMO:
        if revision is not None:
            raise CheckpointError(f"{source} is local: a revision applies to hub models only")
        return _single_file(path) if path.is_file() else _in_directory(path)
    if path.suffix in (".safetensors", *PICKLE_SUFFIXES) or not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(f"{source}: no such file or directory")
    # Imported when needed: it takes a quarter of a second.
    from gptile.weights.hub import fetch

    return _in_directory(fetch(str(source), revision))


def local_path(source: str | Path) -> Path:
    """A path with ``~`` expanded.

    Raises:
        CheckpointError: if that names no home directory.
    """
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _single_file(path: Path) -> CheckpointFiles:
    if path.suffix == ".json":
        raise CheckpointError(f"{path} holds no weights; pass its directory, {path.parent}")
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path} is a pickle; run `gptile convert` on it first")
    _require_config(path.parent)
    return CheckpointFiles(path.parent, (path,))


def _in_directory(directory: Path) -> CheckpointFiles:
    _require_config(directory)
    if (directory / WEIGHTS_FILE).exists():
        return CheckpointFiles(directory, (directory / WEIGHTS_FILE,))
    if (directory / INDEX_FILE).exists():
        return CheckpointFiles(directory, shard_paths(directory / INDEX_FILE))
    if len(found := sorted(directory.glob("*.safetensors"))) == 1:
        return CheckpointFiles(directory, tuple(found))
    if found:
        raise CheckpointError(f"{directory}: several .safetensors files and no {INDEX_FILE}")
    if (directory / PICKLE_FILE).exists() or (directory / PICKLE_INDEX_FILE).exists():
        raise CheckpointError(
            f"{directory}: the weights are a pickle ({PICKLE_FILE}); run `gptile convert` first"
        )
    raise CheckpointError(f"{directory}: no {WEIGHTS_FILE} or {INDEX_FILE}")


def _require_config(directory: Path) -> None:
    if not (directory / CONFIG_FILE).exists():
        raise CheckpointError(f"{directory}: no {CONFIG_FILE}, so not a checkpoint directory")


def shard_names(index: Path) -> list[str]:
    """The files that an index names, each once, in order.

    Raises:
        CheckpointError: if it is no index, or names a file outside its own directory.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not the name of a file beside it")
    return list(dict.fromkeys(weight_map.values()))


def shard_paths(index: Path) -> tuple[Path, ...]:
    """The local files that an index names.

    Raises:
        CheckpointError: if one is missing.
    """
    shards = tuple(index.parent / name for name in shard_names(index))
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise CheckpointError(f"{index.parent}: missing shard {', '.join(missing)}")
    return shards
