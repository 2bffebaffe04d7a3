"""Sections of a run: tables and figures with their words, before they become files, a page or lines on a terminal."""

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.style import house_style
from outliers.show.tables import Table, failed_notes, measured_cell, measured_on, values_table, wrapped
from outliers.show.value import grouped, has_no_number

if TYPE_CHECKING:
    from outliers.show.explorer import Explorer


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption and the name of its files."""

    name: str
    caption: str
    figure: Figure

    @classmethod
    def of(cls, name: str, caption: str, axes: Axes | np.ndarray) -> "Drawing":
        """Wrap the figure of axes from a function of `outliers.plot`; close it in pyplot, which would show it again."""
        figure = np.ravel(axes)[0].figure
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close(figure)
        return cls(name, caption, figure)

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG, drawn once for its file and for the page."""
        return figure_bytes(self.figure, "svg")


PART = "part_"  # what the ids of a figure's axes and legends in an SVG begin with


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a PNG or SVG file, identical for identical figures."""
    buffer, usual, dpi = io.BytesIO(), figure.canvas, figure.dpi
    for number, part in enumerate([*figure.axes, *figure.legends]):
        part.set_gid(f"{PART}{number}")
    canvas = (FigureCanvasSVG if kind == "svg" else FigureCanvasAgg)(figure)
    figure.dpi = 200
    with house_style():  # by the canvas: savefig draws a figure that has a layout twice
        getattr(canvas, f"print_{kind}")(buffer, metadata={"Date": None} if kind == "svg" else None)
    figure.dpi = dpi
    figure.set_canvas(usual)
    figure.set_layout_engine("none")  # the next format keeps this layout
    return buffer.getvalue()


class Context(NamedTuple):
    """The context of rows that a view may need.

    experiment: what was run. folder: where it keeps its rows and other files. rows: all rows, also those without a
    comparable number, which a view does not get.
    """

    experiment: Any = None
    folder: Path = Path()
    rows: Sequence[dict] = ()


NO_CONTEXT = Context()
View = Callable[[list[dict], Context], "Section"]
FINDINGS = 6  # at most, in a section and at the top of a page


class Finding(NamedTuple):
    """A sentence that the rows support beyond their scatter.

    at: the table or drawing that shows it. feature: the number of the feature that it is about, if any. of_every:
    whether it is about every cell, so that it is unknown if one has no comparable number.
    """

    text: str
    at: str
    feature: int | None = None
    of_every: bool = False


class Section(NamedTuple):
    """The tables, figures and words of one measurement.

    notes: paragraphs of the page. further: tables that only become files, by name. findings: the most telling first, at
    most `FINDINGS`. files: further texts, by file name. printed: text of a terminal below the findings, by default
    tables and notes.
    """

    title: str
    rows: list[dict]
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    notes: Sequence[str] = ()
    further: Mapping[str, pd.DataFrame] = MappingProxyType({})
    findings: Sequence[Finding] = ()
    explorers: "Sequence[Explorer]" = ()
    files: Mapping[str, str] = MappingProxyType({})
    printed: str | None = None

    @property
    def terminal(self) -> str:
        findings = (
            wrapped(f"• {finding.text}", subsequent_indent="  ", break_on_hyphens=False) for finding in self.findings
        )
        return "\n\n".join(filter(None, ["\n".join(findings), measured_on(self.rows), self.text]))

    @property
    def text(self) -> str:
        """What a terminal shows below the findings."""
        return printed(self.tables, self.notes) if self.printed is None else self.printed


def section_of(view: View, rows: list[dict], context: Context) -> Section:
    """Make a view's section from the rows with comparable numbers, with the other cells in its tables and footnotes.

    Findings about every cell are left out if one has no comparable number. If no variant is left to compare, the
    section lists values.
    """
    left = left_to_compare(rows)
    section = view(left, context._replace(rows=rows)) if left else values_section(rows)
    tables, text = [], section.printed
    for table in section.tables:
        tables.append(table.with_failed(rows))
        text = text and text.replace(table.printed, tables[-1].printed)
    shown = {cell for table in tables for line in table.cells for cell in line}
    lost = (row for row in rows if has_no_number(row) and ("failed" in row or measured_cell("", row) not in shown))
    notes = failed_notes(lost, rows)
    whole = not any(map(has_no_number, rows))
    return section._replace(
        rows=rows,
        printed=text and "\n\n".join([text, *map(wrapped, notes)]),
        tables=tables,
        notes=[*section.notes, *notes],
        findings=[finding for finding in section.findings if whole or not finding.of_every],
    )


def left_to_compare(rows: list[dict]) -> list[dict]:
    """Return the rows with comparable numbers; none if all others were to be compared with them."""
    left = [row for row in rows if not has_no_number(row)]
    variants, of_left = ({row.get("variant", BASELINE) for row in group} for group in (rows, left))
    return [] if of_left <= {BASELINE} < variants else left


def values_section(rows: list[dict]) -> Section:
    """List the values of rows, for views that compare each row with all others if one of them has no number."""
    table = values_table(rows, ["stack"])
    return Section("Measurements", rows, tables=[table])


def printed(tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """Return the text of tables that are not folded, with their captions, and of notes below them."""
    shown = (part for table in tables for part in table.parts if not part.folded)
    return "\n\n".join([*(table.printed for table in shown), *map(wrapped, notes)])


def subject_of(row: Mapping) -> str:
    """Return the name of a row's model, and its variant unless that is the unquantized model."""
    variant = row.get("variant", BASELINE)
    return short_name(row["model"]) + ("" if variant == BASELINE else f" under {variant}")


def of_subjects(rows: Iterable[dict], section: Callable[[list[dict], str], Section]) -> list[Section]:
    """Make one section for each model under each variant.

    section: a function of the group's rows and a suffix for the names of its files ("" for the first group).
    """
    groups = grouped(rows, lambda row: (row["model"], row.get("variant", BASELINE))).values()
    return [section(group, f"_{number}" if number > 1 else "") for number, group in enumerate(groups, 1)]


STACKS = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Cross-attention"}  # names of stacks in sentences


def by_stack(rows: list[dict], field: str, section: Callable[[str, list[dict]], Section]) -> Section:
    """Make one section per stack of a model (encoder, decoder, cross-attention) and join them into one of all rows.

    field: the rows' field that names the stack. section: makes the section of a stack, given its name ("" if there is
    only one) and its rows.
    """
    stacks = list(dict.fromkeys(row[field] for row in rows if field in row)) or [""]
    of_each = [[row for row in rows if {row.get("stack", name), row.get("ablated", name)} == {name}] for name in stacks]
    sections = list(map(section, stacks, of_each))
    if len(stacks) == 1:
        return sections[0]
    named = [_of_stack(*pair, FINDINGS // len(stacks)) for pair in zip(sections, stacks, strict=True)]
    return together(named[0].title, named)._replace(rows=rows)


def _of_stack(section: Section, stack: str, findings: int) -> Section:
    """Name the stack in a section's tables, drawings and notes and in its first findings; drop the other findings."""

    def label(text: str) -> str:
        return f"{STACKS[stack]}: {text}"

    return section._replace(
        printed=f"{STACKS[stack]}\n\n{section.text}",
        tables=[table._replace(name=f"{table.name}_{stack}", caption=label(table.caption)) for table in section.tables],
        drawings=[
            Drawing(f"{drawing.name}_{stack}", label(drawing.caption), drawing.figure) for drawing in section.drawings
        ],
        notes=list(map(label, section.notes)),
        further={f"{name}_{stack}": table for name, table in section.further.items()},
        findings=[
            finding._replace(text=label(finding.text), at=f"{finding.at}_{stack}")
            for finding in section.findings[:findings]
        ],
        explorers=[explorer._replace(instead=f"{explorer.instead}_{stack}") for explorer in section.explorers],
    )


JOINED = ("tables", "drawings", "notes", "findings", "explorers")


def together(title: str, sections: Sequence[Section]) -> Section:
    """Join sections into one with the rows of the first; return a single one unchanged."""
    if len(sections) == 1:
        return sections[0]
    lists = {name: [entry for section in sections for entry in getattr(section, name)] for name in JOINED}
    further = {name: frame for section in sections for name, frame in section.further.items()}
    text = "\n\n".join(filter(None, (section.text for section in sections)))
    return Section(title, sections[0].rows, further=further, printed=text, **lists)
