"""Read and append rows, the only form of results.

They are JSON lines, so that a killed run leaves whole rows and at most one that is torn.
"""

import codecs
import contextlib
import itertools
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from pydantic_core import from_json, to_json

from outliers.errors import UserError, first_of, shown
from outliers.files import check_file, check_replaceable, locked, remove_left, write_whole, writing
from outliers.terminal.interrupt import Interrupted, asked_to_stop, finishing

FILE = "rows.jsonl"
MOST_BYTES = 2**32  # of a file, whose rows have about a kilobyte each
MOST_NAMED = 12  # damaged lines
CANNOT_KEEP = "a row cannot be kept: "
ROW_PARTS = ("request", "provenance", "values", "run")
EARLIER = {"asked": "request", "facts": "provenance", "values": "values", "made": "run"}  # of rows of version 0.2.0
LISTS = (list, tuple)
DIGEST = 16  # bytes of the hash of a part
Kept = TypeVar("Kept")
logger = logging.getLogger(__name__)

LARGEST_INTEGER = 2**63  # whole numbers below, as in Parquet
POSITIVE = ("perplexity", "damage.perplexity")  # metrics whose values are drawn on logarithmic axes, or divided by


class FieldType(NamedTuple):
    """The values that a field may have.

    expected: a phrase for messages. fits: whether a value is allowed.
    """

    expected: str
    fits: Callable[[object], bool]


def _is_number(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < LARGEST_INTEGER)


def _is_flat(value: object) -> bool:
    values = value if isinstance(value, LISTS) else (value,)
    return all(one is None or isinstance(one, str | bool) or _is_number(one) for one in values)


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST_INTEGER


TEXT = FieldType("text", lambda value: type(value) is str)
NUMBER = FieldType("a finite number", _is_number)
WHOLE = FieldType("a whole number from 0 on", _is_whole)
COUNT = FieldType("a whole number from 1 on", lambda value: _is_whole(value) and value > 0)
# Of all other fields, which also become columns of tables.
FLAT = FieldType("text, a finite number, true, false, null, or a list of such", _is_flat)

UNITS = "unit_sums unit_counts unit_bytes"  # the units of a mean over a text: blocks, documents or questions
# Columns of tables whose kind is fixed, whichever part of a row has them, in the order of a line; other columns follow
# in the order in which they came.
COLUMNS = (
    (TEXT, "metric"),
    (NUMBER, "value"),
    (TEXT, "unit"),
    (NUMBER, "standard_deviation"),
    (FieldType("a finite number or null", lambda value: value is None or _is_number(value)), "standard_error"),
    (NUMBER, "paired_error q1 q3 bits_per_byte bits_per_byte_deviation bits_per_byte_error"),
    (WHOLE, "layer feature position token bytes"),
    (COUNT, "bits examples parameters context_used"),
    (TEXT, "role projection way checkpoint architecture"),
    (
        FieldType("a list of whole numbers", lambda them: isinstance(them, LISTS) and all(map(_is_whole, them))),
        "features",
    ),
    (FieldType("a list of finite numbers", lambda them: isinstance(them, LISTS) and all(map(_is_number, them))), UNITS),
    (TEXT, "experiment device_name failed"),
    (NUMBER, "wall_seconds headroom"),
    (WHOLE, "peak_memory_bytes"),
    (TEXT, "model text dtype scheme task hardware owner weights_hash tokens_hash code lm_eval"),
    (COUNT, "block blocks mask_seeds gpus context batch prompt tokens repeats"),
    (
        FieldType("a positive number", lambda value: _is_number(value) and value > 0),
        "alpha gigabytes weight_bits activation_bits cache_bits",
    ),
    (FieldType("true or false", lambda value: type(value) is bool), "candidate"),
)
FIELD_TYPES = {name: kind for kind, names in COLUMNS for name in names.split()}
NO_TEXT = {name for name, kind in FIELD_TYPES.items() if kind is not TEXT}
COLUMN_ORDER = {name: place for place, name in enumerate(FIELD_TYPES)}
FIELD_TYPES |= dict.fromkeys(("name", "variant"), TEXT)  # of a metric, and beside it


def _check(request: object, provenance: object, values: object, run: object) -> None:
    _check_object("request", request, ("metric", "subject", "variant"), 3)
    _check_fields("request.metric", request["metric"], ("name",))
    _check_fields("request.subject", request["subject"])
    _check_fields("request", {"variant": request["variant"]})
    _check_fields("provenance", provenance)
    _check_fields("run", run)
    if type(values) is not list:
        raise ValueError(f"values: expected a list, got {shown(values)}")
    for number, value in enumerate(values):
        place = f"values.{number}"
        _check_fields(place, value, ("metric", "value"))
        if value["metric"].startswith(POSITIVE) and value["value"] <= 0:
            raise ValueError(f"{place}: 'value' of {value['metric'][:40]} is not a positive number")
    if bool(values) == ("failed" in run):
        raise ValueError("expected values, or in 'run' why it 'failed'")


def _check_object(place: str, part: object, needed: tuple[str, ...] = (), most: float = math.inf) -> None:
    """Raise ValueError unless a part is an object that has the needed fields, and at most `most` fields."""
    if type(part) is not dict or len(part) > most or not all(map(part.__contains__, needed)):
        raise ValueError(f"{place}: expected an object of {', '.join(needed) or 'fields'}, got {shown(part)}")


def _check_fields(place: str, part: object, needed: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless a part is an object that has the needed fields, with all values of their kinds."""
    _check_object(place, part, needed)
    for name, value in part.items():
        if type(value) is str and name not in NO_TEXT:  # first, as most are: a million rows have thirty million
            continue
        kind = FIELD_TYPES.get(name, FLAT)
        if not kind.fits(value):
            raise ValueError(f"{place}.{name}: expected {kind.expected}, got {shown(value)}")


def _sorted(part: dict) -> dict:
    """Return a part that identifies a row, such as its provenance, with sorted keys."""
    names = sorted(part)
    return part.copy() if names == list(part) else {name: part[name] for name in names}


def _in_columns(part: dict) -> dict:
    """Return a part that does not identify a row with its keys in the order of the table columns."""
    return {name: part[name] for name in sorted(part, key=lambda name: COLUMN_ORDER.get(name, len(COLUMN_ORDER)))}


@dataclass(init=False, slots=True)
class Row:
    """The values of one metric of one subject under one variant.

    request: what identifies the row: subject, variant and metric, each with its parameters if they are not the default.
    provenance: what follows from that, and from the weights, tokens and code of the run. values: the numbers; further
    fields say what each is of: layer, role, feature, position, token, projection, … run: machine, versions, time and
    memory of the measurement. A row of a failed measurement has no values, and the reason as `failed` in `run`.

    Raises:
        UserError: a part holds what no row may, such as an infinite value.
    """

    request: dict
    provenance: dict
    values: list[dict]
    run: dict

    def __init__(self, request: dict, provenance: dict, values: list[dict], run: dict):
        try:
            _check(request, provenance, values, run)
        except ValueError as error:
            raise UserError(f"{CANNOT_KEEP}{error}") from None
        self._take(request, provenance, list(map(_in_columns, values)), _in_columns(run))

    @classmethod
    def read(cls, line: bytes) -> "Row":
        """Return the row of a line; raise ValueError if the line holds none."""
        parts = from_json(line)
        if isinstance(parts, dict) and parts.keys() == EARLIER.keys():
            parts = {EARLIER[name]: part for name, part in parts.items()}
        _check_object("the line", parts, ROW_PARTS, len(ROW_PARTS))
        _check(**parts)
        row = cls.__new__(cls)
        row._take(**parts)
        return row

    def _take(self, request: dict, provenance: dict, values: list[dict], run: dict) -> None:
        metric, subject = _sorted(request["metric"]), _sorted(request["subject"])
        self.request = {"metric": metric, "subject": subject, "variant": request["variant"]}
        self.provenance, self.values, self.run = _sorted(provenance), values, run

    @property
    def line(self) -> bytes:
        """The row as a line of a file; raises UserError if no file can hold it."""
        try:
            parts = {part: getattr(self, part) for part in ROW_PARTS}
            return json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise UserError(f"{CANNOT_KEEP}{error}") from None

    def records(self) -> list[dict]:
        """Return a flat dictionary for each value, as tables, figures and data frames take them.

        A failed row gives one, with NaN as the value of its metric.
        """
        request = self.request
        parameters = {name: value for name, value in request["metric"].items() if name != "name"}
        common = {**request["subject"], "variant": request["variant"], **self.provenance, **parameters}
        values = self.values or [{"metric": request["metric"]["name"], "value": math.nan}]
        return [{**common, **value, **self.run} for value in values]


class Rows:
    """The rows of a folder, `rows.jsonl` in it: `with Rows(folder) as rows`.

    Entering it locks the folder for this process (see `outliers.files.locked`) and reads the rows; a folder in which
    nothing was measured is removed. A torn last line is moved to a file beside it.

    The first Ctrl-C lets the rows that are being measured finish, the second one stops at once. Either ends in
    `Interrupted`, whose message is the number of finished rows.

    Raises:
        UserError: the folder cannot be written or another run has it, or the file holds something else than rows.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / FILE
        self.subjects: dict[tuple, None] = {}  # (experiment, model, checkpoint) of all rows
        self._lines: dict[bytes, bytes] = {}  # rows that did not fail, by request and provenance

    def __enter__(self) -> "Rows":
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            check_replaceable(self.path)
            remove_left(self.folder)
            line, torn = b"\n", b""
            for _, line, row in _read(self.path):
                if row:
                    self._keep(row, line)
                else:
                    torn = line
            # appending to a link would change the file under its other name, too
            linked = self.path.is_symlink() or (self.path.exists() and self.path.stat().st_nlink > 1)
            if torn or not line.endswith(b"\n") or linked:
                _mend(self.path, torn)
            stack.enter_context(finishing())
            self._exits = stack.pop_all()
        return self

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        self._exits.close()
        if isinstance(error, KeyboardInterrupt) or (error is None and asked_to_stop()):
            count = len(self._lines)
            raise Interrupted(f"{count} finished row{'' if count == 1 else 's'} in '{self.folder}'") from None

    def find(self, request: dict, provenance: dict) -> Row | None:
        """Return the row of the same request and provenance that did not fail, or None."""
        line = self._lines.get(part_key(request) + part_key(provenance))
        return line and Row.read(line)

    def may_have(self, request: dict) -> bool:
        """Return whether there are rows with this request, whatever their provenance.

        Not all provenance of a streamed model is known before its weights are read.
        """
        beginning = part_key(request)
        return any(key.startswith(beginning) for key in self._lines)

    def add(self, *rows: Row) -> None:
        for row, line in zip(rows, append(self.folder, rows), strict=True):
            self._keep(row, line)

    def _keep(self, row: Row, line: bytes) -> None:
        """Register a row, in place of an earlier one with the same request and provenance."""
        subject = row.request["subject"]
        self.subjects[row.run.get("experiment"), subject.get("model"), subject.get("checkpoint")] = None
        key = to_json(row.request) + to_json(row.provenance)
        if row.values:
            self._lines[key] = line
        else:
            self._lines.pop(key, None)


def append(folder: Path, rows: Iterable[Row]) -> list[bytes]:
    """Append rows to the file of a folder, synced to disk; a partial write is undone.

    Raises:
        UserError: the rows cannot be written, or no file can hold one.

    Returns:
        Their lines.
    """
    lines, path = [row.line for row in rows], folder / FILE
    with writing(folder), open(path, "ab", buffering=0) as file:  # a buffer would be written again where it is closed
        size, left = file.tell(), b"".join(line + b"\n" for line in lines)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    return lines


def read(folder: Path) -> list[Row]:
    """Return the rows of a folder, an empty list if it has no file of rows. A run may be appending meanwhile.

    If rows have the same request and provenance, the last one counts. A failed row is superseded by a later success of
    the same request whose provenance includes what is known of the failed one.

    Raises:
        UserError: the file cannot be read, or a line holds something else, which the message names; only the last line
            may be torn, and is then left out.
    """
    parts: dict[bytes, dict] = {}  # shared between rows: copies for a million rows take gigabytes

    def kept(row: Row, _place: int) -> Row:
        for name in ("metric", "subject"):
            row.request[name] = parts.setdefault(to_json(row.request[name]), row.request[name])
        row.provenance = parts.setdefault(to_json(row.provenance), row.provenance)
        return row

    return list(_last(folder, kept).values())


def index(folder: Path) -> Callable[[dict], list[Row]]:
    """Return a function that returns the rows of a request, as `read` has them, of which it reads no others.

    So a report of a few of a million rows takes little memory. Raises as `read`.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for key, place in _last(folder, lambda _row, place: place).items():
        places[key[:DIGEST]].append(place)

    def find(request: dict) -> list[Row]:
        found = places.get(_digest(part_key(request)), [])
        with open(folder / FILE, "rb") if found else contextlib.nullcontext() as file:
            return [Row.read(_line_at(file, place)) for place in found]

    return find


def _last(folder: Path, kept: Callable[[Row, int], Kept]) -> dict[bytes, Kept]:
    """Return what a function keeps of each row that counts and its place in the file, by request and provenance."""
    last: dict[bytes, Kept] = {}
    failed: dict[bytes, dict] = defaultdict(dict)  # provenance of failed rows among them, by request
    for place, _, row in _read(folder / FILE):
        if not row:
            logger.info(f"the last line of '{folder / FILE}' is torn; its content is left out")
            continue
        request = _digest(to_json(row.request))
        key = request + _digest(to_json(row.provenance))
        last[key] = kept(row, place)
        if not row.values:
            failed[request][key] = row.provenance
        elif request in failed:
            known = [other for other, one in failed[request].items() if one.items() <= row.provenance.items()]
            for other in known:
                del failed[request][other]
                if other != key:
                    del last[other]
    return last


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST).digest()


def _line_at(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.readline().removeprefix(codecs.BOM_UTF8)


def part_key(part: dict) -> bytes:
    """Return a part that identifies a row as bytes that do not depend on the order of its keys."""
    parts = {name: _sorted(value) if isinstance(value, dict) else value for name, value in part.items()}
    return to_json(_sorted(parts))


def _read(path: Path) -> Iterator[tuple[int, bytes, Row | None]]:
    """Yield the lines of a file, each with its place and its row; with None if it is the last line and torn.

    Raises:
        UserError: the file cannot be read; or, after the last line, the numbers of damaged lines.
    """
    number, place, line, damaged, mistake = 0, 0, b"", [], ""
    for number, place, line in _lines(path):
        try:
            row = Row.read(line)
        except ValueError as error:
            damaged.append(number)
            mistake = mistake or str(error)
        else:
            yield place, line, row
    if number in damaged[-1:] and _is_torn(line):
        del damaged[-1]
        yield place, line, None
    if damaged:
        which, these = f"line {damaged[0]} of '{path}' is damaged ({mistake})", "this line"
        if len(damaged) > 1:
            which = f"lines {first_of(damaged, MOST_NAMED)} of '{path}' are damaged (the first: {mistake})"
            these = "these lines"
        raise UserError(f"{which}; delete {these}, or choose another folder with --out")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, place in bytes, and content of each line of a file that is not blank."""
    try:
        check_file(path, MOST_BYTES)
        with open(path, "rb") as file:
            place = after = 0
            for number, line in enumerate(file, 1):
                place, after = after, after + len(line)
                line = line.removeprefix(codecs.BOM_UTF8)  # as an editor of another system writes it
                if line and not line.isspace():
                    yield number, place, line
                if not line.endswith(b"\n"):  # a run may be adding the rest
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror or error})") from None


def _is_torn(line: bytes) -> bool:
    """Return whether the last line was not written whole: its end is missing, or it holds zeros."""
    if not line.strip(b"\0\r\n"):
        return True
    try:
        json.loads(line.decode(errors="replace"), parse_int=str)  # of any length
    except ValueError:
        return not line.endswith(b"\n")
    except RecursionError:
        pass
    return False


def _mend(path: Path, torn: bytes) -> None:
    """Rewrite a file without its torn last line, which is moved aside; remove the file if nothing is left.

    A link becomes a file of its own.
    """
    content = path.read_bytes().rstrip() if path.exists() else b""
    if torn:
        content = content.removesuffix(torn.rstrip()).rstrip()
        _move_aside(path, torn)
    if content:
        write_whole(path, content + b"\n")
    else:
        path.unlink()


def _move_aside(path: Path, torn: bytes) -> None:
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (path.with_name(f"{path.name}.torn{number}") for number in numbers)
    aside = next(place for place in places if not os.path.lexists(place))
    write_whole(aside, torn.rstrip())
    logger.info(f"the last line of '{path}' was torn; it is in '{aside.name}' now, and its measurement is repeated")
