"""Rows, the only result: JSON lines, appended, so that a killed run leaves whole rows and at most one that is torn."""

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
from typing import NamedTuple

from pydantic_core import from_json, to_json

from outliers.errors import UserError, first_of, shown
from outliers.files import check_file, check_replaceable, locked, remove_left, write_whole, writing
from outliers.terminal.interrupt import Interrupted, asked_to_stop, finishing

FILE = "rows.jsonl"
MOST_BYTES = 2**32  # of a file of rows, of about a kilobyte each
NAMED = 12  # damaged lines
REFUSED = "a row cannot be kept: "
PARTS = ("asked", "facts", "values", "made")
LISTS = (list, tuple)
logger = logging.getLogger(__name__)

MOST = 2**63  # of a whole number, as Parquet has them
POSITIVE = ("perplexity", "damage.perplexity")  # metrics whose values are drawn on logarithmic axes, or divided by


class Kind(NamedTuple):
    """The values that a field may have."""

    expected: str
    fits: Callable[[object], bool]


def _is_number(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < MOST)


def _is_flat(value: object) -> bool:
    values = value if isinstance(value, LISTS) else (value,)
    return all(one is None or isinstance(one, str | bool) or _is_number(one) for one in values)


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


TEXT = Kind("text", lambda value: type(value) is str)
NUMBER = Kind("a finite number", _is_number)
WHOLE = Kind("a whole number from 0 on", _is_whole)
COUNT = Kind("a whole number from 1 on", lambda value: _is_whole(value) and value > 0)
# Of any other field, of which tables have a column too.
FLAT = Kind("text, a finite number, true, false, null, or a list of such", _is_flat)

UNITS = "unit_sums unit_counts unit_bytes"  # of a mean over a text: blocks, documents or questions
# The columns of tables that are of one kind, in whichever part of a row they stand, in the order of a line; any others
# follow as they came.
COLUMNS = (
    (TEXT, "metric"),
    (NUMBER, "value"),
    (TEXT, "unit"),
    (NUMBER, "standard_deviation"),
    (Kind("a finite number or null", lambda value: value is None or _is_number(value)), "standard_error"),
    (NUMBER, "paired_error q1 q3 bits_per_byte bits_per_byte_deviation bits_per_byte_error"),
    (WHOLE, "layer feature position token bytes"),
    (COUNT, "bits examples parameters context_used"),
    (TEXT, "role projection way checkpoint architecture"),
    (Kind("a list of whole numbers", lambda them: isinstance(them, LISTS) and all(map(_is_whole, them))), "features"),
    (Kind("a list of finite numbers", lambda them: isinstance(them, LISTS) and all(map(_is_number, them))), UNITS),
    (TEXT, "experiment device_name failed"),
    (NUMBER, "wall_seconds headroom"),
    (WHOLE, "peak_memory_bytes"),
    (TEXT, "model text dtype scheme task hardware owner weights_hash tokens_hash code lm_eval"),
    (COUNT, "block blocks mask_seeds gpus context batch prompt tokens repeats"),
    (
        Kind("a positive number", lambda value: _is_number(value) and value > 0),
        "alpha gigabytes weight_bits activation_bits cache_bits",
    ),
    (Kind("true or false", lambda value: type(value) is bool), "candidate"),
)
KINDS = {name: kind for kind, names in COLUMNS for name in names.split()}
NO_TEXT = {name for name, kind in KINDS.items() if kind is not TEXT}
PLACES = {name: place for place, name in enumerate(KINDS)}
KINDS |= dict.fromkeys(("name", "variant"), TEXT)  # of a metric, and beside it


def _check(asked: object, facts: object, values: object, made: object) -> None:
    """Raise ValueError unless these are the parts of a row."""
    _check_object("asked", asked, ("metric", "subject", "variant"), 3)
    _check_fields("asked.metric", asked["metric"], ("name",))
    _check_fields("asked.subject", asked["subject"])
    _check_fields("asked", {"variant": asked["variant"]})
    _check_fields("facts", facts)
    _check_fields("made", made)
    if type(values) is not list:
        raise ValueError(f"values: expected a list, got {shown(values)}")
    for number, value in enumerate(values):
        place = f"values.{number}"
        _check_fields(place, value, ("metric", "value"))
        if value["metric"].startswith(POSITIVE) and value["value"] <= 0:
            raise ValueError(f"{place}: 'value' of {value['metric'][:40]} is not a positive number")
    if bool(values) == ("failed" in made):
        raise ValueError("expected values, or in 'made' why it 'failed'")


def _check_object(place: str, part: object, needed: tuple[str, ...] = (), most: float = math.inf) -> None:
    """Raise ValueError unless an object has some fields, and at most so many."""
    if type(part) is not dict or len(part) > most or not all(map(part.__contains__, needed)):
        raise ValueError(f"{place}: expected an object of {', '.join(needed) or 'fields'}, got {shown(part)}")


def _check_fields(place: str, part: object, needed: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless an object has some fields, and all of them values of their kinds."""
    _check_object(place, part, needed)
    for name, value in part.items():
        if type(value) is str and name not in NO_TEXT:  # as most are: a million rows have thirty million fields
            continue
        kind = KINDS.get(name, FLAT)
        if not kind.fits(value):
            raise ValueError(f"{place}.{name}: expected {kind.expected}, got {shown(value)}")


def _sorted(part: dict) -> dict:
    """A part of a row that identifies it, whose keys are in one order, however they came."""
    names = sorted(part)
    return part.copy() if names == list(part) else {name: part[name] for name in names}


def _in_columns(part: dict) -> dict:
    """Another part, in the order of a line."""
    return {name: part[name] for name in sorted(part, key=lambda name: PLACES.get(name, len(PLACES)))}


@dataclass(init=False, slots=True)
class Row:
    """One metric of one subject under one variant.

    asked: what identifies it: subject, variant and metric, each with its parameters where they are not the default.
    facts: what follows from that, and from the weights, the tokens and the code that were there. values: its numbers;
    further fields say of what each is: layer, role, feature, position, token, projection, … made: where it was
    measured, by which versions, in which time and memory. A row of a measurement that failed has no values, and in
    `made` the reason, `failed`.

    Raises:
        UserError: a part holds what no row may, such as an infinite value.
    """

    asked: dict
    facts: dict
    values: list[dict]
    made: dict

    def __init__(self, asked: dict, facts: dict, values: list[dict], made: dict):
        try:
            _check(asked, facts, values, made)
        except ValueError as error:
            raise UserError(f"{REFUSED}{error}") from None
        self._take(asked, facts, list(map(_in_columns, values)), _in_columns(made))

    @classmethod
    def read(cls, line: bytes) -> "Row":
        """The row of a line; raise ValueError where it is none."""
        parts = from_json(line)
        _check_object("the line", parts, PARTS, len(PARTS))
        _check(**parts)
        row = cls.__new__(cls)
        row._take(**parts)
        return row

    def _take(self, asked: dict, facts: dict, values: list[dict], made: dict) -> None:
        metric, subject = _sorted(asked["metric"]), _sorted(asked["subject"])
        self.asked = {"metric": metric, "subject": subject, "variant": asked["variant"]}
        self.facts, self.values, self.made = _sorted(facts), values, made

    @property
    def line(self) -> bytes:
        """It as a line of a file; raise UserError where no file can hold it."""
        try:
            parts = {part: getattr(self, part) for part in PARTS}
            return json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise UserError(f"{REFUSED}{error}") from None

    def records(self) -> list[dict]:
        """A flat dictionary for each value, as tables, figures and data frames take them; of a row that failed one with
        NaN as the value of its metric."""
        asked = self.asked
        parameters = {name: value for name, value in asked["metric"].items() if name != "name"}
        common = {**asked["subject"], "variant": asked["variant"], **self.facts, **parameters}
        values = self.values or [{"metric": asked["metric"]["name"], "value": math.nan}]
        return [{**common, **value, **self.made} for value in values]


class Rows:
    """The rows of a folder, `rows.jsonl` in it: `with Rows(folder) as rows`.

    Entered, it keeps the folder to this process (see `outliers.files.locked`) and reads the rows that are there; a
    folder in which nothing was measured is removed. A last line that is torn is moved to a file beside it.

    The first Ctrl-C lets the rows that are being measured finish, the second one stops at once. Either ends in
    `Interrupted`, which says how many rows are finished.

    Raises:
        UserError: the folder cannot be written or another run has it, or the file holds something else than rows.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / FILE
        self.subjects: dict[tuple, None] = {}  # experiments of its rows, with models and checkpoints
        self._lines: dict[bytes, bytes] = {}  # those that did not fail, by what they ask and their facts

    def __enter__(self) -> "Rows":
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            check_replaceable(self.path)
            remove_left(self.folder)
            line, torn = b"\n", b""
            for line, row in _read(self.path):
                if row:
                    self._keep(row, line)
                else:
                    torn = line
            # what is appended to a link would be seen under another name, too
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

    def find(self, asked: dict, facts: dict) -> Row | None:
        """The row of a cell: it asks the same, has the same facts, and did not fail."""
        line = self._lines.get(key_of(asked) + key_of(facts))
        return line and Row.read(line)

    def may_have(self, asked: dict) -> bool:
        """Whether there is a row of a cell whose facts are not all known: the weights of a streamed model are not
        before they are read."""
        beginning = key_of(asked)
        return any(key.startswith(beginning) for key in self._lines)

    def add(self, *rows: Row) -> None:
        """Write rows, see `append`."""
        for row, line in zip(rows, append(self.folder, rows), strict=True):
            self._keep(row, line)

    def _keep(self, row: Row, line: bytes) -> None:
        """Take a row in the place of one that asks the same and has the same facts."""
        subject = row.asked["subject"]
        self.subjects[row.made.get("experiment"), subject.get("model"), subject.get("checkpoint")] = None
        key = to_json(row.asked) + to_json(row.facts)
        if row.values:
            self._lines[key] = line
        else:
            self._lines.pop(key, None)


def append(folder: Path, rows: Iterable[Row]) -> list[bytes]:
    """Append rows to the file of a folder and see that they are on the disk; what is not written whole is taken back.

    Raises:
        UserError: they cannot be written, or no file can hold one.

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
    """The rows of a folder, none where it has no file of them; a run may be adding to them, and nothing is changed.

    Of rows that ask the same and have the same facts the last one counts; one that failed does not where a later one
    that asks the same did not, and has what is known of it.

    Raises:
        UserError: the file cannot be read or holds something else, in a line that is named; only the last line may be
            torn, and is then left out.
    """
    last: dict[bytes, Row] = {}  # of what is asked with the same facts
    failed: dict[bytes, dict] = defaultdict(dict)  # those of them that did, by what they ask
    parts: dict[bytes, dict] = {}  # which many rows have in common: a million of their own take gigabytes
    for _, row in _read(folder / FILE):
        if not row:
            logger.info(f"the last line of '{folder / FILE}' is torn; its content is left out")
            continue
        asked, facts = to_json(row.asked), to_json(row.facts)
        for name in ("metric", "subject"):
            row.asked[name] = parts.setdefault(to_json(row.asked[name]), row.asked[name])
        row.facts = parts.setdefault(facts, row.facts)
        asked = blake2b(asked, digest_size=16).digest()
        key = asked + blake2b(facts, digest_size=16).digest()
        last[key] = row
        if not row.values:
            failed[asked][key] = row
        elif asked in failed:
            known = [other for other, one in failed[asked].items() if one.facts.items() <= row.facts.items()]
            for other in known:
                del failed[asked][other]
                if other != key:
                    del last[other]
    return list(last.values())


def key_of(part: dict) -> bytes:
    """A part of a row that identifies it as bytes, in whichever order its keys came."""
    parts = {name: _sorted(value) if isinstance(value, dict) else value for name, value in part.items()}
    return to_json(_sorted(parts))


def _read(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    """The lines of a file, each with its row; None beside a last one that is torn.

    Raises:
        UserError: the file cannot be read, or lines of it are damaged, which it names after the last one.
    """
    number, line, damaged, mistake = 0, b"", [], ""
    for number, line in _lines(path):
        try:
            row = Row.read(line)
        except ValueError as error:
            damaged.append(number)
            mistake = mistake or str(error)
        else:
            yield line, row
    if number in damaged[-1:] and _is_torn(line):
        del damaged[-1]
        yield line, None
    if damaged:
        which, these = f"line {damaged[0]} of '{path}' is damaged ({mistake})", "this line"
        if len(damaged) > 1:
            which = f"lines {first_of(damaged, NAMED)} of '{path}' are damaged (the first: {mistake})"
            these = "these lines"
        raise UserError(f"{which}; delete {these}, or choose another folder with --out")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers."""
    try:
        check_file(path, MOST_BYTES)
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8)  # as an editor of another system writes it
                if line and not line.isspace():
                    yield number, line
                if not line.endswith(b"\n"):  # a run may be adding the rest
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror or error})") from None


def _is_torn(line: bytes) -> bool:
    """Whether a last line was not written whole: its end and that of its row are missing, or zeros are there."""
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
    """Write a file anew, as one of its own, without a last line that is torn; no file where nothing is left."""
    content = path.read_bytes().rstrip() if path.exists() else b""
    if torn:
        content = content.removesuffix(torn.rstrip()).rstrip()
        _move_aside(path, torn)
    if content:
        write_whole(path, content + b"\n")
    else:
        path.unlink()


def _move_aside(path: Path, torn: bytes) -> None:
    """Copy a torn line to a file of its own, beside those of earlier times."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (path.with_name(f"{path.name}.torn{number}") for number in numbers)
    aside = next(place for place in places if not os.path.lexists(place))
    write_whole(aside, torn.rstrip())
    logger.info(f"the last line of '{path}' was torn; it is in '{aside.name}' now, and its measurement is repeated")
