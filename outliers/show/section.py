"""Sections of a run: tables and figures with their words, before they become files, a page or lines on a terminal."""

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.explorer import Explorer
from outliers.show.style import look
from outliers.show.tables import Table, failed_notes, measured_on, values_table, wrapped
from outliers.show.value import grouped, is_beyond


@dataclass(frozen=True)
class Drawing:
    """A figure with the name of its files and its caption."""

    name: str
    caption: str
    figure: Figure

    @classmethod
    def of(cls, name: str, caption: str, axes: Axes | np.ndarray) -> "Drawing":
        """The figure of the axes that a function of `outliers.plot` returned; pyplot does not show it once more."""
        figure = np.ravel(axes)[0].figure
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close(figure)
        return cls(name, caption, figure)

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG, drawn once for its file and for the page."""
        return drawn(self.figure, "svg")


def drawn(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a PNG or SVG file, the same for the same figure."""
    buffer = io.BytesIO()
    with look():
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


View = Callable[..., "Section"]
FINDINGS = 6  # of a section at most, and at the top of a page


class Finding(NamedTuple):
    """A sentence that the rows support beyond their scatter; at: the name of the table or drawing that it is from;
    feature: that it is about, if about one."""

    text: str
    at: str
    feature: int | None = None


class Section(NamedTuple):
    """The tables, figures and words of one measurement.

    printed: on a terminal, below the findings. notes: paragraphs of the page. further: tables for files alone, by name.
    findings: the most telling first, at most `FINDINGS`. files: further texts, by the names of their files.
    """

    title: str
    rows: list[dict]
    printed: str = ""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    notes: Sequence[str] = ()
    further: Mapping[str, pd.DataFrame] = MappingProxyType({})
    findings: Sequence[Finding] = ()
    explorers: Sequence[Explorer] = ()
    files: Mapping[str, str] = MappingProxyType({})

    @property
    def terminal(self) -> str:
        """All of it on a terminal: findings, what they were measured on, and what stands below."""
        findings = (
            wrapped(f"• {finding.text}", subsequent_indent="  ", break_on_hyphens=False) for finding in self.findings
        )
        return "\n\n".join(filter(None, ["\n".join(findings), measured_on(self.rows), self.printed]))


class Failures(Enum):
    """A view where some rows have no number, because they failed or are beyond any number.

    By default it is made of the others, without findings, for these compare what is there. SHOWN: it takes them too,
    and its tables show them. APART: its findings hold without them. LOST: it compares each with all others, so that
    values are listed in its place.
    """

    SHOWN, APART, LOST = range(3)


def failures(become: Failures) -> Callable[[View], View]:
    """Mark a view with what becomes of it where rows failed."""

    def said(view: View) -> View:
        view.failures = become
        return view

    return said


def section_of(view: View, *arguments: Any) -> Section:
    """The section that a view makes of rows, the last argument; below it why some failed."""
    section, notes = part_of(view, *arguments), failed_notes(arguments[-1])
    below = "\n\n".join(filter(None, [section.printed, printed([], notes)]))
    return section._replace(printed=below, notes=[*section.notes, *notes])


def part_of(view: View, *arguments: Any) -> Section:
    """The same without the reasons, which a section has once."""
    *others, rows = arguments
    become, finished = getattr(view, "failures", None), [row for row in rows if not is_beyond(row)]
    if become is Failures.SHOWN or len(finished) == len(rows):
        return view(*others, rows)
    variants, left = ({row.get("variant", BASELINE) for row in group} for group in (rows, finished))
    if become is Failures.LOST or not left or left <= {BASELINE} < variants:  # none of what is compared
        table = values_table(rows, ["stack"])
        return Section("Measurements", rows, table.printed, [table])
    section, table = view(*others, finished), values_table(list(filter(is_beyond, rows)))
    below = "\n\n".join(filter(None, [section.printed, table.printed]))
    findings = section.findings if become is Failures.APART else ()
    return section._replace(rows=rows, printed=below, tables=[*section.tables, table], findings=findings)


def printed(tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """Tables on a terminal but for folded ones, with their captions, and notes below them."""
    return "\n\n".join([*(table.printed for table in tables if not table.folded), *map(wrapped, notes)])


def subject_of(row: Mapping) -> str:
    """The model of a row, and what it is under."""
    variant = row.get("variant", BASELINE)
    return short_name(row["model"]) + ("" if variant == BASELINE else f" under {variant}")


def of_subjects(rows: Iterable[dict], section: Callable[[list[dict], str], Section]) -> list[Section]:
    """The section of each model under each variant, made of its rows and an ending for the names of its files."""
    groups = grouped(rows, lambda row: (row["model"], row.get("variant", BASELINE))).values()
    return [section(group, f"_{number}" if number > 1 else "") for number, group in enumerate(groups, 1)]


STACKS = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Cross-attention"}  # views of a model in sentences


def by_stack(rows: list[dict], field: str, section: Callable[[str, list[dict]], Section]) -> Section:
    """The sections of the views of a model as one, of all rows; what is in them says of which it is.

    field: of rows, the names of the views. section: makes that of a view, of its name ("" of the only one) and rows.
    """
    stacks = list(dict.fromkeys(row[field] for row in rows if field in row)) or [""]
    of_each = [[row for row in rows if {row.get("stack", one), row.get("ablated", one)} == {one}] for one in stacks]
    sections = list(map(section, stacks, of_each))
    if len(stacks) == 1:
        return sections[0]
    named = [_of_stack(*pair, FINDINGS // len(stacks)) for pair in zip(sections, stacks, strict=True)]
    return together(named[0].title, named)._replace(rows=rows)


def _of_stack(section: Section, stack: str, findings: int) -> Section:
    """A section whose tables, drawings, notes and first findings name a view."""

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
    """Several sections as one, of the rows of the first; the only one as it is."""
    if len(sections) == 1:
        return sections[0]
    lists = {name: [entry for section in sections for entry in getattr(section, name)] for name in JOINED}
    further = {name: frame for section in sections for name, frame in section.further.items()}
    printed = "\n\n".join(filter(None, (section.printed for section in sections)))
    return Section(title, sections[0].rows, printed, further=further, **lists)
