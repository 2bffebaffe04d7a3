"""Tables as people read them: cells, formats, and the captions' notes on the text and the scatter of the numbers."""

import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import pandas as pd
from tabulate import MIN_PADDING, tabulate

from outliers.criterion import LOG_PERPLEXITY, PICTURES
from outliers.models.names import distinct_names, short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.units import FEWEST
from outliers.show.value import Numbers, grouped, value_of
from outliers.show.words import listed, precision, span

ONCE = "Each perplexity was measured once; --draws 4 measures its scatter by rounding."
DRAWN = (
    "Mean ± standard deviation over {} draws, in which the embeddings are perturbed by 1e-6 and only rounding differs. "
    "A difference below two of its standard deviations is not significant."
)
MASKED = (
    "Mean ± standard deviation over {} choices of the masked tokens. All rows share these choices, so smaller "
    "differences can be real; --draws 4 without --mask-seeds measures the scatter by rounding."
)
OVER_TEXT = "±: standard error over the text of the difference from the unmodified model, paired"
OF_TEXT = "± is the standard error over the text ({})"
PAIRED = "± is the standard error over the text ({}) of the difference from the unquantized model, paired"
WITH_DRAWS = ", combined with the standard deviation over {} draws of {}"
SEVERAL = (
    "Means over {} seeds with 95 % intervals (Student's t). Ratios are taken seed by seed: runs of one seed share "
    "their initial weights and the order of their text."
)
ONE = "Each run was trained with one seed; the scatter over seeds is unknown."

# Special characters that tabulate leaves unescaped: |x| would end two cells of Markdown, <s> strike out text.
ESCAPED = {"github": partial(re.sub, r"([|<])", r"\\\1")}
NUMBERS = Numbers()
MISSING, FAILED = "–", "failed"  # in the place of a number
NEGATIVE = re.compile(r"(?<![\w.])-(?=[\d.]|inf)")  # the minus of a number, no hyphen in words or exponents
ZERO = re.compile(r"(?<![\w.])-(?=0(?:\.0*)?(?![\d.]))")  # the minus of a number that is written as 0
WIDTH, LONGEST = 80, 100  # fewest columns of a terminal, most of a paragraph
GAP = 2  # blanks between columns
LEAST = 16  # characters that a broken column of text keeps
LARGE = 1e7  # larger numbers are written with powers of ten

# Parts of the line above tables, see measured_on.
USUAL = "first-blocks"  # the default protocol, which the line omits
MANY = 12  # a field with more distinct values is left out
OTHERS = {  # further fields of the line, also for rows without a text
    "steps": "{} training steps",
    "limit": "{} examples per task",
    "prompt": "prompts of {} tokens",
    "context": "context {}",
    "headroom": "{} GiB of each GPU left free",
    "skip": "{} not quantized",
}
MOST = {"skip": 1}  # distinct values of a field, if not MANY: several skips are sets of a plan, not a setting

# Headers of columns that name what a line is about: the field of rows.
SUBJECT = {name: name for name in ("model", "variant", "metric", "task", "batch")} | {"weights": "variant"}

METRICS = {"ppl": "perplexity", "top-1": "top1_softmax"}  # short names in headers: the metric

Form = str | Callable[[Mapping], str]  # of a column: format string over a row's fields, or function from row to cell


class Table(NamedTuple):
    """A table as people read it.

    name: the stem of its files. cells: rows of printed text. data: the unrounded values, as the CSV file has them.
    texts: the columns that are text, as a number of columns from the left or a collection of headers. folded: whether a
    page shows the table only on a click. apart: headers of columns that a page folds behind the others, and a terminal
    leaves out; apart_caption: caption of the table of these columns. baseline: what a column of variants calls the
    unquantized model.
    """

    name: str
    caption: str
    headers: list[str]
    cells: list[list[str]]
    data: pd.DataFrame
    texts: int | Collection[str] = 1
    folded: bool = False
    apart: Collection[str] = ()
    apart_caption: str = ""
    baseline: str = BASELINE

    @classmethod
    def of(
        cls, name: str, caption: str, columns: Iterable[tuple[str, Form]], data: pd.DataFrame, rows=None, **options
    ) -> "Table":
        """Make a table of columns: headers, each with a format string over a row's fields or a function of a row.

        rows: the rows to show; by default all of the data.
        """
        headers, forms = zip(*columns, strict=True)
        records = (data if rows is None else rows).to_dict("records")
        cells = [[_filled(form, row) if isinstance(form, str) else form(row) for form in forms] for row in records]
        return cls(name, caption, list(headers), cells, data, **options)

    @classmethod
    def of_words(cls, name: str, caption: str, headers: list[str], cells: list[list[str]]) -> "Table":
        return cls(name, caption, headers, cells, pd.DataFrame(cells, columns=headers), texts=len(headers))

    def form(self, tablefmt: str) -> str:
        """Render the table in a format of the tabulate library: github, latex_booktabs, simple, html."""
        escape = ESCAPED.get(tablefmt, str)
        columns = [column._replace(cells=[*map(escape, column.cells)]) for column in self._columns]
        text = _tabulated(columns, tablefmt)
        return text.replace("−", "$-$") if tablefmt.startswith("latex") else text

    @property
    def _columns(self) -> list["TextColumn"]:
        text = self.headers[: self.texts] if isinstance(self.texts, int) else self.texts
        columns = []
        for header, *cells in zip(self.headers, *self.cells, strict=True):
            if header not in text:  # the minus of a number is a sign, and there is none before a zero
                cells = [NEGATIVE.sub("−", ZERO.sub("", cell)) for cell in cells]
            columns.append(TextColumn("left" if header in text else "right", [header, *cells]))
        return columns

    def with_failed(self, rows: Sequence[Mapping]) -> "Table":
        """Write "failed" into the cells of failed rows, in columns named after their metric, task or batch.

        A subject without a line gets one, where the order of all rows has it. A table takes only rows that have all
        fields which its columns of text name.
        """
        text = self.headers[: self.texts] if isinstance(self.texts, int) else [*self.texts]
        fields = [SUBJECT.get(header.lower(), "") for header in text]
        named_first = fields and "" not in fields and self.headers[: len(text)] == text
        if not named_first or not any("failed" in row for row in rows):
            return self
        names = distinct_names((row["model"], row.get("checkpoint")) for row in rows if "model" in row)

        def text_of(row: Mapping, field: str) -> str:
            if field == "model":
                return names[row["model"], row.get("checkpoint")]
            return self.baseline if field == "variant" and row[field] == BASELINE else str(row[field])

        named = (row for row in rows if {*fields} <= row.keys())
        by_subject = grouped(named, lambda row: tuple(text_of(row, field) for field in fields))
        subjects, cells = [*by_subject], [[*line] for line in self.cells]
        for number, (subject, of_subject) in enumerate(by_subject.items()):
            if failed := [row for row in of_subject if "failed" in row]:
                shown = [tuple(line[: len(text)]) for line in cells]
                if subject not in shown:
                    later = (place for place, other in enumerate(shown) if other in subjects[number:])
                    others = [FAILED] * (len(self.headers) - len(text))
                    cells.insert(next(later, len(shown)), [*subject, *others])
                words = {str(row.get(name)) for row in failed for name in ("metric", "task", "batch")}
                columns = [
                    column
                    for column, header in enumerate(self.headers)
                    if words & {METRICS.get(word, word) for word in header.lower().split()}
                ]
                for line in [line for line in cells if tuple(line[: len(text)]) == subject]:
                    for column in columns:
                        line[column] = FAILED if line[column] == MISSING else line[column]
        return self._replace(cells=cells)

    @property
    def parts(self) -> list["Table"]:
        """The table without the columns that are set apart, and a folded table of them; the table alone if none are."""
        if not self.apart:
            return [self]
        text = self.headers[: self.texts] if isinstance(self.texts, int) else self.texts
        shown = self._of([header for header in self.headers if header not in self.apart])
        behind = self._of([header for header in self.headers if header in self.apart or header in text])
        return [shown, behind._replace(name=f"{self.name}-apart", caption=self.apart_caption, folded=True)]

    def _of(self, headers: list[str]) -> "Table":
        places = [self.headers.index(header) for header in headers]
        cells = [[row[place] for place in places] for row in self.cells]
        return self._replace(headers=headers, cells=cells, apart=())

    @property
    def printed(self) -> str:
        return f"{wrapped(self.caption)}\n\n{self.fitted}"

    @property
    def fitted(self) -> str:
        """The table, fitted to the width of the terminal.

        If it is too wide, headers are broken into lines first, then text; columns that still do not fit follow below,
        with the columns of text on the left repeated.
        """
        width = terminal_width()
        columns = [*self._columns]
        if _width(columns) > width:
            columns = [_with_broken_header(column) for column in columns]
        rooms = {place: column.width for place, column in enumerate(columns) if column.side == "left"}
        for _ in range(_width(columns) - width):  # take a character at a time from the widest text
            widest = max(rooms, key=rooms.get, default=None)
            if widest is not None and rooms[widest] > LEAST:
                rooms[widest] -= 1
        columns = [column.within(rooms.get(place, column.width)) for place, column in enumerate(columns)]
        return "\n\n".join(_tabulated(part, "simple") for part in _parts(columns, width))


class TextColumn(NamedTuple):
    """A column of a table as text: its alignment ("left" or "right") and its cells, the header first."""

    side: str
    cells: list[str]

    @property
    def width(self) -> int:
        """The width in characters: the longest line, where the header includes the padding that tabulate adds."""
        header, *lines = (max(map(len, cell.splitlines()), default=0) for cell in self.cells)
        return max([header + MIN_PADDING, *lines])

    def within(self, width: int) -> "TextColumn":
        """Break the cells into lines of at most this width; return the column unchanged if it fits."""
        if self.width <= width:
            return self
        header, *cells = self.cells
        return self._replace(cells=[header, *(_in_lines(cell, width) for cell in cells)])


def _in_lines(text: str, width: int) -> str:
    """Break a text into lines of at most this width, after spaces and the separators of a path."""
    lines = [""]
    for piece in re.findall(r"[^ ._/+-]*[ ._/+-]|[^ ._/+-]+", text):
        if len(lines[-1] + piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = lines[-1][:width], lines[-1][width:]
    return "\n".join(line.rstrip() for line in lines)


def _tabulated(columns: Sequence[TextColumn], tablefmt: str) -> str:
    headers, *rows = map(list, zip(*(column.cells for column in columns), strict=True))
    sides = [column.side for column in columns]
    return tabulate(rows, headers, tablefmt=tablefmt, disable_numparse=True, colalign=sides)


def _width(columns: Sequence[TextColumn]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


def _with_broken_header(column: TextColumn) -> TextColumn:
    """Break the header into lines no longer than the column's cells or the header's longest word."""
    header, *cells = column.cells
    words = re.findall(r"[^ /-]*[/-]?", header)
    room = max(map(len, [*words, *cells]))
    lines = [""]
    for piece in re.findall(r"[^ /-]*[ /-]?", header):
        if len((lines[-1] + piece).rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return column._replace(cells=["\n".join(line.rstrip() for line in lines), *cells])


def _parts(columns: Sequence[TextColumn], width: int) -> Iterable[Sequence[TextColumn]]:
    """Split columns into groups that fit the width; each group repeats the columns of text on the left."""
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
    """Format a number with its error bar behind ±, if known and visible; the bar decides the digits.

    Numbers of at least `LARGE`, as broken models have them, are written with powers of ten. value and bar are
    multiplied by unit.
    """
    if pd.isna(value):
        return MISSING
    value, bar = unit * value, None if pd.isna(bar) else unit * bar
    if not bar or abs(value) >= LARGE:
        return f"{_number(form, value)}" + (f"±{_number(form.removeprefix('+'), bar)}" if bar else "")
    sign, usual, kind = form.partition(".")[0].rstrip("z"), int(form[:-1].partition(".")[2]), form[-1]
    if kind == "e":
        digits, ending = precision(bar / 10 ** _exponent(bar), 0)
        return f"{value:.{max(_exponent(value or bar) - _exponent(bar), 0) + digits}e}±{bar:.{digits}e}"
    digits, ending = precision(bar, usual if kind == "f" else math.inf)
    thousands = "," * ("," in ending)
    form = f"{sign}z{thousands}.{digits}f" if ending else form  # z: −0 becomes 0
    return f"{_number(form, value)}{ending and f'±{ending}'}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))


def measured_cell(form: str, row: Mapping) -> str:
    """Format a row's value; "failed" if it failed; a perplexity larger than any number as a bound and its logarithm."""
    if "failed" in row:
        return FAILED
    if LOG_PERPLEXITY in row["metric"]:
        return f"> 1e{min(308, math.floor(row['value'] / math.log(10)))} ({cell('.2f', *value_of(row).shown)} nats)"
    return cell(form, *value_of(row).shown)


def failed_notes(rows: Iterable[Mapping], every: Sequence[Mapping]) -> list[str]:
    """Return one footnote per model on rows without a comparable number, which says which cells they are, and why.

    every: all rows of the run.
    """
    notes = []
    for model, of_model in grouped(rows, lambda row: row.get("model")).items():
        alike = [row for row in every if row.get("model") == model]
        reasons = grouped(of_model, lambda row: row.get("failed") or f"the value is {measured_cell('', row)}")
        causes = [f"{_cells(failed, alike)}: {reason}" for reason, failed in reasons.items()]
        notes.append(": ".join([FAILED, *([] if model is None else [short_name(model)]), "; ".join(causes)]))
    return notes


def _cells(failed: Sequence[Mapping], of_model: Sequence[Mapping]) -> str:
    """Name the failed rows of a model: all its schemes or variants, or each variant with its metrics."""
    by_variant = grouped(failed, lambda row: row["variant"])
    if len(failed) == len(of_model) and len(by_variant) > 1:
        return f"all {len(by_variant)} {'schemes' if all('scheme' in row for row in failed) else 'variants'}"
    parts = (f"{variant} ({listed(distinct(cells, 'metric'))})" for variant, cells in by_variant.items())
    return listed(parts if len(distinct(of_model, "metric")) > 1 else by_variant)


ROW_COLUMNS = ("model", "variant", "metric", "stack")
CELL_COLUMNS = ("stack", "role", "layer", "head", "checkpoint", "task", "batch")  # distinguish the values of a cell


def values_table(rows: Sequence[Mapping], parts: Sequence[str] = CELL_COLUMNS) -> Table:
    """Make a table of values with their standard deviation over draws; values with equal fields are all left out.

    parts: fields that distinguish the values of one cell.
    """

    def place(row: Mapping) -> tuple:
        return tuple(row.get(name) for name in (*ROW_COLUMNS, *parts))

    counts = Counter(map(place, rows))
    unique = [row for row in rows if counts[place(row)] == 1]
    cells = [
        [short_name(row.get("model", "")), row["variant"], _metric(row, parts), measured_cell(".6g", row)]
        for row in unique
    ]
    places = ROW_COLUMNS if any("stack" in row for row in unique) else ROW_COLUMNS[:-1]
    data = pd.DataFrame(unique).reindex(columns=[*places, "value", "standard_deviation", "unit"])
    caption = "Values by model, variant and metric."
    if any("failed" in row for row in unique):
        caption += " Notes say why cells failed."
    return Table("measured", caption, ["model", "variant", "metric", "value"], cells, data, texts=3)


def _metric(row: Mapping, parts: Sequence[str]) -> str:
    known = [str(row[name]) for name in parts if name in row]
    return f"{row['metric']} ({', '.join(known)})" if known else row["metric"]


def scattered(name: str, form: str, unit: float = 1) -> Callable[[Mapping], str]:
    """Return a function that formats a row's field NAME with the bar from NAME_deviation and NAME_error."""
    return lambda row: cell(form, *value_of(row, name).shown, unit)


def _number(form: str, value: float) -> str:
    if math.isfinite(value) and abs(value) >= LARGE:
        form = form.replace("f", "e")
    elif form == ".4g" and abs(value) >= 1e4:  # without a power of ten, as beside numbers with an error bar
        form = ",.0f"
    return f"{value:{form}}"


def with_interval(form: Callable[[float], str], value: float, *ends: float) -> str:
    """Format a number with its interval: 9.9 [9.5, 10.3]; without ends, the number alone."""
    return form(value) + (f" [{', '.join(map(form, ends))}]" if ends else "")


def terminal_width() -> int:
    """Return the columns of the terminal, at least 80; 80 if there is no terminal."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def wrapped(text: str, **options: str) -> str:
    """Wrap a paragraph to the terminal, at most 100 columns. options: of `textwrap.fill`."""
    return textwrap.fill(text, min(LONGEST, terminal_width()), **options)


def scatter_note(rows: list[dict]) -> str:
    """Return the note on ± in a table of perplexities: scatter over the text, by rounding or by masks, as recorded."""
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
    protocol = row.get("protocol", "")
    return "documents" if protocol.endswith("documents") else "pictures" if protocol == PICTURES else "blocks"


def seeds_note(trained: pd.DataFrame) -> str:
    """Return the note on seeds and intervals of a table of trained models."""
    seeds = trained.groupby("run")["seed"].nunique()
    most = int(seeds.max())
    return SEVERAL.format(most if seeds.min() == most else f"up to {most}") if most > 1 else ONE


def measured_on(rows: Sequence[Mapping]) -> str:
    """Return a line that names the texts, blocks and tokens on which rows were measured; "" if no row has any."""
    others = {field: distinct(rows, field) for field in OTHERS}
    shown = {field: values for field, values in others.items() if 0 < len(values) <= MOST.get(field, MANY)}
    parts = [OTHERS[field].format(listed(values)) for field, values in shown.items()]
    texts: dict[tuple, dict] = {}  # the first block and the number of blocks, by text
    for row in rows:
        if "blocks" in row:
            text = row.get("text", "?"), row.get("protocol", USUAL), row.get("block")
            texts.setdefault(text, {})[row.get("first_block", 0), row["blocks"]] = None
    if len(texts) <= MANY:
        parts = [*(_text(*text, sorted(spans)) for text, spans in texts.items()), *parts]
    line = ", ".join(parts)
    return line[:1].upper() + line[1:]


def _text(text: str, protocol: str, block: int | None, spans: list[tuple[int, int]]) -> str:
    if protocol == PICTURES:
        return f"text {text}, {listed(count for _, count in spans)} pictures"
    whole = all(first == 0 for first, _ in spans)
    counts = (f"{count:,}" if whole else span(first + 1, first + count) for first, count in spans)
    many = "block" if [count for _, count in spans] == [1] else "blocks"
    blocks = f"{listed(counts)} {many}" if whole else f"{many} {listed(counts)}"
    cut = "" if protocol == USUAL else f" ({protocol})"
    return f"text {text}{cut}, {blocks} of {block:,} tokens"


def distinct(rows: Iterable[Mapping], field: str) -> list[str]:
    values = (row[field] for row in rows if row.get(field) is not None)
    cells = dict.fromkeys(", ".join(map(str, value)) if isinstance(value, list) else value for value in values)
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in cells]
