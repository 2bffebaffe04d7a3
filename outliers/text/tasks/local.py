"""The data of the tasks in this folder, read from a local folder or from shipped examples.

The YAML files of the tasks name these functions; the harness calls them with all fields of a task's metadata, of which
`data` is the folder.
"""

from pathlib import Path

from datasets import Dataset

from outliers.errors import UserError
from outliers.text.documents import read_file, read_lines, read_rows

EXAMPLES = Path(__file__).parent / "data"  # the first 200 examples of each task
PIQA_FIELDS = ("goal", "sol1", "sol2")


def lambada(data: str | None = None, **_metadata) -> dict[str, Dataset]:
    """Read rows {"text"} of `lambada_test.jsonl` in a folder; without one, of the shipped examples."""
    return {"test": Dataset.from_dict({"text": read_file(_file(data, "lambada_test.jsonl"))})}


def piqa(data: str | None = None, **_metadata) -> dict[str, Dataset]:
    """Read rows {"goal", "sol1", "sol2"} of `piqa_valid.jsonl` with the labels, 0 or 1, of `piqa_valid_labels.lst`.

    Raises:
        UserError: a file is missing or damaged, or labels and rows do not match.
    """
    questions, answers = _file(data, "piqa_valid.jsonl"), _file(data, "piqa_valid_labels.lst")
    expected = f"strings {', '.join(PIQA_FIELDS)}"
    rows = [dict(zip(PIQA_FIELDS, row, strict=True)) for row in read_rows(questions, expected, PIQA_FIELDS)]
    labels = [line.removesuffix("\n") for line in read_lines(answers)]
    if len(labels) != len(rows) or not set(labels) <= {"0", "1"}:
        raise UserError(f"'{answers}' has to hold a line 0 or 1 for each of the {len(rows)} rows of '{questions}'")
    labelled = [{**row, "label": int(label)} for row, label in zip(rows, labels, strict=True)]
    return {"validation": Dataset.from_list(labelled)}


def _file(data: str | None, name: str) -> Path:
    path = (EXAMPLES if data is None else Path(data).expanduser()) / name
    if not path.is_file():
        raise UserError(f"file '{path}' does not exist; name the folder with '{name}' as data (--data)")
    return path
