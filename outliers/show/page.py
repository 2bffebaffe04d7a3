"""The self-contained HTML page of a run: findings, tables, figures, provenance, and the command that repeats it."""

import re
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D, Bbox

from outliers.models.names import distinct_names
from outliers.show.axes import BETWEEN, HOVER, count_label
from outliers.show.section import FINDINGS, Drawing, Finding, Section
from outliers.show.tables import MISSING, Table, distinct, measured_on
from outliers.show.words import listed

HERE = Path(__file__).parent
PROVENANCE = {  # label: field
    "protocol": "protocol",
    "blocks of several documents": "packed_blocks",
    "α": "alpha",
    "type": "dtype",
    "weights dequantized from": "quantized_from",
    "zero points read as": "zero_points",
    "merged": "adapter",
    "compared with weights from": "other_quantized_from",
    "their zero points read as": "other_zero_points",
    "run on": "device",
    "outliers": "version",
    "commit": "commit",
    "code": "code",
    "Python": "python",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "bitsandbytes": "bitsandbytes",
    "lm-eval": "lm_eval",
    "device": "device_name",
    "threads": "threads",
    "seed": "seed",
}
MOST = (  # label, field whose maximum is shown, unit, format
    ("most memory", "peak_memory_bytes", 2**20, "{:,.0f} MiB"),
    ("longest measurement", "wall_seconds", 1, "{:.1f} s"),
)
MODEL = ["model", "revision", "dtype", "parameters", "weights", "tokens"]
NAMED = r'id="|href="#|url\(#'  # what precedes a name in an SVG
POCKET = "pocket/"
EMBEDDED = " Models of pocket/ are small ones that this project trained and embeds (docs/pocket.md)."
EDGE, NARROW = 3, 72  # points: around a piece of a figure, and the widest colour bar with its labels
MANY = 12  # more models are counted, not named


def page(title: str, sections: list[Section], command: str) -> str:
    """Render the page as HTML that holds every style and image, so that a browser fetches nothing.

    command: what a person types to repeat the run.
    """
    rows = [row for section in sections for row in section.rows]
    # the findings at the top, each with its section's number: the first of every section, then the second of each
    numbered = ([(number, claim) for claim in section.findings] for number, section in enumerate(sections))
    opening = [finding for findings in zip_longest(*numbered) for finding in findings if finding][:FINDINGS]
    samples = [measured_on(section.rows) for section in sections]
    differ = len(set(filter(None, samples))) > 1  # a quantity may then have several values on the page
    fields = [
        _section_fields(number, section, [claim for claim in section.findings if (number, claim) not in opening])
        | {"sample": samples[number] if differ else ""}
        for number, section in enumerate(sections)
    ]
    explored = any(section.explorers for section in sections)
    if explored:
        from outliers.show.explorer import plotly  # late, for few pages have one
    environment = Environment(autoescape=True, trim_blocks=True, loader=FileSystemLoader(HERE))
    environment.filters["whole"] = _whole
    return environment.get_template("page.html").render(
        title=title,
        summary=_summary(rows),
        sample="" if differ else next(filter(None, samples), ""),
        opening=[
            _linked(number, sections[number], finding) | {"sample": samples[number] if differ else ""}
            for number, finding in opening
        ],
        first=_take_first_drawing(fields[0]) if opening else None,
        sections=fields,
        plotly=plotly() if explored else None,
        **{f"explorer_{end}": Markup((HERE / f"explorer.{end}").read_text("utf-8")) for end in ("css", "js")},
        command=command,
        provenance=[_html(table, table.name) for table in (provenance(rows), models(rows)) if table],
    )


def _take_first_drawing(section: dict) -> dict | None:
    """Remove the first drawing from the fields of a section, and return it; None if there is none.

    An explorer that replaces it stays in the section.
    """
    first, *section["drawings"] = section["drawings"] or [None]
    for explorer in section["explorers"]:
        explorer["instead"] *= bool(first) and explorer["instead"] != first["name"]
    return first


def _linked(number: int, section: Section, finding: Finding) -> dict:
    """Return the text of a finding and the anchor of the table or figure that shows it."""
    is_table = any(table.name == finding.at for table in section.tables)
    return {"text": finding.text, "place": _place(number, "table" if is_table else "figure", finding.at)}


def _whole(text: str) -> Markup:
    """Keep options, and numbers with their per cent sign or scatter, from breaking across lines."""
    unbroken = re.sub(" (?=%|± )|(?<=±) ", "\N{NO-BREAK SPACE}", text)
    return Markup(re.sub(r"(--[\w-]+)", r'<span class="whole">\1</span>', str(escape(unbroken))))


def _place(number: int, kind: str, name: str) -> str:
    return f"section-{number + 1}-{kind}-{name}"


def _section_fields(number: int, section: Section, findings: list[Finding]) -> dict:
    parts = [part for table in section.tables for part in table.parts]
    tables = [_html(part, _place(number, "table", part.name)) for part in parts]
    return {
        **section._asdict(),
        "findings": [_linked(number, section, finding) for finding in findings],
        "tables": tables,
        "drawings": [
            {
                "name": drawing.name,
                "caption": drawing.caption,
                "svg": _inline(drawing, place),
                "width": f"{72 * drawing.figure.get_figwidth():g}pt",
                "pieces": pieces(drawing.figure),
                "place": place,
            }
            for drawing in section.drawings
            for place in [_place(number, "figure", drawing.name)]
        ],
        "explorers": [explorer._asdict() | {"data": explorer.packed} for explorer in section.explorers],
    }


class Piece(NamedTuple):
    """A part of a figure that a narrow screen shows below others.

    frame: box of its axes. box: box of the axes with their labels. parts: ids of its artists. Boxes are in points from
    the upper left corner of the figure.
    """

    frame: Bbox
    box: Bbox
    parts: list[str]

    @property
    def view_box(self) -> str:
        return " ".join(f"{number:.0f}" for number in self.box.padded(EDGE).bounds)


def pieces(figure: Figure) -> list[Piece]:
    """Return the columns of axes of a drawn figure, and the legends beside or across them; none if it is one column."""
    to_points = Affine2D().scale(1, -1).translate(0, figure.bbox.height).scale(72 / figure.dpi)

    def piece_of(part: Artist, box: Bbox, frame: Bbox) -> Piece:
        (x0, y1, x1, y0), (*corners,) = (to_points.transform_bbox(bounds).extents for bounds in (box, frame))
        return Piece(Bbox.from_extents(*corners), Bbox.from_extents(x0, y0, x1, y1), [part.get_gid()])

    legends = {legend: legend for legend in figure.legends}  # by legend, the artist that draws it: itself or its axes
    legends |= {axes.get_legend(): axes for axes in figure.axes if axes.get_legend()}
    columns: list[Piece] = []
    for axes in figure.axes:
        others = [artist for artist in axes.get_default_bbox_extra_artists() if artist not in legends]
        piece = piece_of(axes, axes.get_tightbbox(bbox_extra_artists=others), axes.bbox)
        columns = _merged_columns(piece, columns, NARROW if piece.box.width < NARROW else 0)
    top, above, beside = min((column.box.y0 for column in columns), default=0), [], []
    for legend, part in legends.items():
        piece = piece_of(part, legend.get_tightbbox(), legend.get_tightbbox())
        if sum(_is_near(piece, column) for column in columns) == 1:
            columns = _merged_columns(piece, columns)
        else:
            (above if piece.box.y1 < top + EDGE else beside).append(piece)
    ordered = [*above, *sorted(columns, key=lambda column: column.frame.x0), *beside]
    return ordered if len(ordered) > 1 else []


def _merged_columns(piece: Piece, columns: list[Piece], distance: float = 0) -> list[Piece]:
    """Return columns with a further piece; columns above, below or near it become one column with it."""
    near = [column for column in columns if _is_near(piece, column, distance)]
    frames, boxes, parts = zip(*near, piece, strict=True)
    joined = Piece(Bbox.union(frames), Bbox.union(boxes), list(dict.fromkeys(chain.from_iterable(parts))))
    return [*(column for column in columns if column not in near), joined]


def _is_near(one: Piece, other: Piece, distance: float = 0) -> bool:
    return one.frame.x0 < other.frame.x1 + distance and other.frame.x0 < one.frame.x1 + distance


def _inline(drawing: Drawing, place: str) -> Markup:
    """Return a figure as inline SVG with hover texts on its points, and with ids that are unique on its page."""
    width, height = 72 * drawing.figure.get_size_inches()
    box = f'viewBox="0 0 {width:g} {height:g}"'
    _, figure, drawn = drawing.svg.decode().partition('<g id="figure_1">')
    titled = re.sub(rf'<g id="{HOVER}(.*?)">(.*?)</g>', _titled, drawn, flags=re.DOTALL)
    brief = re.sub(r"<!--.*?-->|\n *|(?<=\d\d\.\d\d)\d+", "", figure + titled)  # coordinates to a hundredth of a point
    named = re.sub(NAMED, rf"\g<0>{place}-", brief)
    return Markup(f'<svg role="img" aria-labelledby="{place}-caption" {box}>{named}')


def _titled(line: re.Match) -> str:
    """Add the hover texts in a line's id to the line's points."""
    titles = (f"><title>{text}</title></use>" for text in line[1].split(BETWEEN))
    return "<g>" + re.sub("(?<=<use )([^>]*)/>", lambda use: use[1] + next(titles), line[2]) + "</g>"


def _html(table: Table, place: str) -> dict:
    html = Markup(table.form("html"))  # tabulate has escaped the cells
    return {**table._asdict(), "place": place, "html": html}


def _summary(rows: list[dict]) -> str:
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows if "model" in row and "run" not in row)
    names = {place: place[0] if place[0].startswith(POCKET) else name for place, name in names.items()}
    runs = {(row["model"], row["run"], row["seed"]) for row in rows if "run" in row}
    subjects = [listed(list(names.values())) if len(names) <= MANY else f"{len(names)} models"] if names else []
    subjects += [f"{len(runs)} training run{'s' if len(runs) > 1 else ''}"] if runs else []
    if not subjects:
        return "Nothing was measured."
    embedded = any(name.startswith(POCKET) for name in names.values())
    return f"{'; '.join(subjects)}.{EMBEDDED * embedded}"


def provenance(rows: list[dict]) -> Table | None:
    """Return a table of settings, versions, devices and peak memory of some rows; None if the rows have none."""
    records = [[label, "; ".join(distinct(rows, field))] for label, field in PROVENANCE.items()]
    for label, field, unit, form in MOST:
        values = [row[field] for row in rows if field in row]
        records.append([label, form.format(max(values) / unit) if values else ""])
    records = [record for record in records if record[1]]
    return Table.of_words("provenance", "Provenance.", ["made with", ""], records) if records else None


def models(rows: list[dict]) -> Table | None:
    """Return a table of each model with hashes of its weights and of the tokens it read; None without hashes."""
    records: dict[tuple, list] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows if "model" in row)
    for row in rows:
        if "weights_hash" in row:
            name = names[row["model"], row.get("checkpoint")]
            revision, size = row.get("revision", MISSING), count_label(row["parameters"])
            fields = [name, revision, row["dtype"], size, row["weights_hash"]]
            record = records.setdefault((name, row["weights_hash"]), [*fields, {}])
            record[-1][row.get("tokens_hash", "")] = None
    cells = [[*record[:-1], " ".join(record[-1]).strip()] for record in records.values()]
    caption = "Models, with hashes of the weights as used and of the tokens read."
    return Table.of_words("models", caption, MODEL, cells) if cells else None
