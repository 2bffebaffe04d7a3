"""Notebooks as pages: their words, their code, and the outputs that were kept. Nothing is executed."""

import re

import nbformat
from myst_parser.parsers.sphinx_ import MystParser

# Kinds of output, the best to show first, and the Markdown of each.
FORMS = {
    "text/html": '```{{raw}} html\n<div class="table-wrapper docutils container">{}</div>\n```',
    "image/png": "![What this cell draws](data:image/png;base64,{})",
    "text/plain": "```text\n{}\n```",
}


def markdown(notebook: nbformat.NotebookNode) -> str:
    """A notebook as a page."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts += [f"```python\n{cell.source}\n```", *_outputs(cell.outputs)]
        else:
            parts.append(cell.source)
    return "\n\n".join(parts)


def _outputs(outputs: list) -> list[str]:
    """What a cell has put out: text that follows on text as one, and of each result its best form."""
    said = "".join(output.text for output in outputs if output.get("name") == "stdout")
    results = [output.data for output in outputs if "data" in output]
    best = [next((kind, data[kind]) for kind in FORMS if kind in data) for data in results]
    return [FORMS[kind].format(_styled(data.strip())) for kind, data in ([("text/plain", said)] if said else []) + best]


def _styled(data: str) -> str:
    """A table of pandas in the style of the other tables of the site; anything else as it is."""
    table = '<table class="docutils align-default">'
    return re.sub(r"<style scoped>.*?</style>", "", data, flags=re.DOTALL).replace(
        '<table border="1" class="dataframe">', table
    )


class Notebook(MystParser):
    """Reads a notebook as the page that it is."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document) -> None:
        super().parse(markdown(nbformat.reads(inputstring, as_version=4)), document)


def setup(app) -> dict:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebook)
    return {"parallel_read_safe": True}
