"""Reprint a finished run that is requested again, as long as nothing that its results depend on has changed.

A folder shows the page of the last request. Pages of earlier requests are kept below `earlier/` and linked.
"""

import hashlib
import html
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import outlier_kernels
import typer
from pydantic import BaseModel

import outliers
from outliers.config.experiment import Experiment
from outliers.config.fields import OF_A_FILE, OF_A_MODEL
from outliers.config.files import experiment_files
from outliers.errors import UserError
from outliers.files import EARLIER, PAGE, move, read_whole, write_whole
from outliers.models.config_file import FILE as CONFIG
from outliers.models.pocket.ladder import LADDER
from outliers.models.source import local_place
from outliers.runs.rows import FILE as ROWS
from outliers.text.documents import HUB, TEXTS
from outliers.tracing.requests import STEM, exchange_traces, labels_of, request_of

FILE = ".printed.json"  # record of what a run printed, beside its rows, tables, figures and page
PIECE = 1 << 20  # bytes of a file that are read at once
MOST_BYTES = 2**26
VARIABLES = ("CUDA", "MKL", "OMP", "OUTLIER", "TRITON")  # prefixes of environment variables that change results
CODE = [Path(package.__file__).parent for package in (outliers, outlier_kernels)]
INSTALLED = Path(typer.__file__).parent.parent  # site-packages: its time changes with every installation
RECORD = {"request", "key", "command", "named", "wrote", "files", "printed"}
OTHERS = re.compile('(<p id="others">).*?(</p>)', re.DOTALL)  # links of a page to other requests


def output_key(experiment: Experiment, command: str) -> str | None:
    """Return a hash of everything that the output of a run depends on.

    That is the command, the experiment, the code, the installed packages, the machine, and the files that the
    experiment names, by size and modification time. Return None if a model or text is on the hub, where it may have
    changed.
    """
    if not is_here(experiment):
        return None
    return _key(command, experiment, *_files_named(experiment))


def report_output_key(command: str) -> str:
    """Return a hash of what a report depends on, as `output_key`.

    It covers the files that define experiments, so that none of them has to be read. The files that experiments name
    are checked through the stamps in the record.
    """
    return _key(command, None, *experiment_files().values())


def _key(command: str, experiment: Experiment | None, *files: Path) -> str:
    variables = sorted(pair for pair in os.environ.items() if pair[0].startswith(VARIABLES))
    here = [sys.version, platform.node(), os.cpu_count(), INSTALLED.stat().st_mtime_ns, variables]
    return hashlib.sha256(repr((command, experiment, os.getcwd(), _stamps(*CODE, *files), here)).encode()).hexdigest()


def _files_named(experiment: Experiment) -> list[Path]:
    # a folder that has the name of a text is not that text
    files = [Path(name) for name in names_in(experiment, OF_A_FILE) if name not in TEXTS and Path(name).exists()]
    for place in filter(None, map(local_place, names_in(experiment, OF_A_MODEL))):
        # the files of a folder and of its checkpoints, which are folders inside it; other folders may hold results
        folders = [place, *(config.parent for config in place.glob(f"*/{CONFIG}"))]
        files += (
            [place] if place.is_file() else [file for folder in folders for file in folder.iterdir() if file.is_file()]
        )
    return files


def page_request(experiments: Iterable[Experiment]) -> str:
    """Return the folder name under which the page of some experiments is kept once another page replaces it."""
    requested = [(type(experiment).__name__, experiment.model_dump_json()) for experiment in experiments]
    return hashlib.sha256(repr(requested).encode()).hexdigest()[:12]


def is_here(experiment: Experiment) -> bool:
    """Return whether all models and texts of an experiment are on this machine and none comes from the hub."""
    models = [name for name in names_in(experiment, OF_A_MODEL) if name not in LADDER]
    return HUB.keys().isdisjoint(names_in(experiment, OF_A_FILE)) and None not in map(local_place, models)


def names_in(value: object, mark: str) -> Iterator[str]:
    """Yield the models or files in those fields of an experiment, nested ones included, that have a mark.

    Args:
        value: an experiment, or a value inside one.
        mark: `OF_A_MODEL` or `OF_A_FILE`.
    """
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            entries = getattr(value, name)
            if mark in field.metadata or _is_marked(field.annotation, mark):
                entries = entries if isinstance(entries, list) else [entries]
                yield from (str(entry) for entry in entries if isinstance(entry, (str, Path)))
            else:
                yield from names_in(entries, mark)
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from names_in(entry, mark)
    elif mark == OF_A_MODEL:
        yield from (variant.other for variant in getattr(value, "swaps", ()) if isinstance(variant.other, str))


def _is_marked(annotation: object, mark: str) -> bool:
    return any(part == mark or _is_marked(part, mark) for part in get_args(annotation))


def reprint(key: str | None, *folders: Path) -> str | None:
    """Return what a run with this key printed, or None if any file that it read or wrote has changed since.

    The folder that has the matching record then shows its page.
    """
    for folder in folders if key else ():
        for place in (folder, *(page.parent for page in _earlier(folder))):
            record = _read(place)
            if record and record["key"] == key and record["named"] == _stamps(*map(Path, record["named"])):
                show_page(folder, record["request"])
                return record["printed"] if _is_there(folder, record) else None
    return None


def show_page(folder: Path, request: str) -> None:
    """Make a folder show the page of a request, and the trace that the page was made from.

    The files of the page shown before move to `earlier/`, and those of this page, and its trace, back from there.
    request: the page's name by `page_request`.
    """
    shown = _read(folder)
    if shown and shown["request"] != request:
        move(folder, folder / EARLIER / shown["request"], [*shown["wrote"], FILE])
        _link(folder / EARLIER / shown["request"], {"../../" + PAGE: "the last one"})
    if not (folder / FILE).exists():
        place = folder / EARLIER / request
        move(place, folder, [*_read(place).get("wrote", ()), FILE])
    if trace := _read(folder).get("trace"):
        exchange_traces(folder, trace["request"], trace["names"])
    _link(folder, {f"{EARLIER}/{page.parent.name}/{PAGE}": _read(page.parent)["command"] for page in _earlier(folder)})


def record_run(
    folder: Path, experiments: Sequence[Experiment], key: str | None, command: str, wrote: Iterable[str], text: str
) -> None:
    """Record what the run of some experiments printed, beside the files that it wrote, and link earlier pages.

    Args:
        key: from `output_key`; None if the run must not be skipped next time.
        command: the line that the user typed.
        wrote: names of the files that the page consists of.
        text: what was printed.
    """
    is_local = key is not None and all(map(is_here, experiments))
    inside = (Path(name).relative_to(folder) for name in _stamps(folder))
    wrote, files = list(wrote), {str(file): _stamp(folder / file) for file in inside if file.parts[0] != EARLIER}
    others = sorted(files.keys() - {*wrote, ROWS})
    trace = next((name for name in others if name.startswith(f"{STEM}.")), None)
    labels = trace and labels_of(folder / trace)
    names = [trace, *(name for name in others if name != trace)]  # of the trace, and of files derived from it
    record = {
        "request": page_request(experiments),
        "key": key if is_local else None,
        "command": command,
        "named": _stamps(*(file for experiment in experiments for file in _files_named(experiment)))
        if is_local
        else {},
        "wrote": wrote,
        "files": files,
        "trace": {"request": request_of(labels), "names": names} if labels else None,
        "printed": text,
    }
    write_whole(folder / FILE, json.dumps(record))
    show_page(folder, record["request"])


def _earlier(folder: Path) -> list[Path]:
    try:
        return sorted((folder / EARLIER).glob(f"*/{PAGE}"), key=lambda page: page.stat().st_mtime_ns)
    except OSError:  # such as a name that is too long, which the run refuses
        return []


def _link(folder: Path, names: dict[str, str]) -> None:
    """Replace the links to pages of other requests in the page of a folder; names: by the path of a page."""
    links = ", ".join(f'<a href="{path}"><code>{html.escape(name)}</code></a>' for path, name in names.items())
    page = folder / PAGE
    if page.is_file():
        old = page.read_text("utf-8")
        new = OTHERS.sub(lambda match: f"{match[1]}{links and f'Also here: {links}'}{match[2]}", old)
        if new != old:
            write_whole(page, new)


def _read(folder: Path) -> dict:
    """Return the record in a folder; an empty dictionary if there is none or it is damaged."""
    try:
        record = json.loads(read_whole(folder / FILE, MOST_BYTES))
        return record if isinstance(record, dict) and record.keys() >= RECORD else {}
    except (OSError, ValueError, UserError):
        return {}


def _stamp(file: Path, size: int | None = None) -> list:
    """Return the size and hash of rows or a page, or the size and modification time of another file.

    Of rows, to which other requests append, the first `size` bytes count; of a page, everything but its links.
    """
    if file.name == ROWS:
        digest, length = hashlib.sha256(), file.stat().st_size if size is None else size
        left = length
        with open(file, "rb") as content:  # in pieces, for it may have gigabytes
            while piece := content.read(min(left, PIECE)):
                digest.update(piece)
                left -= len(piece)
        return [length - left, digest.hexdigest()]
    if file.name == PAGE:
        content = OTHERS.sub("", file.read_text("utf-8")).encode()
        return [len(content), hashlib.sha256(content).hexdigest()]
    return [file.stat().st_size, file.stat().st_mtime_ns]


def _is_there(folder: Path, record: dict) -> bool:
    """Return whether the files of a recorded run are in its folder as a run left them.

    A later request may have written the same trace again, with its tokens.
    """
    trace = record.get("trace") or {"request": None, "names": []}
    pages = [_read(page.parent) for page in _earlier(folder)]
    alike = [page["files"] for page in pages if page.get("trace") and page["trace"]["request"] == trace["request"]]
    try:
        for name, stamp in record["files"].items():
            stamps = [stamp, *(files.get(name) for files in alike if name in trace["names"])]
            if _stamp(folder / name, stamp[0]) not in stamps:
                return False
    except OSError:
        return False
    return True


def _stamps(*places: Path) -> dict[str, list[int]]:
    """Return size and modification time of files, and of the files in folders that are neither hidden nor compiled."""
    files = [place for place in places if place.is_file()]
    for folder in filter(Path.is_dir, places):
        inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
        files += [path for path in inside if not path.name.startswith(".")]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
