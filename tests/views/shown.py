"""What a section shows, as text: its words, its tables, and of each figure what is drawn where."""

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.show.section import Section
from outliers.show.style import GREY


def shown(section: Section) -> str:
    """What a terminal shows of a section, and what a page shows beyond that."""
    parts = [f"# {section.title}", section.terminal]
    words = " ".join(section.terminal.split())
    for table in section.tables:
        if table.printed not in section.terminal:
            parts.append(f"## {table.name}: {table.caption}\n{table.form('github')}")
    parts += [f"note: {note}" for note in section.notes if " ".join(note.split()) not in words]
    parts += [f"## {name}.csv: {', '.join(frame)}" for name, frame in section.further.items()]
    parts += [f"## {one.name}: {one.caption}\n{shown_figure(one.figure)}" for one in section.drawings]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def shown_figure(figure: Figure) -> str:
    """A line for each axis, series of points and legend."""
    legends = [_legend(legend) for legend in figure.legends]
    return "\n".join([line for axes in figure.axes for line in _axes(axes)] + legends)


def _axes(axes: Axes) -> Iterator[str]:
    yield _line(f"panel {axes.get_title()} {axes.get_title('left')}")
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        labels = axis.get_ticklabels()
        ticks = [one.get_text() for one in labels if low <= one.get_position()[name == "y"] <= high]
        ticks = [text for text in ticks if any(map(str.isalpha, text))]
        way = [axis.get_scale(), *["reversed"] * bool(axis.get_inverted())]
        yield f"  {name}: {' | '.join([', '.join([_line(axis.label.get_text()), *way]), *ticks])}"
    in_bars = {id(line) for container in axes.containers for line in _lines(container)}
    for container in axes.containers:
        drawn = _lines(container)
        if drawn:
            bars = [segment[:, 1] for bar in container[2] for segment in bar.get_segments()]
            yield _series(container.get_label(), drawn[0], bars)
        elif hasattr(container, "patches"):
            yield f"  bars {container.get_label()}: {' '.join(f'{bar.get_height():.4g}' for bar in container.patches)}"
    for line in axes.lines:
        is_series = line.get_marker() != "None" or line.get_label()[0] != "_" or len(line.get_xdata()) > 2
        if is_series and id(line) not in in_bars and len(line.get_xdata()):
            yield _series(line.get_label(), line, [])
    yield from (f"  says {text.get_text()!r}" for text in axes.texts if text.get_text())
    if axes.get_legend():
        yield _legend(axes.get_legend())


def _lines(container) -> list:
    return [container.lines[0], *container.lines[1]] if hasattr(container, "lines") and container.lines[0] else []


def _series(label: str, line, bars: list) -> str:
    marker = line.get_marker() if line.get_marker() != "None" else "line"
    look = "grey " * (line.get_color() == GREY) + "hollow " * (line.get_fillstyle() == "none") + marker
    points = " ".join(f"({x:.4g}, {y:.4g})" for x, y in np.column_stack(line.get_data()).astype(float))
    ends = f"; from {' '.join(f'{low:.4g} to {high:.4g}' for low, high in bars)}" if bars else ""
    return f"  {_line(label) * (label[0] != '_')} [{look}]: {points}{ends}"


def _legend(legend) -> str:
    return f"  legend: {' | '.join(_line(text.get_text()) for text in legend.get_texts())}"


def _line(text: str) -> str:
    return " ".join(text.split())
