"""Rows on disk: JSON lines that are replaced as a whole, so that a killed run leaves the old file or the new one."""

import codecs
import contextlib
import itertools
import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

from outliers.errors import UserError
from outliers.experiment.interrupt import Interrupted, asked_to_stop, finishing, stop_if_asked
from outliers.experiment.row_check import check_row, lacking, parse_row
from outliers.files import locked, part_of, read_whole, remove_all_left, remove_left, write_whole
from outliers.models.watch import check_unchanged
from outliers.specification.kinds import BOS, Experiment, Latency, LinearLayers, Memory, Named, ZeroShot, threshold_of

MOST_BYTES = 2**30  # of a file of rows, of about a kilobyte each
logger = logging.getLogger(__name__)

# A finished row is used again if it agrees with the cell in these; the rest of its provenance is what came of it.
IDENTITY = (
    "model",
    "checkpoint",
    "weights_hash",
    "scheme",
    "metric",
    "text",
    "tokens_hash",
    "protocol",
    "block",
    "blocks",
    "alpha",
    "roles",
    "device",
    "dtype",
    "kernels",
    "version",
    "subject",
    "method",
    "where",
    "features",
    "draw",
    "draws",
    "seed",
    "feature",
    "layer",
    "role",
    "position",
    "batch",
    "prompt",
    "tokens",
    "repeats",
    "way",
    "dimension",
    "task",
    "task_version",
    "documents_hash",
    "limit",
    "scheme_parts",
    "skip",
    "bits",
    "gpus",
    "gigabytes",
    "context",
    "headroom",
)


def identity(row: dict) -> tuple:
    """What makes two rows the same measurement."""
    fields = (row.get(field) for field in IDENTITY)
    return tuple(tuple(field) if isinstance(field, list) else field for field in fields)


class RowFile:
    """The rows of one experiment, `rows.jsonl` in its folder: `with RowFile(folder) as row_file`.

    Entered, it keeps the folder to this process (see `outliers.files.locked`) and reads the rows that are there; a
    folder in which nothing was measured is removed. Tables, figures and pages are written after that, without the lock.
    A last line that is torn is moved to a file beside it. Rows that lack something are no finished ones, and stay.

    The first Ctrl-C lets the rows that are being measured finish, the second one stops at once. Either ends in
    `Interrupted`, which says how many rows are finished.

    Raises:
        UserError: the folder cannot be written or another run has it, or the file holds something else than rows.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "rows.jsonl"
        self.rows: list[dict] = []

    def __enter__(self) -> "RowFile":
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            remove_left(part_of(self.path))  # of a run that was killed while it wrote
            remove_all_left(self.folder)
            found = found_in(self.folder)
            self.rows = found.rows
            if found.torn:
                _move_aside(self.path, found)
            stack.enter_context(finishing())
            self._exits = stack.pop_all()
        return self

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        self._exits.close()
        if isinstance(error, KeyboardInterrupt) or (error is None and asked_to_stop()):
            rows = f"{len(self.rows)} finished row{'' if len(self.rows) == 1 else 's'}"
            raise Interrupted(f"{rows} in '{self.folder}'") from None

    def find(self, row: dict) -> dict | None:
        """The finished row that is the same measurement as `row`, if there is one."""
        stop_if_asked()
        return next((old for old in self.rows if identity(old) == identity(row) and not lacking(old)), None)

    def find_all(self, cell: dict) -> list[dict]:
        """The finished rows that agree with `cell` in all that it says of their identity."""
        stop_if_asked()
        said = [field for field in IDENTITY if field in cell]
        return finished([row for row in self.rows if all(row.get(field) == cell[field] for field in said)])

    def add(self, *rows: dict) -> None:
        """Write more rows, all or none, each in the place of any that is the same measurement.

        Raises:
            UserError: they cannot be written, one holds what no row may, such as an infinite value, or the weights that
                they are of changed since they were read.
        """
        for row in rows:
            try:
                check_row(row)
            except ValueError as error:
                raise UserError(f"a row of '{self.folder}' cannot be kept: {error}") from None
        for model, checkpoint in {(row["model"], row.get("checkpoint")) for row in rows if "weights_hash" in row}:
            check_unchanged(model, checkpoint)
        new = [identity(row) for row in rows]
        kept = [old for old in self.rows if identity(old) not in new] + list(rows)
        write_whole(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        self.rows = kept


def finished(rows: list[dict]) -> list[dict]:
    """Of rows those that lack nothing."""
    return [row for row in rows if not lacking(row)]


class Found(NamedTuple):
    """What a file holds: rows; the lines that they are of, and a torn last one."""

    rows: list[dict]
    whole: bytes
    torn: bytes


def read_rows(folder: Path) -> list[dict]:
    """The rows in a folder, none where it has no file of them; a run may be adding to them, and nothing is changed.

    Of several rows of the same measurement the last one counts.

    Raises:
        UserError: the file cannot be read or holds something else, in a line that is named; only the last line may be
            torn, and is then left out.
    """
    found = found_in(folder)
    if found.torn:
        logger.info(f"the last line of '{folder / 'rows.jsonl'}' is torn; what it held is left out")
    return found.rows


def found_in(folder: Path) -> Found:
    """What the file of a folder holds; see `read_rows`."""
    path = folder / "rows.jsonl"
    try:
        content = read_whole(path, MOST_BYTES)
    except FileNotFoundError:
        return Found([], b"", b"")
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror or error})") from None
    rows = {}
    lines = content.removeprefix(codecs.BOM_UTF8).rstrip().split(b"\n")  # at nothing else, which may be in a name
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_row(line)
        except ValueError as error:
            if number == len(lines) and not _is_json(line):
                return Found(list(rows.values()), content[: content.rindex(line)], line)
            raise UserError(
                f"line {number} of '{path}' is damaged ({error}); delete this line, or choose another folder with --out"
            ) from None
        rows[identity(row)] = row
    return Found(list(rows.values()), content, b"")


def _is_json(line: bytes) -> bool:
    """Whether a line is all there, for what is written in part is no JSON."""
    try:
        json.loads(line.decode())
    except ValueError:
        return False
    except RecursionError:
        pass
    return True


def _move_aside(path: Path, found: Found) -> None:
    """Move a torn line to a file of its own, beside those of earlier times."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (path.with_name(f"{path.name}.torn{number}") for number in numbers)
    aside = next(place for place in places if not os.path.lexists(place))
    write_whole(aside, found.torn)
    if found.whole:
        write_whole(path, found.whole)
    else:
        path.unlink()
    logger.info(f"the last line of '{path}' was torn; it is in '{aside.name}' now, and what it held is measured again")


# Fields of a specification that list what a row has one of.
LISTS = {
    "models": "model",
    "revisions": "checkpoint",
    "schemes": "scheme",
    "tasks": "task",
    "batches": "batch",
    "dimensions": "dimension",
}


# Which metrics an experiment measures; those of models are many.
MEASURES = {
    Experiment: ("perplexity",),
    ZeroShot: ("zeroshot.",),
    Latency: ("latency.",),
    LinearLayers: ("linear_layer.",),
    Memory: ("parameters", "weights", "cache", "activations", "fits"),
}
# What came of an experiment that does not say it: of rows that differ in nothing else, the last one counts.
CAME_OF_IT = ("weights_hash", "tokens_hash", "documents_hash", "task_version", "protocol", "version", "kernels")


def rows_of(spec: Named, rows: list[dict]) -> list[dict]:
    """Of rows those that an experiment would measure, without asking its models; in the experiment's order.

    Of rows that differ in nothing but texts, weights, versions or device the last one counts.
    """
    asked = {field: getattr(spec, field) for field in type(spec).model_fields}
    metrics = MEASURES.get(type(spec), ("",))
    if "schemes" in asked:  # which have thresholds of their own
        thresholds = {getattr(scheme, "name", scheme): threshold_of(spec, scheme) for scheme in asked["schemes"]}
        asked["schemes"] = list(thresholds)
        own = [(row, thresholds.get(row.get("scheme"))) for row in rows]
        rows = [row for row, threshold in own if row.get("alpha", threshold) == threshold]
        del asked["alpha"]
    found = [
        row
        for row in rows
        if ("metric" not in row or row["metric"].startswith(metrics))
        and all(_agrees(row, field, value) for field, value in asked.items())
    ]
    lasting = [field for field in IDENTITY if field not in CAME_OF_IT and field not in asked]
    last = {tuple(str(row.get(field)) for field in lasting): row for row in found}
    models = asked.get("models") or []
    return sorted(last.values(), key=lambda row: models.index(row["model"]) if row.get("model") in models else 0)


def _agrees(row: dict, field: str, value) -> bool:
    if field == "bos":
        return row.get("protocol", "").endswith(BOS) == value
    if field == "revision":
        return row.get("checkpoint") == value
    if field in LISTS:
        return value is None or row.get(LISTS[field]) in value
    return field not in IDENTITY or field not in row or row[field] == value
