"""Run notebooks and keep what they put out, without the times of their cells.

    python scripts/notebooks.py [NOTEBOOK …]

By default all of `notebooks/`.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

os.environ["TQDM_DISABLE"] = "1"  # no bars, whose times differ each time
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

for path in map(Path, sys.argv[1:] or sorted(NOTEBOOKS.glob("*.ipynb"))):
    print(path)
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": path.parent}}
    # the command `jupyter execute` takes the setting of times, and ignores it
    NotebookClient(notebook, record_timing=False, kernel_name="python3", resources=place).execute()
    nbformat.write(notebook, path)
