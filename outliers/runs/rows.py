"""Rows, the only result: JSON lines, appended, so that a killed run leaves whole rows and at most one that is torn."""

import codecs
import contextlib
import itertools
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Required

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import to_json
from typing_extensions import TypedDict  # pydantic takes that of the standard library from Python 3.12 on

from outliers.errors import UserError, first_of, shown
from outliers.files import check_file, check_replaceable, locked, remove_left, write_whole, writing
from outliers.terminal.interrupt import Interrupted, asked_to_stop, finishing

FILE = "rows.jsonl"
MOST_BYTES = 2**32  # of a file of rows, of about a kilobyte each
NAMED = 12  # damaged lines
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
        if type(value) is str:  # as most are; reading a million rows takes in thirty million values
            continue
        for entry in value if type(value) is list else [value]:
            if isinstance(entry, dict | list) or (type(entry) in (int, float) and _number(entry) is None):
                raise ValueError(f"'{name[:40]}' is not text, a finite number, true, false, null, or a list of such")
    return part


def _sorted(part: dict) -> dict:
    """A part of a row that identifies it, whose keys are in one order, however they came."""
    return dict(sorted(part.items()))


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
    metric: Annotated[Parameters, AfterValidator(_flat), AfterValidator(_sorted)]
    subject: Annotated[Part, AfterValidator(_flat), AfterValidator(_sorted)]
    variant: Text


class Row(BaseModel):
    """One metric of one subject under one variant.

    asked: what identifies it. facts: what follows from that, and from the weights, the tokens and the code that were
    there. made: where it was measured, by which versions, in which time and memory. A row of a measurement that failed
    has no values, and in `made` the reason, `failed`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked: Asked
    facts: Annotated[Part, AfterValidator(_flat), AfterValidator(_sorted)]
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
        self._lines: dict[bytes, dict[bytes, bytes]] = {}  # by what is asked, by the facts

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
            if torn or not line.endswith(b"\n") or _is_elsewhere_too(self.path):
                _mend(self.path, torn)
            stack.enter_context(finishing())
            self._exits = stack.pop_all()
        return self

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        self._exits.close()
        if isinstance(error, KeyboardInterrupt) or (error is None and asked_to_stop()):
            count = sum(map(len, self._lines.values()))
            raise Interrupted(f"{count} finished row{'' if count == 1 else 's'} in '{self.folder}'") from None

    def find(self, asked: dict, facts: dict) -> Row | None:
        """The row of a cell: it asks the same, has the same facts, and did not fail."""
        line = self._lines.get(key_of(asked), {}).get(key_of(facts))
        return line and Row.model_validate_json(line)

    def may_have(self, asked: dict) -> bool:
        """Whether there is a row of a cell whose facts are not all known: the weights of a streamed model are not
        before they are read."""
        return bool(self._lines.get(key_of(asked)))

    def add(self, *rows: Row) -> None:
        """Write rows, see `append`."""
        for line in append(self.folder, rows):
            self._keep(Row.model_validate_json(line), line)

    def _keep(self, row: Row, line: bytes) -> None:
        """Take a row, as it was read, in the place of one that asks the same and has the same facts."""
        lines, facts = self._lines.setdefault(to_json(row.asked), {}), to_json(row.facts)
        if row.values:
            lines[facts] = line
        else:
            lines.pop(facts, None)


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
    last: dict[tuple[bytes, bytes], Row] = {}
    failed: dict[bytes, dict] = defaultdict(dict)  # those of them that did, by what they ask
    for _, row in _read(folder / FILE):
        if not row:
            logger.info(f"the last line of '{folder / FILE}' is torn; its content is left out")
            continue
        key = asked, _ = to_json(row.asked), to_json(row.facts)
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


def line_of(row: Row) -> bytes:
    """A row as its line; raise UserError where it holds what no row may."""
    try:
        whole = Row.model_validate(vars(row))
        parts = {"asked": whole.asked, "facts": whole.facts, "values": whole.values, "made": whole.made}
        return json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise UserError(f"a row cannot be kept: {_mistake(error)}") from None


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
            row = Row.model_validate_json(line)
        except ValidationError as error:
            damaged.append(number)
            mistake = mistake or _mistake(error)
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


def _mistake(error: Exception) -> str:
    """The first thing that is wrong with a row, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place or 'the line'}: {first['msg'].lower()}, got {shown(first['input'])}"


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


def _is_elsewhere_too(path: Path) -> bool:
    """Whether what is appended to a file would be seen under another name, to which it is a link."""
    return path.is_symlink() or (path.exists() and path.stat().st_nlink > 1)


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
