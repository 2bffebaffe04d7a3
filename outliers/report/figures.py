"""Figures as bytes and files."""

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from outliers.files import write_whole


def write_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as `stem`.png and `stem`.svg."""
    for kind in ("png", "svg"):
        write_whole(stem.with_name(f"{stem.name}.{kind}"), drawn(figure, kind))


def drawn(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a PNG or SVG file, the same for the same figure."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "outliers"}):
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
