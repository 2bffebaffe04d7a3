"""The site: it is built without a warning, every link of it leads somewhere, and all that is public is on it."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import typer

import outliers
from outliers.app import command_of, commands
from outliers.terminal.command import app_of
from tests.conftest import needs_chromium

pytest.importorskip("furo", reason="the extra `docs` is not installed")
pytestmark = pytest.mark.nightly("docs/")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "extensions"))
import notebook_pages  # noqa: E402, the extensions are no package
import public_names  # noqa: E402


class Page(HTMLParser):
    """What a page of the site holds: where it links to, where it can be linked to, and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [found[name] for name in ("href", "src") if found.get(name)]
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """The pages of the site, by their paths."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-E", "-W", "--keep-going", "-c", "docs", "-d", str(folder / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return {path: Page(path) for path in (folder / "html").rglob("*.html")}


def page(site: dict[Path, Page], name: str) -> Page:
    """A page by its name."""
    return next(found for path, found in site.items() if path.as_posix().endswith(f"/html/{name}.html"))


def test_every_link_leads_somewhere(site):
    lost = []
    for path, found in site.items():
        for link in found.links:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                to_anchor = not parts.fragment or target not in site or unquote(parts.fragment) in site[target].anchors
                lost += [] if target.is_file() and to_anchor else [f"{path.name}: {link}"]
    assert not lost


def test_nothing_is_loaded_from_elsewhere(site):
    """Pages and what they show are read from the folder; links to other places are for people alone."""
    for path in site:
        text = path.read_text(encoding="utf-8")
        assert 'src="http' not in text, path
        assert 'rel="stylesheet" type="text/css" href="http' not in text, path


@needs_chromium
def test_every_column_of_a_table_is_seen(site, browser):
    """On a laptop's screen, without scrolling: of the models in a table, the largest stands last."""
    hidden = "[...document.querySelectorAll('.table-wrapper')].filter(e => e.scrollWidth > e.clientWidth).length"
    opened = browser.new_page(viewport={"width": 1300, "height": 900})
    for path in site:
        if "table-wrapper" in path.read_text(encoding="utf-8"):
            opened.goto(path.as_uri())
            assert not opened.evaluate(hidden), path
    opened.close()


@pytest.mark.parametrize("name", outliers.__all__)
def test_every_public_name_is_in_the_reference(site, name):
    anchors = {anchor for path, found in site.items() if path.parent.name == "reference" for anchor in found.anchors}
    assert any(anchor == f"outliers.{name}" or anchor.startswith(f"outliers.{name}.") for anchor in anchors)


def test_a_signature_has_its_types_and_a_docstring_its_sections(site):
    text = page(site, "docs/reference/text").text
    assert "blocks: int" in text
    assert "Raises" in text
    assert "Tensor" in text


@pytest.mark.parametrize("name", commands())
def test_every_option_of_a_command_is_on_its_page(site, name):
    text = page(site, f"docs/reference/commands/{name}").text
    for parameter in typer.main.get_command(app_of(command_of(name))).params:
        assert all(option in text for option in parameter.opts if option.startswith("--")), parameter.opts


def test_the_index_is_the_readme(site):
    assert page(site, "index").text == page(site, "README").text


def test_a_notebook_as_a_page():
    new = nbformat.v4
    table = {"text/html": '<style scoped>b</style><table border="1" class="dataframe"></table>', "text/plain": "x"}
    outputs = [
        new.new_output("stream", name="stderr", text="a bar"),
        new.new_output("stream", name="stdout", text="one\n"),
        new.new_output("stream", name="stdout", text="two\n"),
        new.new_output("execute_result", data=table, execution_count=1),
    ]
    cells = [new.new_markdown_cell("# Title"), new.new_code_cell("print(1)", outputs=outputs)]
    assert notebook_pages.markdown(new.new_notebook(cells=cells)).split("\n\n") == [
        "# Title",
        "```python\nprint(1)\n```",
        "```text\none\ntwo\n```",
        '```{raw} html\n<div class="table-wrapper docutils container"><table class="docutils align-default"></table>'
        "</div>\n```",
    ]


def test_markdown_of_a_docstring():
    lines = ["The |x| of `a|b`, see docs/schemes.md#text.", "", "| name | |", "|---|---|", "| max | of |x| |", ""]
    public_names.from_markdown(None, None, None, None, None, lines)
    assert lines[0] == r"The \|x\| of `a|b`, see `docs/schemes.md#text <../schemes.html#text>`__."
    assert r"| max    | of \|x\| |" in lines
