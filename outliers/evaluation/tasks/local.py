"""The data of the tasks beside this file, read from a local folder, or the examples that come along.

Their YAML files name these functions; the harness calls them with all fields of a task's metadata, of which `data` is
the folder.
"""

import json
from pathlib import Path

from datasets import Dataset

from outliers.errors import UserError
from outliers.text.documents import read_file

EXAMPLES = Path(__file__).parent / "data"  # the first 200 of each task
PIQA_FIELDS = ("goal", "sol1", "sol2")


def lambada(data: str | None = None, **_metadata) -> dict[str, Dataset]:
    """Rows {"text"} of `lambada_test.jsonl`.

    Raises:
        UserError: the file is missing or holds something else.
    """
    return {"test": Dataset.from_dict({"text": read_file(_file(data, "lambada_test.jsonl"))})}


def piqa(data: str | None = None, **_metadata) -> dict[str, Dataset]:
    """Rows {"goal", "sol1", "sol2"} of `piqa_valid.jsonl` with the labels, 0 or 1, of `piqa_valid_labels.lst`.

    Raises:
        UserError: a file is missing or holds something else.
    """
    questions, answers = _file(data, "piqa_valid.jsonl"), _file(data, "piqa_valid_labels.lst")
    rows = [_row(line, number, questions) for number, line in enumerate(_lines(questions), 1)]
    labels = _lines(answers)
    if len(labels) != len(rows) or not set(labels) <= {"0", "1"}:
        raise UserError(f"'{answers}' has to hold a line 0 or 1 for each of the {len(rows)} rows of '{questions}'")
    labelled = [{**row, "label": int(label)} for row, label in zip(rows, labels, strict=True)]
    return {"validation": Dataset.from_list(labelled)}


def _file(data: str | None, name: str) -> Path:
    path = (EXAMPLES if data is None else Path(data).expanduser()) / name
    if not path.is_file():
        raise UserError(f"file '{path}' does not exist; name the folder with '{name}' as data (--data)")
    return path


def _lines(path: Path) -> list[str]:
    # Not splitlines: a JSON string may hold characters that it takes for the end of a line.
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"file '{path}' cannot be read: {error}") from None


def _row(line: str, number: int, path: Path) -> dict[str, str]:
    try:
        row = {field: json.loads(line)[field] for field in PIQA_FIELDS}
    except (json.JSONDecodeError, KeyError, TypeError):
        row = {}
    if not row or not all(isinstance(value, str) for value in row.values()):
        raise UserError(f"row {number} of '{path}' is not a JSON object with strings {', '.join(PIQA_FIELDS)}")
    return row
