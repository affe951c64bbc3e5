"""What a benchmark found, as a table's rows, and as a JSON file that can be compared and reported.

A file is one object: ``kind`` (which command), ``settings`` (what was asked), ``environment`` (see
:mod:`gptile.bench.environment`), ``notes`` (what a reader must know) and ``rows``. A row has a
``subject``, the names that tell it from the other rows, and beside it whatever was measured; times
are under ``seconds``, every sample of them.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptile.bench.environment import environment
from gptile.bench.files import write_whole
from gptile.model.config import read_json_object
from gptile.model.errors import UserError

SCHEMA = 1
KINDS = ("parity", "kernels", "model", "ladder", "profile", "evaluation")


@dataclass
class Result:
    """See the module's docstring.

    Attributes:
        device: what ran, ``cpu`` or ``cuda``.
        seed: of the inputs.
    """

    kind: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    device: str = "cpu"
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """Everything as JSON values; NaN and the infinities, which JSON does not have, as null."""
        found: dict[str, Any] = _finite(
            {
                "schema": SCHEMA,
                "kind": self.kind,
                "settings": self.settings,
                "environment": environment(self.device, self.seed),
                "notes": self.notes,
                "rows": self.rows,
            }
        )
        return found


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write it whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(path, f"{text}\n".encode())


def load_record(path: Path) -> dict[str, Any]:
    """A file that :func:`save_record` wrote, checked.

    Raises:
        UserError: if it is not there or is not such a file.
    """
    record = read_json_object(path)
    rows = record.get("rows")
    if record.get("schema") != SCHEMA or record.get("kind") not in KINDS:
        raise UserError(f"{path}: not a result of gptile bench, parity or evaluate")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("subject"), dict) for row in rows
    ):
        raise UserError(f"{path}: rows must be a list of objects, each with a subject")
    for name in ("settings", "environment"):
        if not isinstance(record.get(name), dict):
            raise UserError(f"{path}: {name} is missing or not an object")
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
