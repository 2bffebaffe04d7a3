"""Files and folders of the repository that pages link to, as pages that show them."""

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path, PurePosixPath

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.util.osutil import relative_uri

FOLDER = "files"  # of the site, in which these pages are
LARGEST = 200_000  # bytes of a file that is shown
LINKS = "repository_files"  # what the metadata of a page says of its links


def resolve(app, doctree: nodes.document) -> None:
    """Let a link to what is in the repository, but is no page, lead to the page that shows it."""
    page = app.env.docname
    kept = app.env.metadata[page].setdefault(LINKS, [])
    for link in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        path = os.path.normpath(PurePosixPath(page).parent / link["reftarget"])
        if link["reftype"] == "myst" and link["refdomain"] is None and (Path(app.srcdir) / path).exists():
            here = app.builder.get_target_uri(page)
            uri = relative_uri(here, app.builder.get_target_uri(f"{FOLDER}/{path}"))
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))
            kept.append(path)


def shown(app) -> Iterator[tuple[str, dict, str]]:
    """Name, context and template of each page: of all that is linked, and of what is in a linked folder."""
    root = Path(app.srcdir)
    linked = {root / path for about in app.env.metadata.values() for path in about.get(LINKS, [])}
    inside = {path for folder in linked if folder.is_dir() for path in folder.rglob("*") if _is_shown(path)}
    pages = sorted(linked | inside)
    for path in pages:
        name = path.relative_to(root).as_posix()
        body = _listing(path, pages) if path.is_dir() else _highlighted(app, path)
        yield f"{FOLDER}/{name}", {"title": name, "body": f"<h1>{escape(name)}</h1>\n{body}"}, "page.html"


def _is_shown(path: Path) -> bool:
    """Whether what is in a linked folder has a page: folders, and text that is not too long to read."""
    if "__pycache__" in path.parts:
        return False
    return path.is_dir() or (path.stat().st_size <= LARGEST and b"\0" not in path.read_bytes())


def _listing(folder: Path, pages: list[Path]) -> str:
    """The entries of a folder, as links where they have pages."""
    names = [(path, escape(path.name)) for path in sorted(folder.iterdir()) if path.name != "__pycache__"]
    links = [
        f'<li><a href="{name if folder == path else f"{escape(folder.name)}/{name}"}.html">{name}</a></li>'
        if path in pages
        else f"<li>{name}</li>"
        for path, name in names
    ]
    return "\n".join(["<ul>", *links, "</ul>"])


def _highlighted(app, path: Path) -> str:
    """A file in the colours of its language."""
    try:
        language = get_lexer_for_filename(path.name).aliases[0]
    except ClassNotFound:
        language = "text"
    text = path.read_text(encoding="utf-8")
    return app.builder.highlighter.highlight_block(text, language, force=True, linenos="inline")


def setup(app) -> dict:
    app.connect("doctree-read", resolve, priority=400)  # before Sphinx notes what is to be downloaded
    app.connect("html-collect-pages", shown)
    return {"parallel_read_safe": True}
