"""Cells to rows: what identifies a row, which rows are drawn again, and any metric under any variant."""

import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from outlier_kernels.formats import Quantizer

import outliers
from outliers import __main__ as program
from outliers import commands as folder
from outliers.commands.latency import Latency
from outliers.commands.measure import METRICS, Cells
from outliers.commands.memory import Memory
from outliers.commands.sweep import Sweep
from outliers.config.experiment import Experiment
from outliers.errors import UserError
from outliers.metrics import records
from outliers.metrics.measurement import bundles_of
from outliers.metrics.records import Perplexity
from outliers.metrics.zeroshot import zeroshot
from outliers.models.load import load_model, load_tokenizer
from outliers.models.names import POCKET
from outliers.quantization.schemes import Scheme
from outliers.runs.rows import Rows, read_rows
from outliers.runs.run import run, stored_rows
from outliers.show.section import Context
from outliers.show.tables import values_table
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.subjects.row import COLUMNS, Row
from outliers.terminal.progress import Progress
from outliers.views.measured import measured_section
from tests.conftest import read as page
from tests.small_models import sample_blocks
from tests.typed import call, type_words

MODEL = "pocket/gpt2-0.1m"
SMALL = {"models": [MODEL], "block": 16, "blocks": 1}
FINITE = st.floats(allow_nan=False, allow_infinity=False)
FIELDS = st.dictionaries(
    st.text(max_size=3), st.integers(0, 9) | FINITE | st.text(max_size=3) | st.booleans(), max_size=3
)


def test_what_rides_on_one_pass_is_answered_at_once():
    model = ModelWithText(MODEL, None, Experiment(name="text", block=16, blocks=1))
    pairs = [
        *((records.Top1, "zero(3)"), (records.Sinks, "zero(5)"), (records.Top1, "absmax+zero(5)")),
        *((records.Errors, "absmax"), (records.Errors, "llm.int8"), (records.Places, "absmax")),
        *((Perplexity, "absmax"), (records.Agreement, "absmax"), (Perplexity, "llm.int8")),
    ]
    cells = [Cell(model, outliers.variant(name), metric()) for metric, name in pairs]
    assert [len(bundle) for bundle in bundles_of(cells)] == [2, 1, 2, 1, 2, 1]


def swept(out: Path, **fields) -> list[dict]:
    return run(Sweep(**{"schemes": ["fp32", "llm.int8"], **SMALL} | fields), out)


@given(subject=FIELDS, provenance=FIELDS, run=FIELDS)
@example(subject={"where some end lines": "\u2028\u2029\x85\x0b\x0c\x1c\r"}, provenance={}, run={})
def test_a_row_is_found_by_request_and_provenance_in_any_order(tmp_path_factory, subject, provenance, run):
    request = {"subject": subject, "variant": "fp32", "metric": {"name": "m"}}
    known = {name for _, names in COLUMNS for name in names.split()}
    parts = subject, provenance, run
    subject, provenance, run = ({k: v for k, v in part.items() if k not in known} for part in parts)
    row = Row(request=request, provenance=provenance, values=[{"metric": "m", "value": 1}], run=run)
    other = {"metric": {"name": "m"}, "variant": "fp32", "subject": dict(reversed(subject.items()))}
    folder = tmp_path_factory.mktemp("rows")
    with Rows(folder) as rows:
        rows.add(row)
        assert rows.find(other, dict(reversed(provenance.items()))) == row
        assert rows.find(other, provenance | {"more": 1}) is None
        assert rows.may_have(other)
        assert not rows.may_have(other | {"variant": "absmax"})
    (again,) = read_rows(folder)
    assert again == row == Row.read(row.line)
    assert list(again.records()[0]) == list(row.records()[0]), "in one order, which columns of tables follow"


def test_numbers_of_numpy_and_tuples_are_kept():
    value = {"metric": "m", "value": np.float64(0.5), "features": (3, 17), "interval": (np.float64(0.25), None)}
    request = {"subject": {"model": "m"}, "variant": "fp32", "metric": {"name": "m"}}
    (again,) = Row.read(Row(request=request, provenance={}, values=[value], run={}).line).values
    assert again == {"metric": "m", "value": 0.5, "features": [3, 17], "interval": [0.25, None]}


def test_rows_of_other_candidates_are_not_shown(tmp_path):
    models = [MODEL, "pocket/gpt2-0.5m"]
    rows = run(Memory(models=models, candidates=models[:1]), tmp_path)
    assert stored_rows(Memory(models=models, candidates=models[:1]), tmp_path) == rows
    others = stored_rows(Memory(models=models), tmp_path)
    assert {row["model"] for row in others} == {MODEL}, "the other one was no candidate"


def test_equal_weights_under_two_names_are_timed_twice(tmp_path):
    copy = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "copy")
    small = {"schemes": ["fp32"], "batches": [1], "prompt": 8, "tokens": 1, "repeats": 2}
    rows = run(Latency(models=[MODEL, str(copy)], **small), tmp_path / "out")
    assert {row["model"] for row in rows} == {MODEL, str(copy)}
    assert not any("same_weights_as" in row for row in rows)


def test_one_model_in_memory_serves_all_texts_and_knows_each():
    texts = [ModelWithText(MODEL, None, Experiment(name="text", block=block, blocks=2)) for block in (16, 32)]
    with Progress(0) as bar:
        model_cache = ModelCache(bar)
    one, other = (subject.load(model_cache) for subject in texts)
    assert other is one
    known = [model_cache.completed([outliers.variant("mean(3)")], subject)[0].intervention.means for subject in texts]
    assert not torch.equal(*(of_text[0, "attn_in"] for of_text in known))
    half = ModelWithText(MODEL, None, Experiment(name="text", block=16, blocks=2, dtype="bfloat16"))
    assert half.load(model_cache) is not one


MINE = Scheme("mine", Quantizer("int8", "row"), Quantizer("int8", "column"), 3.0)
SCHEMES = [
    MINE,
    replace(MINE, outlier_threshold=4.0),
    replace(MINE, outlier_threshold=None),
    replace(MINE, weights=None),
]


def test_schemes_of_one_name_and_other_parts_have_rows_of_their_own(tmp_path):
    specs = [Sweep(**SMALL, schemes=[scheme]) for scheme in SCHEMES]
    found = [run(spec, tmp_path) for spec in specs]
    assert len(read_rows(tmp_path)) == len(SCHEMES), "none is taken for another"
    assert [run(spec, tmp_path) for spec in specs] == found


# Any metric under any variant


def values(rows: list[dict]) -> dict:
    return {(row["variant"], row["metric"]): row["value"] for row in rows}


def test_metrics_under_variants_are_what_the_api_measures(tmp_path):
    model, blocks = load_model(MODEL), sample_blocks(MODEL, 16, 2)
    written = ["fp32", "absmax", "zero(3)", "zero(3)+llm.int8", "absmax+hadamard+skip=layers.0"]
    spec = Cells(models=[MODEL], variants=written, metrics="perplexity,agreement,top1", block=16, blocks=2)
    found = values(run(spec, tmp_path))
    want = outliers.perplexities(model, blocks, [outliers.variant(one) for one in written])
    assert [found[one, "perplexity"] for one in written] == want
    whole = outliers.damage(model, blocks, "absmax", by=["model"]).model
    assert found["absmax", "damage.kl"] == whole["kl"]
    assert found["absmax", "damage.top1_agreement"] == whole["top1_agreement"]
    ablated = outliers.ablate(model, blocks, [3])
    of_outliers = ablated[ablated["subject"] == "outliers"].iloc[0]
    assert found["zero(3)", "top1_softmax"] == of_outliers["top1_softmax"]


def test_a_sweep_takes_the_rows_of_cells_and_they_its(tmp_path):
    rows = swept(tmp_path)
    cells = run(Cells(**SMALL, variants=["fp32", "llm.int8"]), tmp_path)
    for field in ("value", "wall_seconds"):
        assert [row[field] for row in cells] == [row[field] for row in rows]


def test_tasks_generation_and_memory_under_variants(tmp_path):
    """Each of its own subject: weights alone, a model that is served, a configuration."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'outliers[zeroshot]'")
    request = {"block": 64, "blocks": 1, "limit": 3, "prompt": 8, "tokens": 1, "repeats": 2, "context": 32}
    written = ["absmax", "zero(3)+llm.int8"]
    metrics = "perplexity,zeroshot,latency,memory"
    rows = run(Cells(models=[MODEL], metrics=metrics, variants=written, **request), tmp_path)
    found, model = values(rows), load_model(MODEL)
    tokenizer = load_tokenizer(MODEL)
    for name in written:
        with outliers.variant(name).on(model) as changed:
            want = {
                f"zeroshot.{one['metric']}": one["value"]
                for one in zeroshot(changed, tokenizer, ["lambada-local"], limit=3)
            }
        assert {metric: found[name, metric] for metric in want} == want
        assert found[name, "latency.decode"] > 0
        assert found[name, "parameters"] == model.num_parameters()
    of_text = {row["metric"] for row in rows if "block" in row}
    assert of_text == {"perplexity"}, "what reads no text is found again whatever the text is"
    hashes = {row["metric"]: row.get("weights_hash") for row in rows if row["variant"] == "zero(3)+llm.int8"}
    assert hashes["perplexity"] == hashes["zeroshot.acc"] == hashes["latency.decode"] != hashes["cache"]


def test_a_table_says_what_has_several_values_a_cell(tmp_path):
    spec = Cells(metrics=["perplexity", "weights"], **SMALL)
    table = measured_section(run(spec, tmp_path), Context(spec, tmp_path)).tables[0]
    assert [cells[2] for cells in table.cells] == ["perplexity"]
    assert table.caption.endswith("Of weights each cell has several, which values.csv lists.")


def test_a_table_says_where_one_finds_why_a_cell_failed():
    row = {"model": "m", "metric": "perplexity"}
    measured, failed = row | {"variant": "fp32", "value": 7.5}, row | {"variant": "absmax", "failed": "no memory"}
    assert values_table([measured], []).caption == "Values by model, variant and metric."
    both = values_table([measured, failed], [])
    assert both.caption == "Values by model, variant and metric. Notes say why cells failed."
    assert [cells[-1] for cells in both.cells] == ["7.5", "failed"]


def test_the_command(monkeypatch, capsys, tmp_path):
    arguments = [MODEL, "--metric", "perplexity,top1", "--variant", "zero(3,7)", "--variant", "llm.int8", "--draws", 2]
    code, out, _ = call(
        monkeypatch, capsys, *arguments, "--block", 16, "--blocks", 1, "--out", tmp_path, command="measure"
    )
    assert code == 0
    assert "zero(3,7)  perplexity" in out
    assert "±" in out
    assert (tmp_path / "measured.md").exists()
    table = (tmp_path / "table1.md").read_text()
    assert "zero(3,7)" in table, "perplexity has a view, which shows variants as schemes"
    assert 'src="data:' in (page := (tmp_path / "report.html").read_text()) or "<svg" in page, "with its figure"


def example_of(of: str) -> str:
    """The lines of a page that have a class."""
    return next(one for one in re.findall(r"```python\n(.*?)```", page("docs/metrics.md"), re.DOTALL) if of in one)


def test_a_metric_is_a_record(monkeypatch, tmp_path):
    module = tmp_path / "hits.py"
    module.write_text(example_of("class Hits").partition("\n\nfields =")[0])
    first = "import hits, outliers.commands.measure"
    subprocess.run([sys.executable, "-c", first], check=True, cwd=tmp_path)  # nothing that it imports imports it
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(records, "Hits", importlib.import_module("hits").Hits, raising=False)
    monkeypatch.setitem(METRICS, "hits", records.metrics()["hits"])
    monkeypatch.delitem(sys.modules, "hits")
    spec = Cells(metrics=["hits"], **SMALL)
    section = measured_section(run(spec, tmp_path), Context(spec, tmp_path))
    assert [table.name for table in section.tables] == ["measured", "hits"]
    assert [drawing.name for drawing in section.drawings] == ["hits_bars"]
    assert [finding.text for finding in section.findings] == ["Most tokens are predicted under fp32."]
    (explorer,) = section.explorers
    assert explorer.content["maps"][0]["values"].shape == (SMALL["block"] - 1, 1)


def test_a_command_is_a_file(monkeypatch, capsys, tmp_path):
    (tmp_path / "largest.py").write_text(example_of("class Largest"))
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    type_words(monkeypatch, "outliers")
    program.main()
    assert "largest    the largest values that projections read\n" in capsys.readouterr().out
    type_words(monkeypatch, "outliers", "largest", MODEL, "--block", 16, "--blocks", 1)
    program.main()
    assert "The largest inputs." in capsys.readouterr().out
    assert (tmp_path / "results/largest/gpt2-0.1m/largest.md").exists()


def test_a_plugin_takes_no_name_that_is_taken(install):
    install("theirs", "METRIC = object()\n", "perplexity = theirs:METRIC", "outliers.metrics")
    with pytest.raises(UserError, match=r"plugin 'perplexity' of the installed .* is a metric whose name is taken"):
        records.metrics()
