"""Rows on disk: JSON lines that are replaced as a whole, so that a killed run leaves the old file or the new one."""

import codecs
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Collection
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from outliers.errors import UserError
from outliers.experiment.interrupt import Interrupted, asked_to_stop, finishing, stop_if_asked
from outliers.experiment.row_check import check_row, lacking, parse_row
from outliers.files import locked, part_of, read_whole, remove_all_left, remove_left, write_whole
from outliers.models.weight_files import check_unchanged
from outliers.quantization.schemes import BASELINE
from outliers.specification.kinds import BOS, Machine, Named, said_of_schemes, said_of_text
from outliers.specification.recipe import Recipe, Training

MOST_BYTES = 2**30  # of a file of rows, of about a kilobyte each
logger = logging.getLogger(__name__)

# Everything that a row says identifies it, also what is new in it, but what stands here.
WHERE = ("device_name", "threads", "python", "torch", "triton", "bitsandbytes")
IDENTIFIES_NOTHING = {  # reason: fields
    "it came of the measurement": (
        *("value", "unit", "standard_deviation", "standard_error", "q1", "q3", "examples"),
        *("wall_seconds", "peak_memory_bytes"),
    ),
    "it follows from the model and from what was asked, and may be known only afterwards": (
        *("parameters", "weights_bytes", "outputs", "context_used", "unquantized_experts", "ignored_tensors"),
        *("same_weights_as", "arithmetic", "weight_bits", "activation_bits"),
    ),
    "`code` says more": ("version", "commit"),
    "users name their experiments, and the other fields say what was measured (but see FIXED)": ("experiment",),
    "it moves last digits alone, less than a draw does: a cluster goes on with other machines (but see TIMES)": WHERE,
    "it moves last digits alone: a streamed run goes on with the rows of a resident one": ("streamed",),
}
FREE = frozenset(chain.from_iterable(IDENTIFIES_NOTHING.values()))
TIMES = ("latency.", "linear_layer.")  # metrics whose rows WHERE identifies, for it decides their values
OF_ONE_MODEL = ("trace", "ablate", "damage")  # experiments of which a folder holds those of one model
FIXED = (*OF_ONE_MODEL, "emergence")  # names of experiments that no user chose, which identify

# Which of the rows of one cell a row is, which the cell leaves open.
WHICH = (
    *("metric", "subject", "method", "features", "draw", "feature", "layer", "role", "projection", "position", "token"),
    "way",
    *("bits", "hardware", "owner", "gpus", "gigabytes", "headroom"),
)


def identifying(row: dict) -> dict:
    """The fields of a row that identify it: all but those of `IDENTIFIES_NOTHING`."""
    also = WHERE if str(row.get("metric")).startswith(TIMES) else ()
    also += ("experiment",) if row.get("experiment") in FIXED else ()
    free = FREE.difference(also)
    return {field: value for field, value in row.items() if field not in free and value is not None}


def identity(row: dict) -> frozenset:
    """What makes two rows the same measurement."""
    found = identifying(row).items()
    return frozenset((field, tuple(value) if isinstance(value, list) else value) for field, value in found)


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

    def find_all(self, cell: dict) -> list[dict]:
        """The finished rows of a cell.

        They agree with all that `cell` says of their identity, and say nothing beyond it but which of its rows each is
        (`WHICH`).
        """
        stop_if_asked()
        return finished([row for row in self.rows if _is_of(row, cell)])

    def may_have(self, cell: dict) -> bool:
        """Whether there are finished rows that agree with all that `cell` says of their identity, which is not all of
        it: the weights of a streamed model are not known before they are read."""
        return any(_agree(row, _asked(row, cell)) for row in finished(self.rows))

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


def _is_of(row: dict, cell: dict) -> bool:
    """Whether a row is one of a cell, see `RowFile.find_all`."""
    asked = _asked(row, cell)
    return _agree(row, asked) and identifying(row).keys() - asked.keys() <= set(WHICH)


def _agree(row: dict, asked: dict) -> bool:
    return all(row.get(field) == value for field, value in asked.items())


def _asked(row: dict, cell: dict) -> dict:
    """What a cell says of the identity of a row, whose metric it may leave open."""
    return identifying({"metric": row.get("metric"), **cell})


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


# What a row calls a field of a specification, where it has another name.
IN_A_ROW = {
    "models": "model",
    "revision": "checkpoint",
    "revisions": "checkpoint",
    "schemes": "scheme",
    "tasks": "task",
    "batches": "batch",
    "dimensions": "dimension",
    "methods": "method",
    "runs": "run",
    "seeds": "seed",
    "bos": "protocol",
}
OF_SCHEMES = ("alpha", "scheme_alpha", "scheme_parts", "skip")
OF_A_RECIPE = ("model", *(field for field in Recipe.model_fields if field != "start"))
# All of a specification is in rows but this.
NOT_IN_ROWS = {
    "name": "rows that are measured under one are drawn under others",
    "shows": "it says how rows are drawn",
    **dict.fromkeys(("stream", "memory", "engine"), "it says how a model is run"),
    "data": "the hash of the documents stands for it",
    "by": "metrics say it",
    **dict.fromkeys(("features", "controls"), "rows have the features that were ablated, which a trace or draws chose"),
    **dict.fromkeys(
        ("calibration", "calibration_blocks"), "the hash of the tokens stands for it, in rows of what is calibrated"
    ),
    **dict.fromkeys(("transform", "attention"), "the names of the schemes say it"),
    "candidates": "rows say of each model whether it was one",
    "by_token": "no row has what it finds",
    "recipe": "it is a part of each run",
    **dict.fromkeys(("c4", "wikitext"), "the hash of what is trained on stands for it"),
    "watched": "rows say after which step they are",
    "work": "it says where a run is kept meanwhile",
}


def rows_of(spec: Named, rows: list[dict]) -> list[dict]:
    """Of rows those that an experiment would measure, without asking its models; in the experiment's order.

    They say what it asks, as far as they say something of that, and nothing that only other kinds of experiments ask.
    Of rows that differ in nothing but texts, weights, versions, code or machine the last one counts.
    """
    asked = {field: getattr(spec, field) for field in type(spec).model_fields if field not in NOT_IN_ROWS}
    if isinstance(spec, Training):
        rows = [row for row in rows if _is_of_run(spec, row)]
        asked = {field: value for field, value in asked.items() if field not in ("runs", "schemes")}
    if "skip" in asked:  # of schemes, which have thresholds and parts of their own
        said = said_of_schemes(spec)
        rows = [row for row in rows if _says(row, said.get(row.get("scheme")))]
        asked = {field: value for field, value in asked.items() if field not in ("alpha", "scheme", "schemes", "skip")}
    is_strange = _strange_to(spec)
    last = {
        tuple(str(row.get(field)) for field in (*WHICH, *IN_A_ROW.values())): row
        for row in rows
        if not is_strange(row) and all(_agrees(row, field, value) for field, value in asked.items())
    }
    found = _of_ended_runs(last.values()) if isinstance(spec, Training) else last.values()
    order = [*(asked.get("models") or []), *getattr(spec, "runs", [])]
    return sorted(found, key=lambda row: _place(order, row.get("run", row.get("model"))))


def _place(order: list[str], name: str | None) -> int:
    return order.index(name) if name in order else 0


def _is_of_run(spec: Training, row: dict) -> bool:
    """Whether a row says all of the recipe that the specification has for its run, and is under a scheme of it."""
    recipe = spec.runs.get(row.get("run"))
    scheme = row["metric"].partition("perplexity.")[2]
    schemes = [BASELINE, *map(_name, spec.schemes)]
    return (
        recipe is not None
        and {field: row[field] for field in OF_A_RECIPE if row.get(field) is not None} == recipe.in_rows
        and (not scheme or scheme in schemes)
    )


def _of_ended_runs(rows: Collection[dict]) -> list[dict]:
    """Rows of runs that were measured at their end; of others, as a file that was cut off has them, none."""
    ended = {(row["run"], row["seed"]) for row in rows if row["metric"] == f"perplexity.{BASELINE}"}
    return [row for row in rows if (row["run"], row["seed"]) in ended]


def _says(row: dict, of_scheme: dict | None) -> bool:
    """Whether a row says what is asked of its scheme; None of one that is not asked for."""
    return of_scheme is not None and all(row.get(field) == of_scheme.get(field) for field in OF_SCHEMES)


def _strange_to(spec: Named) -> Callable[[dict], bool]:
    """Whether a row is of another kind of experiment: it has its name, or a field that this kind has not."""
    own, others = type(spec), [kind for kind in _kinds(Named) if kind is not type(spec)]
    fields = set().union(*map(_fields_in_rows, others)) - _fields_in_rows(own) - _fields_in_rows(Machine)
    names = {kind.model_fields["name"].default for kind in others} - {own.model_fields["name"].default, spec.name}
    return lambda row: row.get("experiment") in names or not fields.isdisjoint(row)


def _kinds(kind: type[Named]) -> list[type[Named]]:
    """A kind of experiment and all that are made of it."""
    return [kind, *chain.from_iterable(map(_kinds, kind.__subclasses__()))]


def _fields_in_rows(kind: type[Named]) -> set[str]:
    of_runs = {*OF_A_RECIPE, "checkpoint", "protocol"} if issubclass(kind, Training) else set()
    return of_runs | {IN_A_ROW.get(field, field) for field in kind.model_fields if field not in NOT_IN_ROWS}


def _agrees(row: dict, field: str, value) -> bool:
    own = IN_A_ROW.get(field, field)
    if field == "bos":
        return row.get(own, "").endswith(BOS) == value
    if own not in row:
        return value is None or field not in IN_A_ROW or own in WHICH
    if field == "text":  # older rows name files with their folders
        return said_of_text(row[own]) == said_of_text(value)
    if own == "hardware":
        return any(one.model_dump(exclude_none=True).items() <= row.items() for one in value)
    if field in IN_A_ROW and isinstance(value, (list, dict)):
        return row[own] in map(_name, value)
    return row[own] == value


def _name(entry):
    """What a row says of an entry of a list, such as a scheme of a user's own."""
    return getattr(entry, "name", entry)
