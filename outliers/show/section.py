"""Sections of a run: tables and figures with their words, before they become files, a page or lines on a terminal."""

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.style import house_style
from outliers.show.tables import Table, failed_notes, measured_on, values_table, wrapped
from outliers.show.value import grouped, is_beyond

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
    buffer = io.BytesIO()
    for number, part in enumerate([*figure.axes, *figure.legends]):
        part.set_gid(f"{PART}{number}")
    with house_style():
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    figure.set_layout_engine("none")  # the next format keeps this layout
    return buffer.getvalue()


class Context(NamedTuple):
    """The context of rows that a view may need.

    experiment: what was run. folder: where it keeps its rows and other files.
    """

    experiment: Any
    folder: Path


View = Callable[[list[dict], Context], "Section"]
FINDINGS = 6  # at most, in a section and at the top of a page


class Finding(NamedTuple):
    """A sentence that the rows support beyond their scatter.

    at: the table or drawing that shows it. feature: the number of the feature that it is about, if any.
    """

    text: str
    at: str
    feature: int | None = None


class Section(NamedTuple):
    """The tables, figures and words of one measurement.

    printed: shown on a terminal below the findings. notes: paragraphs of the page. further: tables that only become
    files, by name. findings: the most telling first, at most `FINDINGS`. files: further texts, by file name.
    """

    title: str
    rows: list[dict]
    printed: str = ""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    notes: Sequence[str] = ()
    further: Mapping[str, pd.DataFrame] = MappingProxyType({})
    findings: Sequence[Finding] = ()
    explorers: "Sequence[Explorer]" = ()
    files: Mapping[str, str] = MappingProxyType({})

    @property
    def terminal(self) -> str:
        findings = (
            wrapped(f"• {finding.text}", subsequent_indent="  ", break_on_hyphens=False) for finding in self.findings
        )
        return "\n\n".join(filter(None, ["\n".join(findings), measured_on(self.rows), self.printed]))


class Failures(Enum):
    """How a view handles rows without a comparable number: they failed, or their value is larger than any number.

    By default the view is made of the other rows, without findings, because findings compare the rows that are there.
    SHOWN: the view takes such rows and shows them in its tables. APART: its findings hold without them. LOST: the view
    compares each row with all others, so a list of values takes its place.
    """

    SHOWN, APART, LOST = range(3)


def failures(become: Failures) -> Callable[[View], View]:
    """Mark a view with how it handles failed rows."""

    def mark(view: View) -> View:
        view.failures = become
        return view

    return mark


def section_of(view: View, rows: list[dict], context: Context) -> Section:
    """Make a view's section from rows, with footnotes on failures, and a table of the rows that its tables lack."""
    section, unseen = part_of(view, rows, context)
    tables, notes = [values_table(unseen)] if unseen else [], failed_notes(rows)
    below = "\n\n".join(filter(None, [section.printed, printed(tables, notes)]))
    return section._replace(printed=below, tables=[*section.tables, *tables], notes=[*section.notes, *notes])


def part_of(view: View, rows: list[dict], context: Context) -> tuple[Section, list[dict]]:
    """Make a view's section from rows without footnotes on failures; return it and the rows that its tables lack."""
    become, finished = getattr(view, "failures", None), [row for row in rows if not is_beyond(row)]
    if become is Failures.SHOWN or len(finished) == len(rows):
        return view(rows, context), []
    variants, left = ({row.get("variant", BASELINE) for row in group} for group in (rows, finished))
    if become is Failures.LOST or not left or left <= {BASELINE} < variants:  # nothing is left to compare
        table = values_table(rows, ["stack"])
        return Section("Measurements", rows, table.printed, [table]), []
    section, failed = view(finished, context), [row for row in rows if "failed" in row]
    tables, text, shown = [], section.printed, []
    for table in section.tables:
        whole, more = table.with_failed(failed)
        text = text.replace(table.printed, whole.printed)
        tables.append(whole)
        shown += more
    findings = section.findings if become is Failures.APART else ()
    unseen = [row for row in rows if is_beyond(row) and row not in shown]
    return section._replace(rows=rows, printed=text, tables=tables, findings=findings), unseen


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
        printed=f"{STACKS[stack]}\n\n{section.printed}",
        tables=[table._replace(name=f"{table.name}_{stack}", caption=label(table.caption)) for table in section.tables],
        drawings=[
            Drawing(f"{drawing.name}_{stack}", label(drawing.caption), drawing.figure) for drawing in section.drawings
        ],
        notes=list(map(label, section.notes)),
        further={f"{name}_{stack}": table for name, table in section.further.items()},
        findings=[Finding(label(finding.text), f"{finding.at}_{stack}") for finding in section.findings[:findings]],
        explorers=[explorer._replace(instead=f"{explorer.instead}_{stack}") for explorer in section.explorers],
    )


JOINED = ("tables", "drawings", "notes", "findings", "explorers")


def together(title: str, sections: Sequence[Section]) -> Section:
    """Join sections into one with the rows of the first; return a single one unchanged."""
    if len(sections) == 1:
        return sections[0]
    lists = {name: [entry for section in sections for entry in getattr(section, name)] for name in JOINED}
    further = {name: frame for section in sections for name, frame in section.further.items()}
    printed = "\n\n".join(filter(None, (section.printed for section in sections)))
    return Section(title, sections[0].rows, printed, further=further, **lists)
