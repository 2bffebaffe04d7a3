"""What stands in the menu of the site, and its front page."""

import re
import shutil
from pathlib import Path

TOCTREE = "\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```"


# Where the pages are that a caption stands above; the others are the guide.
FOLDERS = {
    "Notebooks": "notebooks/",
    "Commands": "docs/reference/commands/",
    "Python": "docs/reference/",
    "Models and data": "outliers/",
}


def captions(readme: str, pages: set[str]) -> dict[str, list[str]]:
    """Caption to pages, in the order in which README links them last, which is that of its table, or by their names."""
    linked = re.findall(r"\]\(([\w/.-]+)\.md\)", readme)
    ordered = [page for page in dict.fromkeys(reversed(linked)) if page in pages][::-1]
    found: dict[str, list[str]] = {caption: [] for caption in ("Guide", *FOLDERS)}
    for page in dict.fromkeys([*ordered, *sorted(pages - {"README"})]):
        folders = (caption for caption, folder in FOLDERS.items() if page.startswith(folder))
        found[next(folders, "Guide")].append(page)
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
