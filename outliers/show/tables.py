"""Tables as people read them: cells, formats, and what a table says of its text and of the scatter of its numbers."""

import math
import re
import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import pandas as pd
from tabulate import MIN_PADDING, tabulate

from outliers.criterion import LOG_PERPLEXITY, PICTURES
from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.units import FEWEST
from outliers.show.value import Numbers, value_of
from outliers.show.words import listed, precision

ONCE = "Each perplexity was measured once; --draws 4 measures its scatter by rounding."
DRAWN = (
    "Mean ± standard deviation over {} draws, in which the embeddings are perturbed by 1e-6 and only rounding differs. "
    "A difference below two of its standard deviations is not significant."
)
MASKED = (
    "Mean ± standard deviation over {} choices of the masked tokens. All rows share these choices, so smaller "
    "differences can be real; --draws 4 without --mask-seeds measures the scatter by rounding."
)
OF_TEXT = "± is the standard error over the text ({})"
PAIRED = "± is the standard error over the text ({}) of the difference from the unquantized model, paired"
WITH_DRAWS = ", combined with the standard deviation over {} draws of {}"
SEVERAL = (
    "Means over {} seeds with 95 % intervals (Student's t). Ratios are taken seed by seed: runs of one seed share "
    "their initial weights and the order of their text."
)
ONE = "Each run was trained with one seed; the scatter over seeds is unknown."

# What a format takes as its own and tabulate leaves as it is: |x| would end two cells of Markdown, <s> strike text out.
ESCAPED = {"github": partial(re.sub, r"([|<])", r"\\\1")}
NUMBERS = Numbers()
MISSING, FAILED = "–", "failed"  # never numbers
NEGATIVE = re.compile(r"(?<![\w.])-(?=[\d.]|inf)")  # the hyphen of a number, and none between words or in an exponent
WIDTH, LONGEST = 80, 100  # columns of a terminal at least, and of a paragraph at most
GAP = 2  # blanks between columns
LEAST = 16  # characters of a column of text that is broken into lines
LARGE = 1e7  # from here on powers of ten are written

# The line above tables.
USUAL = "first-blocks"  # the protocol that goes without saying
MANY = 12  # a field with more values says none, such as what the sets of a plan leave exact
OTHERS = {  # further fields of the line, of rows without a text too
    "steps": "{} training steps",
    "limit": "{} examples per task",
    "prompt": "prompts of {} tokens",
    "context": "context {}",
    "headroom": "{} GiB of each GPU left free",
    "skip": "{} not quantized",
}

Form = str | Callable[[Mapping], str]  # of a column: a format of fields of a row, or what makes a cell of a row


class Table(NamedTuple):
    """A table as people read it.

    name: of its files. cells: row by row, as printed. data: the same unrounded, as its CSV file has it. names: which
    columns are text, so many from the left or those of these headers. folded: whether a page shows it only when asked
    to.
    """

    name: str
    caption: str
    headers: list[str]
    cells: list[list[str]]
    data: pd.DataFrame
    names: int | Collection[str] = 1
    folded: bool = False

    @classmethod
    def of(
        cls, name: str, caption: str, columns: Iterable[tuple[str, Form]], data: pd.DataFrame, rows=None, **options
    ) -> "Table":
        """A table of these columns, each with its header; rows: those to show, by default all of the data."""
        headers, forms = zip(*columns, strict=True)
        records = (data if rows is None else rows).to_dict("records")
        cells = [[_filled(form, row) if isinstance(form, str) else form(row) for form in forms] for row in records]
        return cls(name, caption, list(headers), cells, data, **options)

    @classmethod
    def of_words(cls, name: str, caption: str, headers: list[str], cells: list[list[str]]) -> "Table":
        """A table of nothing but text."""
        return cls(name, caption, headers, cells, pd.DataFrame(cells, columns=headers), names=len(headers))

    def form(self, tablefmt: str) -> str:
        """The table in a format of the tabulate library: github, latex_booktabs, simple, html."""
        escape = ESCAPED.get(tablefmt, str)
        columns = [column._replace(cells=[*map(escape, column.cells)]) for column in self._columns]
        text = _tabulated(columns, tablefmt)
        return text.replace("−", "$-$") if tablefmt.startswith("latex") else text

    @property
    def _columns(self) -> list["Column"]:
        text = self.headers[: self.names] if isinstance(self.names, int) else self.names
        columns = zip(self.headers, *self.cells, strict=True)
        sides = ["left" if header in text else "right" for header in self.headers]
        return [
            Column(side, [header, *(cells if side == "left" else (NEGATIVE.sub("−", cell) for cell in cells))])
            for side, (header, *cells) in zip(sides, columns, strict=True)
        ]

    @property
    def printed(self) -> str:
        """The table on a terminal, below its caption."""
        return f"{wrapped(self.caption)}\n\n{self.fitted}"

    @property
    def fitted(self) -> str:
        """The table within the columns of a terminal.

        Where it is too wide, headers are broken into lines, then text, and then the last columns follow below, each
        time behind the columns of text on the left.
        """
        width = terminal_width()
        columns = [*self._columns]
        if _width(columns) > width:
            columns = [_with_broken_header(column) for column in columns]
        rooms = {place: column.width for place, column in enumerate(columns) if column.side == "left"}
        for _ in range(_width(columns) - width):  # a character of the widest text at a time
            widest = max(rooms, key=rooms.get, default=None)
            if widest is not None and rooms[widest] > LEAST:
                rooms[widest] -= 1
        columns = [column.within(rooms.get(place, column.width)) for place, column in enumerate(columns)]
        return "\n\n".join(_tabulated(part, "simple") for part in _parts(columns, width))


class Column(NamedTuple):
    """A column of a table as text: the side on which its cells stand, and these, the header first."""

    side: str
    cells: list[str]

    @property
    def width(self) -> int:
        """The characters that it takes: its longest line, around a header with what tabulate leaves free there."""
        header, *lines = (max(map(len, cell.splitlines()), default=0) for cell in self.cells)
        return max([header + MIN_PADDING, *lines])

    def within(self, width: int) -> "Column":
        """The column with the text of its cells in lines of at most a width, the column as it is if it is no wider."""
        if self.width <= width:
            return self
        header, *cells = self.cells
        return self._replace(cells=[header, *(_in_lines(cell, width) for cell in cells)])


def _in_lines(text: str, width: int) -> str:
    """Break a text into lines of at most a width, behind spaces and the marks between the words of a path."""
    lines = [""]
    for piece in re.findall(r"[^ ._/+]*[ ._/+]|[^ ._/+]+", text):
        if len(lines[-1] + piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = lines[-1][:width], lines[-1][width:]
    return "\n".join(line.rstrip() for line in lines)


def _tabulated(columns: Sequence[Column], tablefmt: str) -> str:
    headers, *rows = map(list, zip(*(column.cells for column in columns), strict=True))
    sides = [column.side for column in columns]
    return tabulate(rows, headers, tablefmt=tablefmt, disable_numparse=True, colalign=sides)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


def _with_broken_header(column: Column) -> Column:
    """The column with its header in lines that are no longer than its cells or the header's longest word."""
    header, *cells = column.cells
    words = re.findall(r"[^ /-]*[/-]?", header)
    room = max(map(len, [*words, *cells]))
    lines = [""]
    for piece in re.findall(r"[^ /-]*[ /-]?", header):
        if len((lines[-1] + piece).rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return column._replace(cells=["\n".join(line.rstrip() for line in lines), *cells])


def _parts(columns: Sequence[Column], width: int) -> Iterable[Sequence[Column]]:
    """The columns in groups that fit a width, the text on the left in each."""
    names = [*takewhile(lambda column: column.side == "left", columns)]
    names, part = names if len(names) < len(columns) else [], []
    for column in columns[len(names) :]:
        if part and _width([*names, *part, column]) > width:
            yield [*names, *part]
            part = []
        part.append(column)
    yield [*names, *part]


def _filled(form: str, row: Mapping) -> str:
    fields = [field for _, field, *_ in NUMBERS.parse(form) if field]
    return MISSING if any(pd.isna(row[field]) for field in fields) else NUMBERS.format(form, **row)


def cell(form: str, value: float | None, bar: float | None = None, unit: float = 1) -> str:
    """A number in a cell, with its bar behind ±, where that is known and seen; its digits follow the bar. Numbers of
    broken models are short."""
    if pd.isna(value):
        return MISSING
    value, bar = unit * value, None if pd.isna(bar) else unit * bar
    if not bar or abs(value) >= LARGE:
        return f"{_number(form, value)}" + (f"±{_number(form.removeprefix('+'), bar)}" if bar else "")
    sign, usual, kind = form.partition(".")[0], int(form[:-1].partition(".")[2]), form[-1]
    if kind == "e":
        digits, ending = precision(bar / 10 ** _exponent(bar), 0)
        return f"{value:.{max(_exponent(value or bar) - _exponent(bar), 0) + digits}e}±{bar:.{digits}e}"
    digits, ending = precision(bar, usual if kind == "f" else math.inf)
    form = f"{sign}.{digits}f" if ending else form
    return f"{_number(form, value)}{ending and f'±{ending}'}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))


def measured_cell(form: str, row: Mapping) -> str:
    """The value of a row in a cell; FAILED where it failed; a perplexity that is larger than any number with its
    logarithm."""
    if "failed" in row:
        return FAILED
    if LOG_PERPLEXITY in row["metric"]:
        return f"> 1e{min(308, math.floor(row['value'] / math.log(10)))} ({cell('.2f', *value_of(row).shown)} nats)"
    return cell(form, *value_of(row).shown)


def failed_notes(rows: Iterable[Mapping]) -> list[str]:
    """Why rows failed, a footnote each reason."""
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        if "failed" in row:
            reasons[row["failed"]][_called(row)] = None
    return [f"{FAILED}: {'; '.join(called)}: {reason}" for reason, called in reasons.items()]


def _called(row: Mapping) -> str:
    """The cell of a row in a note."""
    return ", ".join([short_name(row["model"])] * ("model" in row) + [row["variant"], row["metric"]])


PLACES = ("model", "variant", "metric", "stack")
PARTS = ("stack", "role", "layer", "head", "checkpoint", "task", "batch")  # of which values of a cell may be


def values_table(rows: Sequence[Mapping], parts: Sequence[str] = PARTS) -> Table:
    """Values with their standard deviation where there were draws; those of which a cell has several are left out.

    parts: fields that tell values of a cell apart.
    """

    def place(row: Mapping) -> tuple:
        return tuple(row.get(name) for name in (*PLACES, *parts))

    counts = Counter(map(place, rows))
    few = [row for row in rows if counts[place(row)] == 1]
    cells = [
        [short_name(row.get("model", "")), row["variant"], _metric(row, parts), measured_cell(".6g", row)]
        for row in few
    ]
    places = PLACES if any("stack" in row for row in few) else PLACES[:-1]
    data = pd.DataFrame(few).reindex(columns=[*places, "value", "standard_deviation", "unit"])
    caption = "Values by model, variant and metric."
    if any("failed" in row for row in few):
        caption += " Notes say why cells failed."
    return Table("measured", caption, ["model", "variant", "metric", "value"], cells, data, names=3)


def _metric(row: Mapping, parts: Sequence[str]) -> str:
    """The metric of a row, with the part of the model that it is of."""
    known = [str(row[name]) for name in parts if name in row]
    return f"{row['metric']} ({', '.join(known)})" if known else row["metric"]


def scattered(name: str, form: str, unit: float = 1) -> Callable[[Mapping], str]:
    """A column of values NAME, with the bar of NAME_deviation and NAME_error."""
    return lambda row: cell(form, *value_of(row, name).shown, unit)


def _number(form: str, value: float) -> str:
    return f"{value:{form.replace('f', 'e') if math.isfinite(value) and abs(value) >= LARGE else form}}"


def with_interval(form: Callable[[float], str], value: float, *ends: float) -> str:
    """A number with its interval behind it, where that is known: 9.9 [9.5, 10.3]."""
    return form(value) + (f" [{', '.join(map(form, ends))}]" if ends else "")


def terminal_width() -> int:
    """The columns of the terminal; 80 where there is none, or a narrower one."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def wrapped(text: str, **options: str) -> str:
    """A paragraph as a terminal has it; options: of `textwrap.fill`."""
    return textwrap.fill(text, min(LONGEST, terminal_width()), **options)


def scatter_note(rows: list[dict]) -> str:
    """The note on ± in a table of perplexities: the text, and rounding or masks, as far as the rows know them."""
    draws, seeds = (max(row.get(name, 1) for row in rows) for name in ("draws", "mask_seeds"))
    of_text = [row for row in rows if "standard_error" in row]
    if not of_text:
        return MASKED.format(seeds) if seeds > 1 else DRAWN.format(draws) if draws > 1 else ONCE
    paired = any("paired_error" in row for row in of_text)
    units = min(len(row["unit_sums"]) for row in of_text)
    note = (PAIRED if paired else OF_TEXT).format(f"{units} {_units(of_text[0])}")
    if max(draws, seeds) > 1:
        note += WITH_DRAWS.format(max(draws, seeds), "the masks" if seeds > 1 else "rounding")
    alone = {row["model"]: row for row in of_text if paired and row.get("variant") == BASELINE}
    itself = [cell(".2f", row["value"], row["standard_error"]) for row in alone.values()]
    sentences = [
        f"{note}.",
        f"The perplexity without quantization is itself {listed(itself)} over the text." if itself else "",
        f"A claim needs {FEWEST} {_units(of_text[0])}." if units < FEWEST else "",
        ONCE if draws == seeds == 1 else "",
    ]
    return " ".join(filter(None, sentences))


def _units(row: Mapping) -> str:
    """The units of the text of a row."""
    protocol = row.get("protocol", "")
    return "documents" if protocol.endswith("documents") else "pictures" if protocol == PICTURES else "blocks"


def seeds_note(trained: pd.DataFrame) -> str:
    """The note on the seeds of a table of trained models."""
    seeds = trained.groupby("run")["seed"].nunique()
    most = int(seeds.max())
    return SEVERAL.format(most if seeds.min() == most else f"up to {most}") if most > 1 else ONE


def measured_on(rows: Sequence[Mapping]) -> str:
    """Name the text, the blocks and their tokens that rows were measured on; nothing where no row has any."""
    others = {form: distinct(rows, field) for field, form in OTHERS.items()}
    parts = [form.format(listed(values)) for form, values in others.items() if 0 < len(values) <= MANY]
    line = ", ".join([*_texts(rows), *parts])
    return line[:1].upper() + line[1:]


def _texts(rows: Iterable[Mapping]) -> list[str]:
    """Each text that rows were measured on, with the parts of it."""
    parts: dict[tuple, dict] = {}
    for row in rows:
        if "blocks" in row:
            text = row.get("text", "?"), row.get("protocol", USUAL), row.get("block")
            parts.setdefault(text, {})[row.get("first_block", 0), row["blocks"]] = None
    if len(parts) > MANY:
        return []
    return [_text(*text, sorted(spans)) for text, spans in parts.items()]


def _text(text: str, protocol: str, block: int | None, spans: list[tuple[int, int]]) -> str:
    if protocol == PICTURES:
        return f"text {text}, {listed(count for _, count in spans)} pictures"
    whole = all(first == 0 for first, _ in spans)
    counts = (f"{count:,}" if whole else f"{first + 1} to {first + count}" for first, count in spans)
    many = "blocks" if spans != [(0, 1)] else "block"
    blocks = f"{listed(counts)} {many}" if whole else f"{many} {listed(counts)}"
    cut = "" if protocol == USUAL else f" ({protocol})"
    return f"text {text}{cut}, {blocks} of {block:,} tokens"


def distinct(rows: Iterable[Mapping], field: str) -> list[str]:
    """The values that rows have of a field, as text, each once."""
    values = (row[field] for row in rows if row.get(field) is not None)
    once = dict.fromkeys(", ".join(map(str, value)) if isinstance(value, list) else value for value in values)
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in once]
