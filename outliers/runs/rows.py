"""Rows, the only result: JSON lines, appended, so that a killed run leaves whole rows and at most one that is torn."""

import codecs
import contextlib
import io
import itertools
import json
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Required

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic takes that of the standard library from Python 3.12 on

from outliers.errors import UserError, shown
from outliers.files import (
    check_replaceable,
    locked,
    read_whole,
    remove_left,
    write_whole,
    writing,
)
from outliers.terminal.interrupt import Interrupted, asked_to_stop, finishing

FILE = "rows.jsonl"
MOST_BYTES = 2**32  # of a file of rows, of about a kilobyte each
logger = logging.getLogger(__name__)

MOST = 2**63  # of a whole number, as Parquet has them
POSITIVE = ("perplexity", "damage.perplexity")  # metrics whose values are drawn on logarithmic axes, or divided by


def _number(value: object) -> int | float:
    if not (type(value) is int and abs(value) < MOST) and not (type(value) is float and math.isfinite(value)):
        raise ValueError("expected a finite number")
    return value


def _flat(part: dict) -> dict:
    """A part of a row, of which tables have a column a field: text, a finite number, true, false, null, or a list."""
    for name, value in part.items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict | list) or (type(entry) in (int, float) and _number(entry) is None):
                raise ValueError(f"'{name[:40]}' is not text, a finite number, true, false, null, or a list of such")
    return part


def _in_order(part: dict) -> dict:
    """A part of a row that identifies it, whose keys are in one order, however they came."""
    return {name: _in_order(value) if isinstance(value, dict) else value for name, value in sorted(part.items())}


def _positive(value: dict) -> dict:
    if value["metric"].startswith(POSITIVE) and value["value"] <= 0:
        raise ValueError(f"'value' of {value['metric'][:40]} is not a positive number")
    return value


# Numbers stay as they are, for what identifies a row is found again by its bytes: 3 is not to become 3.0.
Whole = Annotated[int, Field(ge=0, lt=MOST, strict=True)]
Count = Annotated[int, Field(ge=1, lt=MOST, strict=True)]
Number = Annotated[int | float, PlainValidator(_number)]
Positive = Annotated[int | float, PlainValidator(_number), Field(gt=0)]
Text = Annotated[str, Field(strict=True)]

# The columns of tables that are of one type, in whichever part of a row they stand, in the order of a line; any others
# follow as they came.
COLUMNS = (
    (Text, "metric"),
    (Number, "value"),
    (Text, "unit"),
    (Number, "standard_deviation"),
    (Number | None, "standard_error"),
    (Number, "q1 q3 bits_per_byte bits_per_byte_deviation"),
    (Whole, "layer feature position token bytes"),
    (Count, "bits examples parameters context_used"),
    (Text, "role projection way checkpoint architecture"),
    (list[Whole], "features"),
    (Text, "experiment device_name failed"),
    (Number, "wall_seconds headroom"),
    (Whole, "peak_memory_bytes"),
    (Text, "model text dtype scheme task hardware owner weights_hash tokens_hash code lm_eval"),
    (Count, "block blocks mask_seeds gpus context batch prompt tokens repeats"),
    (Positive, "alpha gigabytes weight_bits activation_bits cache_bits"),
    (Annotated[bool, Field(strict=True)], "candidate"),
)
Part = TypedDict("Part", {name: kind for kind, names in COLUMNS for name in names.split()}, total=False)
Part.__pydantic_config__ = ConfigDict(extra="allow")


class Value(Part):
    """A number of a row; further fields say of what it is: layer, role, feature, position, token, projection, …"""

    metric: Required[Text]
    value: Required[Number]


class Parameters(TypedDict):
    """A metric, with its parameters where they are not the default."""

    __pydantic_config__ = ConfigDict(extra="allow")
    name: Text


class Asked(TypedDict):
    """The identity of a row: subject, variant and metric, each with its parameters where they are not the default."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    subject: Annotated[Part, AfterValidator(_flat)]
    variant: Text
    metric: Annotated[Parameters, AfterValidator(_flat)]


class Row(BaseModel):
    """One metric of one subject under one variant.

    asked: what identifies it. facts: what follows from that, and from the weights, the tokens and the code that were
    there. made: where it was measured, by which versions, in which time and memory. A row of a measurement that failed
    has no values, and in `made` the reason, `failed`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked: Annotated[Asked, AfterValidator(_in_order)]
    facts: Annotated[Part, AfterValidator(_flat), AfterValidator(_in_order)]
    values: list[Annotated[Value, AfterValidator(_flat), AfterValidator(_positive)]]
    made: Annotated[Part, AfterValidator(_flat)]

    @model_validator(mode="after")
    def _has_values_or_failed(self):
        if bool(self.values) == ("failed" in self.made):
            raise ValueError("expected values, or in 'made' why it 'failed'")
        return self

    def records(self) -> list[dict]:
        """A flat dictionary for each value, as tables, figures and data frames take them; of a row that failed one with
        NaN as the value of its metric."""
        asked = self.asked
        parameters = {name: value for name, value in asked["metric"].items() if name != "name"}
        common = {**asked["subject"], "variant": asked["variant"], **self.facts, **parameters}
        values = self.values or [{"metric": asked["metric"]["name"], "value": math.nan}]
        return [{**common, **value, **self.made} for value in values]


# A line begins with what identifies its row, keys sorted: a row is found by the bytes of its beginning, and parsed when
# somebody wants it.
START, FACTS, VALUES = b'{"asked": {"metric": {', b', "facts": {', b', "values": ['
NONE = b"]"  # what comes then where it failed


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
        self._rests: dict[bytes, dict[bytes, bytes]] = {}  # of lines: by what is asked, by the facts

    def __enter__(self) -> "Rows":
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            check_replaceable(self.path)
            remove_left(self.folder)
            content, torn = _read(self.path)
            self._keep(io.BytesIO(content))
            if torn:
                _move_aside(self.path, torn)
            if torn or _is_elsewhere_too(self.path) or (content and content[-1:] != b"\n"):
                if content.strip():
                    write_whole(self.path, content.rstrip() + b"\n")
                else:
                    self.path.unlink()
            stack.enter_context(finishing())
            self._exits = stack.pop_all()
        return self

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        self._exits.close()
        if isinstance(error, KeyboardInterrupt) or (error is None and asked_to_stop()):
            count = sum(map(len, self._rests.values()))
            raise Interrupted(f"{count} finished row{'' if count == 1 else 's'} in '{self.folder}'") from None

    def find(self, asked: dict, facts: dict) -> Row | None:
        """The row of a cell: it asks the same, has the same facts, and did not fail."""
        beginning = _beginning(asked, facts)
        key, _, known = beginning.partition(FACTS)
        rest = self._rests.get(key, {}).get(known)
        return rest and _parsed(self.path, beginning + VALUES + rest)

    def may_have(self, asked: dict) -> bool:
        """Whether there is a row of a cell whose facts are not all known: the weights of a streamed model are not
        before they are read."""
        return bool(self._rests.get(key_of(asked)))

    def add(self, *rows: Row) -> None:
        """Write rows, see `append`."""
        self._keep(append(self.folder, rows))

    def _keep(self, lines: Iterable[bytes]) -> None:
        """Take lines, each in the place of one whose row asks the same and has the same facts."""
        for number, line in enumerate(lines, 1):
            key, _, rest = line.partition(FACTS)
            known, _, rest = rest.partition(VALUES)
            if rest and key.startswith(START):
                rests = self._rests.setdefault(key, {})
                rests[known] = rest
                if rest.startswith(NONE):
                    del rests[known]
            elif not line.isspace():  # a row that something else than `line_of` wrote
                self._keep([line_of(_parsed(self.path, line, number))])


def append(folder: Path, rows: Iterable[Row]) -> list[bytes]:
    """Append rows to the file of a folder and see that they are on the disk; what is not written whole is taken back.

    Raises:
        UserError: they cannot be written, or one holds what no row may, such as an infinite value.

    Returns:
        Their lines.
    """
    lines, path = [line_of(row) for row in rows], folder / FILE
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
    path = folder / FILE
    content, torn = _read(path)
    if torn:
        logger.info(f"the last line of '{path}' is torn; its content is left out")
    last: dict[bytes, Row] = {}
    failed: dict[bytes, Row] = {}  # those of them that did
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.isspace():
            row = _parsed(path, line, number)
            beginning = _beginning(row.asked, row.facts)
            last[beginning] = row
            if not row.values:
                failed[beginning] = row
            for other in [other for other in failed if row.values and _follows(row, failed[other])]:
                del failed[other]
                if other != beginning:
                    del last[other]
    return list(last.values())


def _follows(row: Row, failed: Row) -> bool:
    """Whether a row is of the cell of one that failed, of which less may be known."""
    return row.asked == failed.asked and failed.facts.items() <= row.facts.items()


def line_of(row: Row) -> bytes:
    """A row as its line; raise UserError where it holds what no row may."""
    try:
        whole = Row.model_validate(vars(row))
        beginning = _beginning(whole.asked, whole.facts)
        values, made = (_json(part, sort_keys=False) for part in (whole.values, whole.made))
        line = beginning + b', "values": ' + values + b', "made": ' + made + b"}"
    except (ValueError, TypeError) as error:
        raise UserError(f"a row cannot be kept: {_mistake(error)}") from None
    if (line.index(FACTS), line.index(VALUES)) != (len(key_of(whole.asked)), len(beginning)):
        raise UserError("a row cannot be kept: a parameter of it is called 'facts' or 'values'; choose other names")
    return line


def _beginning(asked: dict, facts: dict) -> bytes:
    """The bytes with which the line of a row begins."""
    return key_of(asked) + b', "facts": ' + _json(facts)


def key_of(asked: dict) -> bytes:
    """The identity of a cell as the bytes with which its rows begin."""
    return b'{"asked": ' + _json(asked)


def _json(part: dict | list, sort_keys: bool = True) -> bytes:
    return json.dumps(part, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys).encode()


def _read(path: Path) -> tuple[bytes, bytes]:
    """The whole lines of a file, and the beginning of one after them."""
    try:
        content = read_whole(path, MOST_BYTES)
    except FileNotFoundError:
        return b"", b""
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror or error})") from None
    content = content.removeprefix(codecs.BOM_UTF8)  # as an editor of another system writes it
    end = len(content)
    while content[end - 1 : end].isspace():  # `rstrip` would copy it all
        end -= 1
    end = content.rfind(b"\n", 0, end) + 1
    last = content[end:]
    return (content, b"") if _is_json(last) else (content[:end], last)


def _parsed(path: Path, line: bytes, number: int | None = None) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        where = "a line" if number is None else f"line {number}"
        raise UserError(
            f"{where} of '{path}' is damaged ({_mistake(error)}); delete this line, or choose another folder with --out"
        ) from None


def _mistake(error: Exception) -> str:
    """The first thing that is wrong with a row, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place or 'the line'}: {first['msg'].lower()}, got {shown(first['input'])}"


def _is_json(line: bytes) -> bool:
    """Whether a line is all there, for what is written in part is no JSON."""
    try:
        json.loads(line.strip() or b"{}")
    except ValueError:
        return False
    except RecursionError:
        pass
    return True


def _is_elsewhere_too(path: Path) -> bool:
    """Whether what is appended to a file would be seen under another name, to which it is a link."""
    return path.is_symlink() or (path.exists() and path.stat().st_nlink > 1)


def _move_aside(path: Path, torn: bytes) -> None:
    """Copy a torn line to a file of its own, beside those of earlier times."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (path.with_name(f"{path.name}.torn{number}") for number in numbers)
    aside = next(place for place in places if not os.path.lexists(place))
    write_whole(aside, torn.rstrip())
    logger.info(f"the last line of '{path}' was torn; it is in '{aside.name}' now, and its measurement is repeated")
