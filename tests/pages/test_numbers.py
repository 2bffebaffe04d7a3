"""README and docs: every number has its value, every table is as it was kept; and the script that compares them."""

import sys
from pathlib import Path

import pytest

from tests.kept import KEPT

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import page_tables  # noqa: E402
import page_values  # noqa: E402
import pages  # noqa: E402
from pages import Listed  # noqa: E402

VALUES, LISTED = page_values.read_values(), pages.read_listed()
NOTHING = Listed([], {}, [])


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_numbers_and_tables_of_pages_are_right(path):
    text, listed = path.read_text(encoding="utf-8"), LISTED.get(path.relative_to(ROOT).as_posix(), NOTHING)
    assert "<!--" not in text
    assert [*pages.differences(text, listed, VALUES)] == [], "see: python scripts/pages.py"


def test_every_value_is_on_a_page():
    quotations = [one for page in LISTED.values() for one in page.numbers]
    assert not VALUES.unused(one for quotation in quotations for one in pages.PLACE.findall(quotation))
    assert LISTED.keys() <= {path.relative_to(ROOT).as_posix() for path in pages.pages()}


def test_every_kept_benchmark_is_on_a_page():
    shown = {name for page in LISTED.values() for names in page.tables.values() for name in names}
    kept = [*(KEPT / "benchmarks").rglob("*.json"), *(KEPT / "benchmarks").glob("layers-*")]
    assert {file.relative_to(ROOT).as_posix() for file in kept} <= shown


# The script

EXAMPLE = page_values.Values(
    {
        "cost": {
            "increase": {"value": '{"int8": 5.04, "int4": -7}', "format": ".1f"},
            "twice": {"value": '2 * value("cost.increase")["int8"]', "format": "+.0f"},
            "steps": {"value": "1200", "format": ","},
        },
        "versions": {"torch": '"2.13.0"'},
    }
)
PAGE = "# Costs\n\nInt8 costs 5.0 % and\nint4 −7.0 %, 5.0 is less. By\n1,200 steps (2.13.0) it is `4`, in Table 7.\n"
QUOTED = [
    "Int8 costs {cost.increase[int8]} % and int4 {cost.increase[int4]} %,",
    "%, {cost.increase[int8]} is less",
    "By {cost.steps} steps ({versions.torch})",
]


def compared(text: str, quotations: list[str] = QUOTED, exceptions: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """What is said of a page, with its lines, and the page as it is written."""
    wrong = [*pages.differences(text, Listed(quotations, {}, [*exceptions]), EXAMPLE)]
    return [f"{text.count(chr(10), 0, one.start) + 1}: {one.said}" for one in wrong], pages.written(text, wrong)


def test_a_right_page():
    assert compared(PAGE) == ([], PAGE)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("costs 5.0", "costs 5.1", "3: 5.1; expected 5.0 (cost.increase[int8])"),
        ("−7.0", "7.0", "4: 7.0; expected −7.0 (cost.increase[int4])"),
        ("%, 5.0 is", "%, 6.0 is", "4: 6.0; expected 5.0 (cost.increase[int8])"),
        ("1,200", "1,201", "5: 1,201; expected 1,200 (cost.steps)"),
    ],
)
def test_a_wrong_number_is_found_and_written(right, wrong, said):
    """Of a number that stands twice in a page only the one that is wrong."""
    assert compared(PAGE.replace(right, wrong)) == ([said], PAGE)


@pytest.mark.parametrize(
    ("text", "quotations", "said"),
    [
        (PAGE + "\nAnd 3.\n", QUOTED, "7: 3 has no value: 1,200 steps (2.13.0) it is `4`, in Table 7. And 3."),
        (PAGE, QUOTED[:1] + QUOTED[2:], "4: 5.0 has no value: # Costs Int8 costs 5.0 % and int4 −7.0 %, 5.0 is"),
        (PAGE, [*QUOTED, "costs {cost.twice} %"], "3: 5.0; expected +10 (cost.twice)"),
        (PAGE, [*QUOTED, "is {cost.increase[int8]} less"], "1: stands there 0 times; expected once: is {cost.incr"),
        (PAGE + "It is less.\n", [*QUOTED, "is less"], "1: stands there 2 times; expected once: is less"),
    ],
)
def test_what_is_listed_and_what_is_there_differ(text, quotations, said):
    assert compared(text, quotations)[0][0].startswith(said)


def test_exceptions():
    text = PAGE + "\nAnd 3 of them.\n"
    assert compared(text, exceptions=("And 3 of",)) == ([], text)
    assert compared(PAGE, exceptions=("in Table 7",))[0][0].startswith("1: stands there 1 times, with 0 numbers")
    assert compared(PAGE, exceptions=("And 3 of",))[0][0].startswith("1: stands there 0 times")
    assert "is listed 2 times" in compared(PAGE, exceptions=("Int8 costs 5.0",))[0][0]


# Tables

TABLE = "| a |\n|---|\n| 1 |\n"
NOTE = "\nMeasured by `x`.\n"


@pytest.fixture
def a_table(monkeypatch):
    monkeypatch.setitem(page_tables.TABLES, "one", lambda: (TABLE + NOTE).removesuffix("\n"))


@pytest.mark.parametrize("there", [TABLE + NOTE, TABLE.replace("1", "2") + NOTE, TABLE + NOTE.replace("x", "y"), TABLE])
def test_a_table_is_compared_and_written(a_table, there):
    page = "# Title\n\nText.\n\n{}\n| b |\n|---|\n\nMore text.\n\n## Next\n\n| c |\n|---|\n"
    wrong = [*pages.differences(page.format(there), Listed([], {"title": ["one", "by hand"]}, []), EXAMPLE)]
    assert len(wrong) == (there != TABLE + NOTE)
    assert pages.written(page.format(there), wrong) == page.format(TABLE + NOTE)


def test_a_section_has_other_tables_than_listed(a_table):
    page = f"# Title\n\n{TABLE}{NOTE}\n{TABLE}"
    wrong = pages.differences(page, Listed([], {"title": ["one"], "other": ["one"]}, ["| 1 |"]), EXAMPLE)
    said = [one.said for one in wrong]
    assert said[:2] == ["#title has 2 tables; expected 1: one", "#other has 0 tables; expected 1: one"]
