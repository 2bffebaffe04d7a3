"""Where documents come from: local files, the embedded sample, C4 and WikiText-2."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from outliers.errors import UserError
from outliers.models import source
from outliers.models.source import SECONDS_FOR_THE_HUB, check_cache

HUB = {  # texts of the hub: repository, subset and split
    "c4": ("allenai/c4", "en", "validation"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
}


def read_file(path: str | Path) -> list[str]:
    """Read the documents of a local file.

    A plain text file (`.txt`, `.txt.gz`) is one document; a `.jsonl` (or `.jsonl.gz`) file is one document a row, in
    its field `text`.

    Raises:
        UserError: the file is missing or unreadable, has another ending, or a row has no text.
    """
    path = Path(path)
    endings = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if endings not in (".txt", ".txt.gz", ".jsonl", ".jsonl.gz"):
        raise UserError(f"text file '{path}' ends in '{endings}'; expected .txt, .txt.gz, .jsonl or .jsonl.gz")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return [file.read()] if ".txt" in endings else [_text_of(row, n, path) for n, row in enumerate(file, 1)]
    except FileNotFoundError:
        raise UserError(f"text file '{path}' does not exist") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"text file '{path}' cannot be read: {error}") from None


def _text_of(row: str, number: int, path: Path) -> str:
    try:
        text = json.loads(row)["text"]
    except (json.JSONDecodeError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise UserError(f"row {number} of '{path}' is not a JSON object with a string field 'text'")
    return text


def sample() -> list[str]:
    """The embedded text: web-like English documents written for this project."""
    return read_file(Path(__file__).parent / "sample.jsonl")


def c4() -> Iterator[str]:
    """C4 (en), validation split, streamed from the hub in its order."""
    for row in _from_hub(*HUB["c4"], streaming=True):
        yield row["text"]


def wikitext2() -> list[str]:
    """WikiText-2 (raw), test split: its lines joined by two newlines into one document, as most papers do."""
    return ["\n\n".join(_from_hub(*HUB["wikitext2"], streaming=False)["text"])]


def ask_hub(repository: str) -> None:
    """Raise whatever the hub's client raises if a data set cannot be reached; where the user asks for the cache, if
    that has nothing of it.

    Without network, `datasets` retries for half a minute; one question with a time limit finds out at once.
    """
    try:
        source.ask_hub(lambda hub: hub.dataset_info(repository, timeout=SECONDS_FOR_THE_HUB))
    except OfflineModeIsEnabled:
        if not _is_cached(repository):
            raise


def _is_cached(repository: str) -> bool:
    """Whether a data set is in the cache of the hub's client, or in that of `datasets`."""
    prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
    names = (f"datasets--{repository.replace('/', '--')}".lower(), repository.replace("/", "___").lower())
    folders = (Path(constants.HF_HUB_CACHE), Path(prepared))
    return any(place.name.lower() in names for folder in folders if folder.is_dir() for place in folder.iterdir())


def check_hub(name: str) -> None:
    """See that a text of the hub is there, before anything is imported that reads it; other texts pass.

    Raises:
        UserError: it cannot be reached.
    """
    if name in HUB:
        check_cache()
        try:
            ask_hub(HUB[name][0])
        except Exception as error:  # each version of the hub's client raises its HTTP library's own errors
            raise _out_of_reach(HUB[name][0], error) from None


def _from_hub(repository: str, subset: str, split: str, streaming: bool):
    import datasets

    try:
        ask_hub(repository)
        return datasets.load_dataset(repository, subset, split=split, streaming=streaming)
    except Exception as error:  # each version of the hub's client raises its HTTP library's own errors
        raise _out_of_reach(repository, error) from None


def _out_of_reach(repository: str, error: Exception) -> UserError:
    offline = isinstance(error, OfflineModeIsEnabled)
    what = "it is not in the local cache" if offline else type(error).__name__
    also = "unset HF_HUB_OFFLINE" if offline else "set HF_HUB_OFFLINE=1 to use the local cache"
    return UserError(
        f"cannot load '{repository}' from the hub ({what}); check the network, {also}, or use the embedded text "
        "'sample' or a local file"
    )
