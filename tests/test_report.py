"""Tables and figures from rows."""

import pytest

from outliers.quantization.schemes import SCHEMES
from outliers.report.figures import STYLES, perplexity_by_size
from outliers.report.table1 import published_form, table1, terminal
from outliers.report.write import write_sweep


@pytest.fixture
def rows():
    """Two models under three schemes, in the order in which a sweep measures them."""
    values = {"llm.int8": (100.125, 10.5), "absmax": (110, 11.25), "fp32": (100, 10)}
    return [
        {
            "model": model,
            "scheme": scheme,
            "metric": "perplexity",
            "value": float(value),
            "parameters": 10**6 * (n + 1),
            "architecture": model.partition("/")[2].partition("-")[0],
            "dtype": "float32",
        }
        for scheme, pair in values.items()
        for n, (model, value) in enumerate(zip(("pocket/gpt2-1m", "pocket/opt-2m"), pair, strict=True))
    ]


def test_table_has_the_papers_order_and_labels(rows):
    assert published_form(table1(rows), "float32", "github") == (
        "| Perplexity                               |   gpt2-1m |   opt-2m |\n"
        "|------------------------------------------|-----------|----------|\n"
        "| 32-bit Float                             |    100.00 |    10.00 |\n"
        "| Int8 absmax                              |    110.00 |    11.25 |\n"
        "| Absmax LLM.int8() (vector-wise + decomp) |    100.12 |    10.50 |\n"
    )


def test_labels_are_the_papers():
    import csv

    from tests.conftest import SHARED

    published = SHARED / "paper" / "table1_perplexity.csv"
    if not published.exists():
        pytest.skip("needs the paper's tables beside the clone")
    with published.open() as file:
        assert [scheme.label for scheme in SCHEMES.values()] == [row["method"] for row in csv.DictReader(file)]


def test_a_baseline_in_16_bits_is_not_called_32_bit(rows):
    assert "float16, not quantized" in published_form(table1(rows), "float16", "github")


def test_terminal_table_is_narrow(rows):
    lines = terminal(table1(rows)).splitlines()
    assert lines[0].split() == ["perplexity", "gpt2", "opt"]
    assert lines[3].split() == ["fp32", "100.00", "10.00"]
    assert max(map(len, lines)) <= 40


def test_a_missing_cell_is_a_dash(rows):
    baseline = published_form(table1(rows[:-1]), "float32", "github").splitlines()[2]
    assert baseline.split()[-2] == "-"


def test_every_scheme_has_a_style_of_its_own():
    assert set(STYLES) == set(SCHEMES)
    assert len(set(STYLES.values())) == len(STYLES)


def test_figure_shows_the_rows(rows):
    for row in rows:
        row["architecture"] = "gpt2"
    left, right = perplexity_by_size(rows).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert lines["absmax"] == [[1e6, 110], [2e6, 11.25]]
    increases = {line.get_label(): [float(y) for y in line.get_ydata()] for line in right.lines}
    assert increases["absmax"] == pytest.approx([10, 12.5])
    assert "fp32" not in increases
    assert [label.get_text() for label in right.get_xticklabels()] == ["gpt2-1m", "opt-2m"]
    assert len(perplexity_by_size([row for row in rows if row["scheme"] != "fp32"]).axes) == 1


def test_lines_join_models_of_one_architecture(rows):
    left, _ = perplexity_by_size(rows).axes
    assert {len(line.get_xdata()) for line in left.lines} == {1}


def test_files(rows, tmp_path):
    printed = write_sweep(rows, tmp_path)
    names = {"rows.parquet", "table1.md", "table1.tex", "table1.csv", "perplexity.png", "perplexity.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert str(tmp_path) in printed
    assert (tmp_path / "table1.csv").read_text().splitlines()[1] == "fp32,100,10"
    assert r"\toprule" in (tmp_path / "table1.tex").read_text()
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
