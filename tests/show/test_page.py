"""The page of a run, in a real browser."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from outliers.models.names import short_name
from outliers.paper.artefacts import ARTEFACTS
from outliers.paper.published import comparison
from outliers.show.page import models, page, pieces, provenance
from outliers.show.section import Finding, figure_bytes
from outliers.show.tables import measured_on
from outliers.views.keys import keys_section
from outliers.views.origins import origins_section
from outliers.views.perplexity import perplexity_section
from tests.conftest import needs_chromium
from tests.kept import kept


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """The kept sweep of the pocket models."""
    return kept("pocket/table1")


@pytest.fixture(scope="module")
def section(rows):
    """Its section, with the published numbers and with text that HTML must not take as its own."""
    found = perplexity_section(rows)
    beside = comparison("table1", ARTEFACTS["table1"].published, {})
    return found._replace(tables=[*found.tables, beside], notes=["<script>alert('a')</script> & α ≥ 6"])


def test_text_is_escaped(section):
    html = page("<b>", [section], "a && b <c>")
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html
    assert "<b>" not in html
    assert "a &amp;&amp; b &lt;c&gt;" in html


def test_the_page_says_what_was_run(section, rows):
    html = page("A sweep", [section], "python -m outliers.sweep")
    for said in ("python -m outliers.sweep", rows[0]["commit"], rows[0]["weights_hash"], "not run"):
        assert said in html
    found = dict(provenance(rows).cells)
    assert (found["torch"], found["α"], found["type"]) == (rows[0]["torch"], "6", "float32")
    assert found["weights dequantized from"] == "Q4_1"
    assert [row[0] for row in models(rows).cells] == list(
        dict.fromkeys(map(short_name, (row["model"] for row in rows)))
    )


SAMPLE = {"text": "sample", "protocol": "first-blocks", "block": 128}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"blocks": 4}] * 2, ", 4 blocks of 128 tokens"),
        ([{"blocks": 1, "block": 2048}], ", 1 block of 2,048 tokens"),
        ([{"blocks": 8, "first_block": 4}, {"blocks": 4}], ", blocks 1 to 4 and 5 to 12 of 128 tokens"),
        ([{"blocks": 1, "first_block": 5}], ", block 6 of 128 tokens"),
        ([{"blocks": 4, "protocol": "first-blocks+bos"}], " (first-blocks+bos), 4 blocks of 128 tokens"),
        ([{"blocks": 120, "protocol": "pictures"}], ", 120 pictures"),
    ],
)
def test_a_line_says_what_was_measured_on(rows, line):
    assert measured_on([SAMPLE | row for row in rows]) == f"Text sample{line}"


def test_a_page_says_once_what_its_sections_share(section, rows):
    others = section._replace(rows=[row | {"blocks": 2} for row in rows])
    line = "Text sample, 16 blocks of 256 tokens"
    assert page("", [section, section], "").count(line) == 1
    html = page("", [section, others], "")
    assert html.count(f'<p class="quiet">{line}.') == html.count('<p class="quiet">Text sample, 2 blocks of') == 1
    assert f"\n\n{line}\n\n" in section.terminal


def test_what_differs_between_rows_is_listed():
    rows = [{"steps": 1000, "device_name": "a, 2 cores"}, {"steps": 2000, "device_name": "b, 2 cores"}]
    assert measured_on(rows) == "1000 and 2000 training steps"
    assert measured_on([{"limit": 100}]) == "100 examples per task"
    assert measured_on([{"value": 1.0}]) == ""
    assert dict(provenance(rows).cells)["device"] == "a, 2 cores; b, 2 cores"


def test_findings_are_said_once_each_with_a_link_to_where_it_is_from(section):
    many = section._replace(findings=[Finding(f"Fact {number}.", "table1") for number in range(4)])
    other = section._replace(findings=[Finding("Seen <there>.", "perplexity")])
    html = page("A sweep", [many, other], "")
    opening, rest = html.split("</header>")
    found = re.findall(r'<li><a href="#([^"]+)">(Fact \d|Seen &lt;there)', opening)
    assert found[:3] == [
        ("section-1-table-table1", "Fact 0"),
        ("section-2-figure-perplexity", "Seen &lt;there"),
        ("section-1-table-table1", "Fact 1"),
    ], "the most telling one of each section, then the next of each"
    assert "Fact" not in rest
    for place, _ in found:
        assert html.count(f'id="{place}"') == 1
    html = page("A sweep", [many, many], "")
    assert [html.count(f"Fact {number}.") for number in range(4)] == [2] * 4
    assert html.split("</header>")[1].count("Fact 3.") == 2, "beyond six they stand in their sections"


def test_findings_at_the_top_name_their_text_where_sections_read_different_ones(section):
    found = section._replace(findings=[Finding("Fact.", "table1")])
    other = found._replace(rows=[row | {"blocks": 7} for row in found.rows])
    assert "Fact.</a></li>" in page("", [found, found], "").split("</header>")[0]
    opening = page("", [found, other], "").split("</header>")[0]
    assert "Fact.</a> (text sample, 7 blocks of 256 tokens)</li>" in opening
    assert "Fact.</a></li>" not in opening


def test_the_same_rows_make_the_same_page(rows):
    assert len({page("A sweep", [perplexity_section(rows)], "") for _ in range(2)}) == 1


@contextmanager
def opened(browser, path: Path, width: int = 1000) -> Iterator:
    """A window of some width with a page, which says nothing on the console and asks for nothing."""
    window = browser.new_page(viewport={"width": width, "height": 900})
    said, asked = [], []
    window.on("console", lambda message: said.append(message.text))
    window.on("pageerror", lambda error: said.append(str(error)))
    window.on("request", lambda request: asked.append(request.url))
    window.goto(path.as_uri())
    yield window
    window.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", "blob:", path.as_uri()))] == []


LOOK = """() => {
    const inside = node => node.closest('.scroll, svg') !== null;
    const named = box => document.getElementById(box.getAttribute('aria-labelledby')).textContent.length > 0;
    const readable = figure =>  // its smallest letters, of 8.3 points, have 7.5 pixels
        8.3 * figure.getBoundingClientRect().width / figure.viewBox.baseVal.width > 7.5;
    const beyond = node => node.getBoundingClientRect().right > innerWidth + 0.5;
    return {
        figures: [...document.querySelectorAll('figure svg')]
            .filter(one => one.closest('.scroll').clientWidth).map(readable),
        width: document.documentElement.scrollWidth,
        beyond: [...document.querySelectorAll('body *')].filter(n => beyond(n) && !inside(n)).length,
        boxes: [...document.querySelectorAll('.scroll')].every(box => box.ariaLabel || named(box)),
        heading: document.querySelector('h1').innerText,
        tables: document.querySelectorAll('table').length,
    };
}"""


@needs_chromium
@pytest.mark.parametrize(("width", "figures"), [(400, 2), (1400, 1)], ids=["a panel and its legend", "whole"])
def test_in_a_browser(browser, section, tmp_path, width, figures):
    path = tmp_path / "report.html"
    path.write_text(page("A sweep", [section, section], "python -m outliers.sweep " + "x" * 300))
    with opened(browser, path, width) as window:
        seen = window.evaluate(LOOK)
    expected = {"heading": "A sweep", "figures": [True] * 2 * figures, "boxes": True, "tables": 12}
    assert seen == {**expected, "width": width, "beyond": 0}


@needs_chromium
@pytest.mark.parametrize(("width", "scrolls"), [(400, True), (1400, False)])
def test_boxes_are_stops_of_the_tab_key_where_they_scroll(browser, section, tmp_path, width, scrolls):
    path = tmp_path / "report.html"
    path.write_text(page("A sweep", [section._replace(tables=section.tables[:1])], ""))
    with opened(browser, path, width) as window:
        boxes = window.locator("main section").first.locator(".scroll")
        wide = [False, scrolls]  # the model that loses, and all others in a table of their own
        assert boxes.evaluate_all("boxes => boxes.map(box => box.scrollWidth > box.clientWidth)") == wide
        assert boxes.evaluate_all("boxes => boxes.map(box => box.hasAttribute('tabindex'))") == wide


@needs_chromium
def test_a_figure_keeps_the_colours_of_its_legend_in_the_dark(browser, section, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page("A sweep", [section], ""))
    seen = "['body', 'figure .scroll', 'figure svg'].map(name => getComputedStyle(document.querySelector(name)))"
    seen += ".map((style, n) => n < 2 ? style.backgroundColor : style.filter)"
    white = "rgb(255, 255, 255)"
    light, dark = [white, white, "none"], ["rgb(18, 18, 18)", white, "none"]
    with opened(browser, path) as window:
        for style, expected in (("light", light), ("dark", dark)):
            window.emulate_media(color_scheme=style)
            assert window.evaluate(seen) == expected
        window.emulate_media(color_scheme="dark", media="print")
        assert window.evaluate(seen) == light


def test_text_of_figures_is_large_enough():
    every = [perplexity_section(kept("pocket/table1")), origins_section(kept("mechanism/smollm2-135m"))]
    every.append(keys_section(kept("keys")))
    texts = [text for one in every for drawing in one.drawings for text in drawing.figure.findobj(Text)]
    shown = {text.get_text(): text.get_fontsize() * 96 / 72 for text in texts if text.get_visible() and text.get_text()}
    assert {text: size for text, size in shown.items() if size < 11} == {}


def test_a_narrow_screen_has_the_columns_of_a_figure_below_each_other():
    (figure,) = (drawing.figure for drawing in origins_section(kept("mechanism/smollm2-135m")).drawings)
    figure_bytes(figure, "svg")
    legend, first, second = pieces(figure)
    assert legend.box.y1 < min(first.frame.y0, second.frame.y0)
    assert [len(piece.parts) for piece in (legend, first, second)] == [1, 2, 3], "two rows, and a bar at the right"
    assert pieces(Figure()) == []


def test_points_say_what_they_are_and_options_are_not_broken(section):
    html = page("A sweep", [section._replace(notes=["Measure 5 % again with --mask-seeds 4."])], "a --draws 4")
    assert "<title>absmax: +115.3 % ± 1.7</title></use>" in html
    assert "5\N{NO-BREAK SPACE}% again" in html
    assert html.count('<span class="whole">--') == 2


def test_navigation_names_every_section(section):
    html = page("A look", [section, section._replace(title="Other: more")], "")
    linked = re.findall(r'<a href="#([^"]*)">([^<]*)</a>', html.split("<nav")[1].split("</nav>")[0])
    named = [("section-1", "Perplexity by scheme"), ("section-2", "Other"), ("reproduction", "Reproduction")]
    assert linked == named
    assert all(html.count(f'id="{place}"') == 1 for place, _ in linked)


@needs_chromium
def test_printed(browser, section, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page("A sweep", [section], "python -m outliers.sweep"))
    with opened(browser, path) as window:
        window.emulate_media(media="print")
        assert window.locator("details table").first.is_visible(), "what is folded on a screen is printed"
        assert window.locator("details summary").first.is_visible(), "with its caption"
        assert window.pdf().startswith(b"%PDF")


def test_the_first_figure_stands_beside_the_findings(section):
    header, rest = page("A sweep", [section, section], "").split("</header>")
    assert (header.count("<figure>"), rest.count("<figure>")) == (1, 1)
    header, rest = page("A sweep", [section._replace(findings=[])], "").split("</header>")
    assert (header.count("<figure>"), rest.count("<figure>")) == (0, 1), "where nothing was found it has no place there"
