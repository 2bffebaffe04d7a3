"""Read and append the rows of a folder.

They are JSON lines, so that a killed run leaves whole rows and at most one that is torn.
"""

import codecs
import contextlib
import itertools
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from pydantic_core import to_json

from outliers.errors import UserError, joined_names
from outliers.files import check_file, check_replaceable, locked, remove_left, write_whole, writing
from outliers.subjects.row import Row, part_key
from outliers.terminal.interrupt import Interrupted, asked_to_stop, finishing

FILE = "rows.jsonl"
MOST_BYTES = 2**32  # of a file, whose rows have about a kilobyte each
MOST_NAMED = 12  # damaged lines
DIGEST = 16  # bytes of the hash of a part
Kept = TypeVar("Kept")
logger = logging.getLogger(__name__)


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
        """Return whether there are rows with this request and any provenance.

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


def read_rows(folder: Path) -> list[Row]:
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

    return list(_last_rows(folder, kept).values())


def index(folder: Path) -> Callable[[dict], list[Row]]:
    """Return a function that reads the rows of one request, as `read_rows` has them.

    A report of a few of a million rows takes little memory that way. Raises as `read_rows`.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for key, place in _last_rows(folder, lambda _row, place: place).items():
        places[key[:DIGEST]].append(place)

    def find(request: dict) -> list[Row]:
        offsets = places.get(_digest(part_key(request)), [])
        with open(folder / FILE, "rb") if offsets else contextlib.nullcontext() as file:
            rows = []
            for offset in offsets:
                file.seek(offset)
                rows.append(Row.read(file.readline().removeprefix(codecs.BOM_UTF8)))
            return rows

    return find


def _last_rows(folder: Path, kept: Callable[[Row, int], Kept]) -> dict[bytes, Kept]:
    """Return the result of a function of each valid row and its offset in the file, by request and provenance.

    The last row of a request and provenance is valid, but no failed one of which a later one succeeded.
    """
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
            known = [other for other, part in failed[request].items() if part.items() <= row.provenance.items()]
            for other in known:
                del failed[request][other]
                if other != key:
                    del last[other]
    return last


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST).digest()


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
        problem, lines = f"line {damaged[0]} of '{path}' is damaged ({mistake})", "this line"
        if len(damaged) > 1:
            problem = f"lines {joined_names(damaged, MOST_NAMED)} of '{path}' are damaged (the first: {mistake})"
            lines = "these lines"
        raise UserError(f"{problem}; delete {lines}, or choose another folder with --out")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, place in bytes, and content of each line that is not blank."""
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
