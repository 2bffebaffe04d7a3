"""Compare every number and every table of README and docs with what kept results and the code hold.

    python scripts/pages.py [--write]

docs/numbers.yaml lists the numbers of each page. A number is quoted with the words around it, which stand in the page
once, and with the name of its value (results/kept/values.yaml) in its place: `feature of {trace.features}, feature`.
Line breaks do not matter, and a format may stand behind the name. Under `tables` stand the tables of a page, by the
anchor of their section: a table is a Markdown file that a run has kept, the JSON file of a benchmark, the CSV file of a
machine's kernels, or one of `page_tables.TABLES`. Numbers without a value are quoted under `exceptions`, by reason.
Code, links and what `NOT_NUMBERS` matches need none.

It prints the page, the line, what stands there and what should, and fails if anything is wrong. With `--write` it puts
the right numbers and tables in.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from page_tables import table
from page_values import ROOT, Values, read_values

NOT_NUMBERS = re.compile(  # what is no prose, and names that have digits
    r"```.*?```|`[^`]+`|\]\([^)]*\)"
    r"|(?:Tables?|Figures?|[Ss]ections?|equations?)\s+\d[\w.]*(?:(?:, | and | to )\d[\w.]*)*|et\s+al\.,\s+\d{4}"
    r"|\b(?:8|16|32)\s+bits?\b|95 %\s+(?=intervals|bootstrap)|Zen\s+4|^\d+\.\s",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?:(?<![\w.)\]])[−+])?(?<![\w.#-])\d(?:[\d,]*\d)?(?:\.\d+)*(?![\w⁻-]|\.\d)")
PLACE = re.compile(r"\{([^{}]*)\}")  # of a number in a quotation
SECTION = re.compile(r"^#+ (?P<heading>.+)\n(?P<text>(?:(?!^#+ )(?:```(?s:.*?)```|.*)\n)*)", re.MULTILINE)
ROWS = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MADE = ROOT / "docs/types.md"  # as a whole, by scripts/every_type.py
BY_HAND = "by hand"  # the name of a table that nothing makes


class Listed(NamedTuple):
    """The entries of docs/numbers.yaml for a page: quotations of numbers, tables by section, quotations of
    exceptions."""

    numbers: list[str]
    tables: dict[str, list[str]]
    exceptions: list[str]


class Difference(NamedTuple):
    """An error of a page, and the part of its text to replace with what is right, if that is known."""

    said: str
    start: int = 0
    end: int = 0
    right: str | None = None


def pages() -> list[Path]:
    """Return README, every page of docs, and the pages beside them that have numbers."""
    beside = ("README.md", "SECURITY.md", "kernels/README.md", "outliers/models/pocket/README.md")
    return [*(ROOT / page for page in beside), *sorted({*(ROOT / "docs").glob("*.md")} - {MADE})]


def read_listed() -> dict[str, Listed]:
    """Read what is listed for each page, by its path in the repository."""
    read = yaml.safe_load((ROOT / "docs/numbers.yaml").read_text(encoding="utf-8"))
    exceptions = read.pop("exceptions")
    listed = {page: Listed(one.get("numbers", []), one.get("tables", {}), []) for page, one in read.items()}
    for pages_of_reason in exceptions.values():
        for page, quotations in pages_of_reason.items():
            listed.setdefault(page, Listed([], {}, [])).exceptions.extend(quotations)
    return listed


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def places_of_tables(text: str, tables: dict[str, list[str]]) -> tuple[list[tuple[str, int, int]], list[Difference]]:
    """Return the name, start and end of each listed table of a page, and the sections that have others than listed."""
    places, wrong = [], []
    sections = {anchor(one["heading"]): one for one in SECTION.finditer(text)}
    for name, listed in tables.items():
        section = sections.get(name)
        spans = [one.span() for one in ROWS.finditer(text, *section.span("text"))] if section else []
        if len(spans) != len(listed):
            wrong.append(Difference(f"#{name} has {len(spans)} tables; expected {len(listed)}: {', '.join(listed)}"))
        else:
            places += [(one, *span) for one, span in zip(listed, spans, strict=True) if one != BY_HAND]
    return [(name, start, _end_of_note(text, end)) for name, start, end in places], wrong


NOTE = re.compile(r"\n(?:Measured by `|Smallest times; ).*\n(?=\n|\Z)")  # what a table of a benchmark ends with


def _end_of_note(text: str, end: int) -> int:
    note = NOTE.match(text, end)
    return note.end() if note else end


def without_tables(page: str, text: str) -> str:
    """Return the text of a page with blanks where something makes its tables."""
    for _, start, end in places_of_tables(text, read_listed()[page].tables)[0] if page in read_listed() else ():
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def differences(text: str, listed: Listed, values: Values) -> Iterator[Difference]:
    """Compare the numbers and tables of a page with its entries in docs/numbers.yaml; yield what is wrong."""
    places, wrong = places_of_tables(text, listed.tables)
    yield from wrong
    prose = text
    for name, start, end in places:
        right = table(name) + "\n"
        prose = prose[:start] + "\0" * (end - start) + prose[end:]
        if right != text[start:end]:
            pairs = zip(text[start:end].splitlines(), right.splitlines(), strict=False)
            there, expected = next((pair for pair in pairs if pair[0] != pair[1]), ("", "more or fewer lines"))
            yield Difference(f"table {name}: {there}; expected {expected}", start, end, right)
    prose = NOT_NUMBERS.sub(lambda one: "\0" * len(one[0]), prose)
    numbers = {one.start(): one for one in NUMBER.finditer(prose)}
    covered: list[tuple[int, int]] = []
    for quotation in listed.numbers:
        references = PLACE.findall(quotation)
        try:
            expected = [values.text(one) for one in references]
        except (LookupError, ValueError) as error:
            yield Difference(error.args[0])
            continue
        found = _find(quotation, text, expected)
        if len(found) != 1:
            yield Difference(f"stands there {len(found)} times; expected once: {quotation}")
            continue
        covered += found[0].regs[1:]
        for number, (right, reference) in enumerate(zip(expected, references, strict=True), 1):
            if found[0][number] != right:
                said = f"{found[0][number]}; expected {right} ({reference})"
                yield Difference(said, *found[0].span(number), right)
    for quotation in listed.exceptions:
        found = _find(quotation, text, [])
        inside = [one.span() for one in numbers.values() if found and found[0].start() <= one.start() < found[0].end()]
        if len(found) != 1 or not inside:
            yield Difference(f"stands there {len(found)} times, with {len(inside)} numbers; expected once: {quotation}")
        covered += inside
    for start, one in numbers.items():
        count = sum(first <= start < last for first, last in covered)
        if count != 1:
            context = " ".join(text[max(0, start - 50) : one.end() + 50].split())
            said = "has no value" if count == 0 else f"is listed {count} times"
            yield Difference(f"{one[0]} {said}: {context}", start, one.end())


def _find(quotation: str, text: str, expected: list[str]) -> list[re.Match]:
    """Return the places where a quotation stands in a page, with a number or text in place of each value."""
    words = (r"\s+".join(map(re.escape, re.split(r"\s+", one))) for one in PLACE.split(quotation)[::2])
    groups = (f"({NUMBER.pattern})" if NUMBER.fullmatch(one) else r"([\s\S]+?)" for one in expected)
    pattern = "".join(part for pair in zip(words, [*groups, ""], strict=True) for part in pair)
    return [*re.finditer(pattern, text)]


def written(text: str, wrong: list[Difference]) -> str:
    """Return a page with what is right in the place of what is wrong."""
    for one in sorted(wrong, key=lambda one: -one.start):
        if one.right is not None:
            text = text[: one.start] + one.right + text[one.end :]
    return text


def main() -> None:
    """Compare every page, print what is wrong, and correct it if `--write` is given."""
    values, listed, failed = read_values(), read_listed(), False
    for path in pages():
        page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        wrong = [*differences(text, listed.get(page, Listed([], {}, [])), values)]
        for one in wrong:
            print(f"{page}:{text.count(chr(10), 0, one.start) + 1}: {one.said}")
        if "--write" in sys.argv:
            path.write_text(written(text, wrong), encoding="utf-8")
            wrong = [one for one in wrong if one.right is None]
        failed = failed or bool(wrong)
    references = (one for page in listed.values() for quotation in page.numbers for one in PLACE.findall(quotation))
    if unused := values.unused(references):
        print(f"results/kept/values.yaml: on no page: {', '.join(sorted(unused))}")
    sys.exit(failed or bool(unused))


if __name__ == "__main__":
    main()
