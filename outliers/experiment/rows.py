"""Rows on disk: JSON lines that are replaced as a whole, so that a killed run leaves the old file or the new one."""

import contextlib
import json
from pathlib import Path

from outliers.errors import UserError
from outliers.experiment.interrupt import Interrupted, asked_to_stop, finishing, stop_if_asked
from outliers.experiment.spec import BOS, Named, threshold_of
from outliers.files import locked, part_of, write_whole
from outliers.models.watch import check_unchanged

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
    "bits",
    "gpus",
    "gigabytes",
    "context",
    "headroom",
)


def identity(row: dict) -> tuple:
    """What makes two rows the same measurement."""
    return tuple(row.get(field) for field in IDENTITY)


class RowFile:
    """The rows of one experiment, `rows.jsonl` in its folder: `with RowFile(folder) as row_file`.

    Entered, it keeps the folder to this process (see `outliers.files.locked`) and reads the rows that are there; a
    folder in which nothing was measured is removed. Tables, figures and pages are written after that, without the lock.

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
            part_of(self.path).unlink(missing_ok=True)  # of a run that was killed while it wrote
            self.rows = read_rows(self.folder)
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
        return next((old for old in self.rows if identity(old) == identity(row)), None)

    def find_all(self, cell: dict) -> list[dict]:
        """The finished rows that agree with `cell` in all that it says of their identity."""
        stop_if_asked()
        said = [field for field in IDENTITY if field in cell]
        return [row for row in self.rows if all(row.get(field) == cell[field] for field in said)]

    def add(self, *rows: dict) -> None:
        """Write more rows, all or none, each in the place of any that is the same measurement.

        Raises:
            UserError: they cannot be written, or the weights that they are of changed since they were read.
        """
        for model, checkpoint in {(row["model"], row.get("checkpoint")) for row in rows if "weights_hash" in row}:
            check_unchanged(model, checkpoint)
        new = [identity(row) for row in rows]
        kept = [old for old in self.rows if identity(old) not in new] + list(rows)
        write_whole(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        self.rows = kept


def read_rows(folder: Path) -> list[dict]:
    """The finished rows in a folder, none where it has no file of them; a run may be adding to them.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    path = folder / "rows.jsonl"
    if not path.exists():
        return []
    try:
        return [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror or error})") from None
    except (ValueError, TypeError):
        raise UserError(f"'{path}' is damaged; move it away or choose another folder with --out") from None


# Fields of a specification that list what a row has one of.
LISTS = {
    "models": "model",
    "revisions": "checkpoint",
    "schemes": "scheme",
    "tasks": "task",
    "batches": "batch",
    "dimensions": "dimension",
}


def rows_of(spec: Named, rows: list[dict]) -> list[dict]:
    """Of finished rows those that an experiment would measure, without asking its models; in the experiment's order.

    Of rows that differ in nothing but weights, versions or device the last one counts.
    """
    asked = {field: getattr(spec, field) for field in type(spec).model_fields}
    if "schemes" in asked:  # which have thresholds of their own
        thresholds = {scheme: threshold_of(spec, scheme) for scheme in asked["schemes"]}
        own = [(row, thresholds.get(row.get("scheme"))) for row in rows]
        rows = [row for row, threshold in own if row.get("alpha", threshold) == threshold]
        del asked["alpha"]
    found = [row for row in rows if all(_agrees(row, field, value) for field, value in asked.items())]
    lasting = [field for field in IDENTITY if field not in ("weights_hash", "version", "kernels")]
    last = {tuple(str(row.get(field)) for field in lasting): row for row in found}
    models = asked.get("models") or []
    return sorted(last.values(), key=lambda row: models.index(row["model"]) if row.get("model") in models else 0)


def _agrees(row: dict, field: str, value) -> bool:
    if field == "bos":
        return row.get("protocol", "").endswith(BOS) == value
    if field in LISTS:
        return LISTS[field] not in row or value is None or row[LISTS[field]] in value
    return field not in IDENTITY or field not in row or row[field] == value
