"""Cells that fail: each is a row that says why, and costs itself alone."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

import outliers
from outliers import UserError, Variant
from outliers.models.anatomy import decoder_layers
from outliers.models.names import POCKET
from outliers.runs import engine
from outliers.runs.rows import read_rows
from outliers.show.section import NO_CONTEXT, Finding, Section, section_of, values_section
from outliers.show.tables import Table
from outliers.views.ablation import ablation_section
from outliers.views.plan import plan_rows_section
from tests.small_models import alter_config, alter_weights
from tests.typed import call

MODEL, TEXT = "pocket/gpt2-0.1m", {"block": 32, "blocks": 2}


@dataclass(frozen=True)
class Failing(Variant):
    """A model whose second layer puts out NaN, or that raises an error, unless it is mended."""

    error: Exception | None = None
    mended: bool = False
    name = "failing"

    def fields(self, _model=None) -> dict:
        return {"scheme": "failing"}

    @contextmanager
    def on(self, model, layer=None):
        if self.error:
            raise self.error
        broken = decoder_layers(model)[1]
        hook = lambda *_call: None if self.mended else torch.full_like(_call[-1], torch.nan)  # noqa: E731
        handle = broken.register_forward_hook(hook)
        try:
            yield model
        finally:
            handle.remove()


def cells(*variants, **fields) -> outliers.Cells:
    return outliers.Cells(models=[MODEL], variants=["fp32", *variants, "absmax", "w4a4"], **TEXT | fields)


def lasting(rows: list[dict]) -> list[tuple]:
    return [(row["model"], row["variant"], row["metric"], row["value"]) for row in rows if "failed" not in row]


def damaged(folder: Path, change) -> str:
    """A pocket model with a change to its folder."""
    change(shutil.copytree(POCKET / "gpt2-0.1m", folder))
    return str(folder)


def with_nan(folder: Path) -> Path:
    return alter_weights(folder, lambda tensors: tensors["transformer.h.0.mlp.c_fc.weight"][0, 0].fill_(torch.nan))


def untied(folder: Path) -> None:
    """Give a model a head of its own with a weight that overflows."""

    def change(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].float()
        tensors["lm_head.weight"][0, 0] = 3e38

    alter_weights(folder, change)
    alter_config(folder, tie_word_embeddings=False)


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["resident", "streamed"])
def test_a_cell_that_fails_costs_itself_alone(tmp_path, fields):
    metrics = ["perplexity", "agreement"]
    want = outliers.run(cells(metrics=metrics, **fields), tmp_path / "without")
    spec = cells(Failing(), metrics=metrics, **fields)
    rows = outliers.run(spec, tmp_path / "out")
    assert lasting(rows) == lasting(want)
    failed = [row for row in rows if "failed" in row]
    assert [row["metric"] for row in failed] == metrics
    for row in failed:
        assert row["value"] != row["value"], "NaN"
        assert "is nan" in row["failed"] or row["failed"].startswith("NaN or inf ")
    assert "the unquantized model is fine: the variant breaks it" in failed[0]["failed"]
    assert failed[0]["weights_hash"] == rows[0]["weights_hash"]

    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == len({(row["variant"], row["metric"].partition(".")[0]) for row in rows})
    again = outliers.run(spec, tmp_path / "out")
    assert lasting(again) == lasting(rows)
    measured = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()[len(lines) :]
    assert {json.loads(line)["request"]["variant"] for line in measured} == {"failing"}, "only what failed"
    assert len(read_rows(tmp_path / "out")) == len(lines), "the last one counts"

    mended = outliers.run(cells(Failing(mended=True), metrics=metrics, **fields), tmp_path / "out")
    assert not any("failed" in row for row in mended)
    assert all(row.values for row in read_rows(tmp_path / "out"))


@pytest.mark.parametrize(
    ("error", "reason", "stream"),
    [
        (MemoryError("of 9 GB"), "too little memory (of 9 GB); take ", False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GB"), "too little memory (CUDA out of", True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 GB"), "too little memory (Default", False),
        (UserError("refused late; expected another"), "refused late; expected another", True),
        (OSError(5, "Input/output error"), "the system refuses it ([Errno 5] Input/output error)", False),
    ],
)
def test_errors_that_are_failures(tmp_path, error, reason, stream):
    rows = outliers.run(cells(Failing(error), stream=stream), tmp_path)
    assert [row["variant"] for row in rows] == ["fp32", "failing", "absmax", "w4a4"]
    assert [row["failed"].startswith(reason) for row in rows if "failed" in row] == [True]


@pytest.mark.parametrize("error", [TypeError("a mistake"), AssertionError(), RuntimeError("a"), KeyboardInterrupt()])
def test_errors_of_a_program_end_the_run(tmp_path, error):
    with pytest.raises(type(error)):
        outliers.run(cells(Failing(error)), tmp_path)
    assert [row.request["variant"] for row in read_rows(tmp_path)] == ["fp32"], "what was finished stays"


@pytest.mark.parametrize(("change", "reason"), [(with_nan, "hold NaN or inf in "), (truncated, " are corrupt (")])
@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["resident", "streamed"])
def test_a_damaged_model_among_others(monkeypatch, capsys, tmp_path, change, reason, stream):
    models = [MODEL, damaged(tmp_path / "other", change), "pocket/gpt2-0.5m"]
    options = ["--scheme", "fp32,absmax", "--block", 32, "--blocks", 2, "--out", tmp_path / "out", *stream]
    code, out, err = call(monkeypatch, capsys, ",".join(models), *options)
    assert code == 1
    assert err.splitlines()[-1] == (
        "error: 2 cells failed, all others are finished; run the same command again to measure them once more"
    )
    assert sum(line.startswith("failed: ") for line in err.splitlines()) == 1, "each reason once"
    rows = read_rows(tmp_path / "out")
    rows.sort(key=lambda row: models.index(row.request["subject"]["model"]))
    assert [bool(row.values) for row in rows] == [True, True, False, False, True, True]
    table = [line.split() for line in out.splitlines() if line.startswith(("fp32 ", "absmax "))]
    assert [line[2] for line in table if len(line) == 4][:2] == ["failed", "failed"]
    footnote = f"failed: other: all 2 schemes: the weights of '{models[1]}'{reason}"
    assert footnote[:60] in " ".join(out.split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "failed: other: all 2 schemes: " in page and reason.strip() in page
    for name, cells in (("table1", 2), ("table1_increase", 1)):
        assert (tmp_path / "out" / f"{name}.md").read_text().count("failed") == cells, "fp32 has no increase"


def test_a_model_that_does_not_fit_among_others(monkeypatch, tmp_path):
    models, needs, usual, room = [MODEL, "pocket/gpt2-1.7m"], [], engine.forecast, engine.room_of

    def kept(requests, room):
        found = usual(requests, room)
        needs.extend(need.memory for need in found[0])
        return found

    monkeypatch.setattr(engine, "forecast", kept)
    (want, _) = outliers.sweep(models=models, schemes=["fp32"], **TEXT, out=tmp_path / "all")
    memory = sum(needs) // 2
    monkeypatch.setattr(engine, "room_of", lambda device: room(device)._replace(memory=memory))
    fine, failed = outliers.sweep(models=models, schemes=["fp32"], **TEXT, out=tmp_path / "out")
    assert fine["value"] == want["value"]
    assert failed["failed"].startswith(f"'{models[1]}' needs ") and " of memory in float32 and " in failed["failed"]
    with pytest.raises(UserError, match=f"'{models[1]}' needs"):
        outliers.sweep(models=models[1:], schemes=["fp32"], **TEXT, out=tmp_path / "alone")


def test_where_the_baseline_alone_is_left_nothing_is_compared():
    finished = {"model": MODEL, "variant": "fp32", "metric": "perplexity", "value": 7.5}
    rows = [finished, finished | {"variant": "absmax", "failed": "no"}]
    errors = [finished | {"metric": "damage.error", "projection": path} for path in "ab"]
    section = section_of(lambda _rows, _context: pytest.fail("compared"), rows + errors, NO_CONTEXT)
    assert [cells[1:3] for cells in section.tables[0].cells] == [["fp32", "perplexity"], ["absmax", "perplexity"]]


def row_of(model: str, variant: str, metric: str = "latency", **fields) -> dict:
    return {"model": model, "variant": variant, "scheme": variant, "metric": metric, "value": 1.0, **fields}


def times(rows: list[dict], _context) -> Section:
    lines = [[row["model"], row["variant"], "1.0", "–"] for row in rows]
    by_variant = Table.of_words("by_variant", "A.", ["Model", "weights", "batch 1", "batch 8"], lines)
    by_layer = Table.of_words("by_layer", "B.", ["layer", "ms"], [["0", "1.0"]])._replace(texts=1)
    tables = [by_variant._replace(texts=2, baseline="float32"), by_layer]
    findings = [Finding("one is", "by_variant"), Finding("all are", "by_variant", of_every=True)]
    return Section("Times", rows, tables, findings=findings)


def test_a_failed_cell_is_a_line_of_each_table_that_names_it():
    fine = [row_of("a", "absmax"), row_of("c", "absmax")]
    cut = [row_of("b", variant, failed="cut off") for variant in ("fp32", "absmax", "w4")]
    section = section_of(times, [fine[0], *cut, fine[1]], NO_CONTEXT)
    by_variant, by_layer = section.tables
    assert by_variant.cells[1:4] == [["b", variant, "failed", "failed"] for variant in ("float32", "absmax", "w4")]
    assert [line[0] for line in by_variant.cells] == ["a", "b", "b", "b", "c"], "where the rows have it"
    assert by_variant.printed in section.text and len(by_layer.cells) == 1
    assert section.notes == ["failed: b: all 3 schemes: cut off"]

    of_one = [row_of("a", "absmax", "trace", failed="no room"), row_of("a", "w4", failed="no room")]
    section = section_of(times, [*fine, *of_one, *cut], NO_CONTEXT)
    assert section.notes[0] == "failed: a: absmax (trace) and w4 (latency): no room"
    assert [table.name for table in section.tables] == ["by_variant", "by_layer"], "no table of its own"


def test_a_line_with_values_fails_in_the_columns_of_the_cell():
    rows = [row_of("a", "absmax", batch=1), row_of("a", "absmax", batch=8, failed="no room")]
    assert section_of(times, rows, NO_CONTEXT).tables[0].cells == [["a", "absmax", "1.0", "failed"]]


def test_what_is_said_of_every_cell_is_not_said_where_one_failed():
    fine, failed = row_of("a", "absmax"), row_of("a", "w4", failed="no room")
    said = [
        [finding.text for finding in section_of(times, rows, NO_CONTEXT).findings] for rows in ([fine], [fine, failed])
    ]
    assert said == [["one is", "all are"], ["one is"]]


def test_a_perplexity_beyond_any_number_that_no_table_shows_is_a_note():
    rows = [row_of("a", "absmax"), row_of("a", "w4", "damage.log_perplexity_only") | {"value": 800.0}]
    assert section_of(times, rows, NO_CONTEXT).notes == [
        "failed: a: w4 (damage.log_perplexity_only): the value is > 1e308 (800.00 nats)"
    ]
    section = section_of(lambda *_: values_section(rows), rows, NO_CONTEXT)
    assert not section.notes and section.tables[0].cells[1][-1] == "> 1e308 (800.00 nats)"


@pytest.mark.parametrize(("view", "kind"), [(ablation_section, "ablate"), (plan_rows_section, "plan")])
def test_views_that_compare_all_cells_list_values_if_one_failed(view, kind):
    rows = [row_of("a", "absmax", kind), row_of("a", "w4", kind, failed="no room")]
    (table,) = section_of(view, rows, NO_CONTEXT).tables
    assert [line[-1] for line in table.cells] == ["1", "failed"]


def test_in_data_frames_and_figures(tmp_path):
    rows = outliers.run(cells(Failing()), tmp_path)
    table = outliers.frame(tmp_path)
    assert table["value"].isna().tolist() == [False, False, False, True], "failures are written last"
    assert table["failed"].notna().tolist() == [False, False, False, True]
    assert "failed" not in outliers.frame([row for row in rows if "failed" not in row])
    for drawn in (rows, outliers.frame(rows)):
        axes = outliers.plot.sweep_costs(drawn, paper=False)
        labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
        assert "absmax" in labels and "failing" not in labels
        pyplot.close(axes.figure)


@pytest.mark.parametrize("command", ["origins", "plan --scheme absmax --cost 5%"])
def test_what_decides_as_it_goes_says_what_it_lacks(monkeypatch, capsys, tmp_path, command):
    name, *options = command.split()
    model = damaged(tmp_path / "other", untied)
    where = ["--block", 32, "--blocks", 2, "--out", tmp_path / "out"]
    code, _, err = call(monkeypatch, capsys, model, *options, *where, command=name)
    assert code == 1, err
    assert f"of '{model}' under " in err and "failed, and what follows from it cannot be measured" in err
    assert "failed: " in err


def test_a_trace_whose_head_overflows_shows_its_findings(monkeypatch, capsys, tmp_path):
    model = damaged(tmp_path / "other", untied)
    options = ["--block", 32, "--blocks", 2, "--alpha", 1]
    code, out, err = call(monkeypatch, capsys, model, *options, "--out", tmp_path / "out", command="trace")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: 1 cell failed")
    assert out.strip().startswith("• 24 of 24 features meet the criterion at |x| ≥ 1"), "the first finding"
    assert "NaN or inf in the logits" in " ".join(out.split())
