"""The notebooks, executed from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def kinds(notebook) -> list[list[str]]:
    """What each code cell puts out: text, tables, pictures."""
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {"stream": None})})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_four():
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_puts_out_what_is_kept(path, tmp_path):
    kept = nbformat.read(path, as_version=4)
    ran = nbformat.read(path, as_version=4)
    for cell in ran.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(ran, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert kinds(ran) == kinds(kept)
    assert any("image/png" in kind for kind in kinds(kept))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_clean(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "executed in order, once"
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    text = path.read_text()
    assert "Warning" not in text
    assert "site-packages" not in text
