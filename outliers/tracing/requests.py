"""Traces of several requests in one folder: the last one, and the others below `earlier/`.

A request is what a run was asked for: a model, a text, and options that change what is traced.

This module does not import torch, so that a finished run is reprinted at once.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from outliers.errors import UserError
from outliers.files import EARLIER, check_file, move

STEM = "trace"  # of the name of a trace file


def labels_of(path: Path) -> dict | None:
    """Return the `labels` of a trace file by reading its header only; None if there is none."""
    try:
        check_file(path)
        with safe_open(path, "np") as file:
            header = json.loads((file.metadata() or {})["trace"])
            labels = header["labels" if "labels" in header else "about"]  # "about" up to version 0.2.0
        return labels if isinstance(labels, dict) else None
    except (UserError, OSError, LookupError, TypeError, ValueError, RecursionError, SafetensorError):
        return None


def request_of(labels: dict) -> str:
    """Return a name for the request of a trace, a hash of its labels without those of weights and code, which may
    change between two runs of one request."""
    request = {name: value for name, value in labels.items() if name not in ("weights_hash", "code")}
    return f"{STEM}-{hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]}"


def exchange_traces(folder: Path, request: str, names: Sequence[str]) -> None:
    """Move the trace of another request out of a folder, and that of this request back.

    Args:
        folder: of the trace.
        request: by `request_of`.
        names: of the trace file, first, and of the files derived from it.
    """
    before = labels_of(folder / names[0])
    if before and (other := request_of(before)) != request:
        move(folder, folder / EARLIER / other, names)
    if not (folder / names[0]).exists():
        move(folder / EARLIER / request, folder, names)
