"""Sources of documents: local files, the embedded sample, C4 and WikiText-2."""

import codecs
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from outliers.errors import UserError, unknown_name
from outliers.files import check_file
from outliers.models import source
from outliers.models.source import SECONDS_FOR_THE_HUB, check_hub_cache

HUB = {  # texts of the hub: repository, subset and split
    "c4": ("allenai/c4", "en", "validation"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
}

ENDINGS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
LONGEST_LINE = 2**24  # bytes; a compressed file can hold a line larger than memory
BLANK_LINES = 10**5  # allowed at the end of a file
SURROGATE = re.compile("[\ud800-\udfff]")


class NamedText(NamedTuple):
    """A text with a name: a function that returns its documents, and the protocol by which they are cut.

    A document is a string, an iterable of the strings that it consists of, token ids, int64 (tokens,), or a
    conversation.
    """

    documents: Callable[[], Iterable]
    protocol: str


def read_file(path: str | Path) -> list[str]:
    """Read all documents of a local file, as `open_documents` yields them."""
    return ["".join(parts) for parts in open_documents(path)]


def open_documents(path: str | Path) -> Iterator[Iterable[str]]:
    """Yield the documents of a local file lazily, each as an iterable of its parts.

    A plain text file (`.txt`, `.txt.gz`) is one document with its lines as parts; a `.jsonl` (or `.jsonl.gz`) file is
    one document per row, in its field `text`. Raise UserError for another ending, and for damage where it is read.
    """
    path = Path(path)
    endings = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if endings not in ENDINGS:
        raise UserError(f"text file '{path}' ends in '{endings}'; expected {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if ".txt" in endings:
        yield read_lines(path)
    else:
        for (text,) in read_rows(path, "a string field 'text'", ("text",)):
            yield [text]


def read_rows(path: Path, expected: str, fields: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the values of these fields, all strings, from each row of a file with one JSON object per line.

    Blank lines may stand at the end of the file. If a row has a field twice, the last one counts. expected: description
    of a row, for errors.
    """
    blank = 0
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            blank = blank or number
            if number - blank < BLANK_LINES:
                continue
        if blank:
            raise UserError(f"row {blank} of '{path}' is blank; only the end of a file may be, and not without end")
        try:
            values = _values(line, fields)
        except ValueError as error:
            raise UserError(f"row {number} of '{path}' is not a JSON object with {expected}: {error}") from None
        yield values


def _values(line: str, fields: tuple[str, ...]) -> list[str]:
    """Return the strings in these fields of a row; raise ValueError if a field is missing or no string."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # Python limits the digits of numbers, whose conversion takes quadratic time
        raise ValueError(f"it has a number of more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    for field in fields:
        if not isinstance(row.get(field), str):
            raise ValueError(f"'{field}' is {'no string' if field in row else 'missing'}")
        if half := SURROGATE.search(row[field]):
            raise ValueError(f"'{field}' has half a surrogate pair, {half[0]!a}, which is no character")
    return [row[field] for field in fields]


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a text file lazily, with every line end read as \n; a file that ends in `.gz` is
    decompressed."""
    number = 0
    try:
        with _open(path) as file:
            while raw := file.readline(LONGEST_LINE + 1):
                number += 1
                yield from io.StringIO(_decoded(raw, number, path), newline=None)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"line {number + 1} of text file '{path}' cannot be read: {reason}") from None


def _open(path: Path) -> BinaryIO:
    check_file(path)
    if not path.stat().st_size:  # empty, or a file of /proc, some of which never end
        return io.BytesIO()
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _decoded(raw: bytes, number: int, path: Path) -> str:
    if len(raw) > LONGEST_LINE:
        raise UserError(
            f"line {number} of '{path}' is longer than {LONGEST_LINE >> 20} MB; expected text in lines, or documents "
            "as the rows of a .jsonl file"
        )
    if number == 1 and raw.startswith(codecs.BOM_UTF8):
        raise UserError(f"line 1 of '{path}' begins with a byte order mark; save the file as UTF-8 without one")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"line {number} of text file '{path}' cannot be read: its byte {error.start + 1} is not UTF-8 "
            f"({error.reason}); save the file as UTF-8"
        ) from None


def sample() -> list[str]:
    """Return the embedded text: web-like English documents written for this project."""
    return read_file(Path(__file__).parent / "sample.jsonl")


def c4() -> Iterator[str]:
    """Stream C4 (en), validation split, from the hub in its order."""
    for row in _from_hub(*HUB["c4"], streaming=True):
        yield row["text"]


def wikitext2() -> list[str]:
    """Return WikiText-2 (raw), test split, as one document: its lines joined by two newlines, as in most papers."""
    return ["\n\n".join(_from_hub(*HUB["wikitext2"], streaming=False)["text"])]


TEXTS = {
    "sample": NamedText(sample, "first-blocks"),
    "c4": NamedText(c4, "first-blocks"),
    "wikitext2": NamedText(wikitext2, "wikitext-joined"),
}


def find_named(name: str) -> NamedText:
    """Return the source of a text by its name or the path of a file; raise UserError if it is neither."""
    if name in TEXTS:
        return TEXTS[name]
    if os.path.isfile(name):  # false for names that no file can have, for which Path would raise
        return NamedText(partial(open_documents, name), "first-blocks")
    if os.path.exists(name):
        raise UserError(f"text '{name}' is a folder, a pipe or a device; expected a regular file")
    if Path(name).suffix or "/" in name:
        raise UserError(f"text file '{name}' does not exist; expected a file or one of {', '.join(TEXTS)}")
    raise unknown_name("text", name, TEXTS, "(or the path of a .txt, .txt.gz or .jsonl file)")


def check_data_set(repository: str) -> None:
    """Raise the hub client's error if a data set cannot be reached; in offline mode, if it is not in the cache.

    Without network, `datasets` retries for half a minute; one request with a time limit finds out at once.
    """
    try:
        source.ask_hub(lambda hub: hub.dataset_info(repository, timeout=SECONDS_FOR_THE_HUB))
    except OfflineModeIsEnabled:
        if not _is_cached(repository):
            raise


def _is_cached(repository: str) -> bool:
    """Return whether a data set is in the cache of the hub's client, or in that of `datasets`."""
    prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
    names = (f"datasets--{repository.replace('/', '--')}".lower(), repository.replace("/", "___").lower())
    folders = (Path(constants.HF_HUB_CACHE), Path(prepared))
    return any(place.name.lower() in names for folder in folders if folder.is_dir() for place in folder.iterdir())


def check_text(name: object) -> None:
    """Raise UserError if a text given by name is missing, before slow imports; any other text passes, and what can name
    pictures: a folder, or a data set of the hub (OWNER/NAME)."""
    if not isinstance(name, str) or not name or os.path.isdir(name):
        return
    if name.count("/") != 1 or Path(name).suffix or os.path.exists(name):
        find_named(name)
    if name in HUB:
        check_hub_cache()
        with _reaching(HUB[name][0]):
            check_data_set(HUB[name][0])


def _from_hub(repository: str, subset: str, split: str, streaming: bool):
    import datasets

    with _reaching(repository):
        check_data_set(repository)
        return datasets.load_dataset(repository, subset, split=split, streaming=streaming)


def data_set(name: str, splits: tuple[str, ...]):
    """Stream the first of these splits that a data set of the hub has, or else its first split."""
    import datasets

    with _reaching(name):
        check_data_set(name)
        known = datasets.get_dataset_split_names(name)
        split = next((candidate for candidate in splits if candidate in known), known[0])
        return datasets.load_dataset(name, split=split, streaming=True)


@contextmanager
def _reaching(repository: str) -> Iterator[None]:
    """Turn any error of loading a data set from the hub into a UserError of one line."""
    try:
        yield
    except Exception as error:  # each version of the hub's client raises its HTTP library's own errors
        offline = isinstance(error, OfflineModeIsEnabled)
        reason = "it is not in the local cache" if offline else type(error).__name__
        fix = "unset HF_HUB_OFFLINE" if offline else "set HF_HUB_OFFLINE=1 to use the local cache"
        raise UserError(
            f"cannot load '{repository}' from the hub ({reason}); check the network, {fix}, or use the embedded text "
            "'sample' or a local file"
        ) from None
