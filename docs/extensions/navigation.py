"""What stands in the menu of the site, and its front page."""

import re
import shutil
from pathlib import Path

TOCTREE = "\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```"


# The captions of pages that no row of the table of README links, by their folders.
FOLDERS = {
    "Notebooks": "notebooks/",
    "Commands": "docs/reference/commands/",
    "Python": "docs/reference/",
    "Models and data": "outliers/",
    "About": "",
}
ROW = re.compile(r"^\| (?P<caption>[\w ]+) \| (?P<links>.*) \|$", re.MULTILINE)


def captions(readme: str, pages: set[str]) -> dict[str, list[str]]:
    """Caption to pages: each row of the table of README in its order, then the other pages by folder and name."""
    rows = {row["caption"]: re.findall(r"\]\(([\w/.-]+)\.md\)", row["links"]) for row in ROW.finditer(readme)}
    found = {caption: [page for page in links if page in pages] for caption, links in rows.items()}
    found |= {caption: [] for caption in FOLDERS}
    for page in sorted(pages - {"README"} - {page for links in rows.values() for page in links}):
        found[next(caption for caption, folder in FOLDERS.items() if page.startswith(folder))].append(page)
    return found


def add_toctrees(app, docname: str, source: list[str]) -> None:
    """Let README, which has no menu of its own, hold that of the site."""
    if docname == app.config.root_doc:
        found = captions(source[0], app.env.found_docs)
        source[0] += "".join(
            TOCTREE.format(caption=caption, pages="\n".join(f"/{page}" for page in pages))
            for caption, pages in found.items()
            if pages
        )


def add_index(app, error: Exception | None) -> None:
    """Let a browser that opens the folder see README."""
    if not error:
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app) -> dict:
    app.connect("source-read", add_toctrees)
    app.connect("build-finished", add_index)
    return {"parallel_read_safe": True}
