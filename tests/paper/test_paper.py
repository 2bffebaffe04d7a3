"""The paper's tables and figures: published numbers, experiments, and the report that puts them on one page."""

import csv
import re
import shutil
import subprocess
import sys

import pytest

from outliers.commands.sweep import Sweep
from outliers.commands.training import Training
from outliers.config.files import experiment_files
from outliers.errors import UserError
from outliers.paper.artefacts import ARTEFACTS, BEYOND
from outliers.paper.published import Artefact, Published
from outliers.paper.report import experiments_of, previewed, report_experiments
from outliers.published.numbers import published_models
from outliers.quantization.schemes import TABLE1
from outliers.runs.run import show
from outliers.show.section import Section
from tests.conftest import PAPER_TABLES, needs_paper
from tests.kept import KEPT
from tests.pages.test_numbers import page_tables


def read(name: str) -> list[dict]:
    """A published table."""
    with (PAPER_TABLES / name).open() as file:
        return list(csv.DictReader(file))


def of_table1() -> dict:
    rows, names = read("table1_perplexity.csv"), {label: name for name, label in page_tables.IN_PAPER.items()}
    assert [names[row["method"]] for row in rows] == TABLE1
    sizes = ("125M", "1.3B", "2.7B", "6.7B", "13B")
    return {(f"fairseq-dense-{n.lower()}", names[row["method"]]): float(row[n]) for row in rows for n in sizes}


def of_table3() -> dict:
    return {
        (f"{row['hardware']} {row['gpu_memory_gb']} GB", bits): row[f"largest_{bits}bit"]
        for row in read("table3_largest_model.csv")
        for bits in ("8", "16")
    }


def of_table5() -> dict:
    columns = {
        "int8 alone": "int8_without_overhead",
        "absmax, plain torch": "absmax_pytorch_nvidia",
        "vector-wise, plain torch": "vectorwise_pytorch_nvidia",
        "vector-wise": "vectorwise",
        "LLM.int8()": "llm_int8",
    }
    rows = read("table5_matmul_speed.csv")
    return {(way, row["model_dim"]): float(row[name]) for way, name in columns.items() for row in rows}


def of_figure1() -> dict:
    models, published = {"OPT-175B": "opt-175b", "BLOOM-176B": "bloom"}, {}
    for row in read("blog_zeroshot.csv"):
        task = {"lambada": "lambada_openai"}.get(row["task"], row["task"])
        metric = {"ppl": "perplexity"}.get(row["metric"], row["metric"])
        for scheme, column in (("llm.int8", "int8"), ("fp32", "native")):
            published[models[row["model"]], task, metric, scheme] = float(row[column])
    return published


@needs_paper
@pytest.mark.parametrize("values", [of_table1, of_table3, of_table5, of_figure1])
def test_numbers_are_as_published(values):
    assert ARTEFACTS[values.__name__.removeprefix("of_")].published.values == values()


@needs_paper
def test_table4_is_as_published():
    units = {"M": 1e6, "B": 1e9}
    found = published_models()
    for row in read("table4_outlier_features.csv"):
        (model,) = found.index[
            (found["perplexity"] == float(row["ppl"])) & (found["count"] == float(row["count"]))
        ].tolist()
        ours = found.loc[model]
        assert model.startswith({"GPT2": "gpt2", "FSEQ": "fairseq", "GPT-J": "gpt-j"}[row["model"]])
        assert ours["parameters"] == pytest.approx(float(row["params"][:-1]) * units[row["params"][-1]])
        for name in ("one_sided", "q1", "median", "q3"):
            assert ours[name] == float(row[name])
        shares = {"layers": "layers_pct", "positions": "sdims_pct", "top1_softmax": "top1_with_outlier_pct"}
        for name, column in (shares | {"top1_softmax_without": "top1_no_outlier_pct"}).items():
            assert 100 * ours[name] == pytest.approx(float(row[column]))
    assert len(found) == 10


@needs_paper
def test_table6_is_as_published():
    ours = ARTEFACTS["table6"].published.values
    rows = read("table6_latency_ms_per_token.csv")
    assert len(ours) == 3 * len(rows)
    for number, row in enumerate(rows):
        values = list(ours.values())[3 * number : 3 * number + 3]
        published = [row[f"batch_{batch}"] for batch in (1, 8, 32)]
        assert [str(value).replace("out of memory", "oom") for value in values] == [
            text if text == "oom" else str(type(value)(text)) for text, value in zip(published, values, strict=True)
        ]
        model, scheme, hardware, _ = list(ours)[3 * number]
        assert row["model"].lower().startswith(model)
        assert ("int8" in row["precision"].lower()) == (scheme == "llm.int8")
        assert hardware.replace(" ", "").lower().startswith(row["hardware"].split()[0].lower())
        assert ("blog" in hardware) == (row["source"] == "blog")


def _own(rows: list[dict]) -> list[dict]:
    return [row | {"model": "gpt2-0.1m"} for row in rows]


def test_a_new_table_is_one_row_its_experiments_and_its_values(tmp_path, monkeypatch):
    published = Published("LLM.int8(), Table 2", ("model", "scheme"), {("gpt2-0.1m", "fp32"): 1.0})
    section = Section("One more", [], printed="nothing new")
    table2 = Artefact("Table 2", Sweep, published, _own, lambda rows, _context: section._replace(rows=rows))
    monkeypatch.setitem(ARTEFACTS, "table2", table2)
    (tmp_path / "table2.yaml").write_text(SMALL.replace("table1", "table2"))
    said = report_experiments(str(tmp_path / "table2.yaml"), tmp_path / "out")[0]
    assert "Table 2: one more" in said
    assert re.search(r"gpt2-0.1m +fp32 +\d+\.?\d* +1 ", said)
    assert "2 of 2 cells have rows." in previewed(str(tmp_path / "table2.yaml"), tmp_path / "out", None, [])


def test_every_table_and_figure_has_an_experiment_of_each_set():
    of_trainings = [spec.shows for spec in experiments_of("training")]  # which take a night
    of_paper = [name for name in ARTEFACTS if name not in (*BEYOND, *of_trainings)]
    others = ["families_table1", "pictures_table1", "families_table4"]  # of embedded models alone
    for name, shown in (("paper", of_paper), ("pocket", [*of_paper, *others])):
        assert [spec.shows for spec in experiments_of(name)] == shown
        assert {known for known in experiment_files() if known.startswith(f"{name}/")} == {
            f"{name}/{one}" for one in shown
        }
    alone = [spec for name in ("look", "remedies", "attention", "training/causes") for spec in experiments_of(name)]
    assert [*(spec.shows for spec in alone), *others] == list(BEYOND)


def test_a_kind_without_a_view_is_a_mistake():
    with pytest.raises(UserError, match=r"Training has no view: .* its field 'shows' names"):
        show(Training(runs={"a": {}}), "results", [])


def test_the_papers_models_are_named_by_hub_id():
    models = {spec.shows: getattr(spec, "models", []) for spec in experiments_of("paper")}
    assert [model.lower().rpartition("/")[2] for model in models["table1"]] == list(
        dict.fromkeys(key[0] for key in ARTEFACTS["table1"].published.values)
    )
    assert {model.lower().rpartition("/")[2] for model in models["table4"]} == set(published_models().index)
    assert all(model.count("/") == 1 for of_one in models.values() for model in of_one)


SMALL = "shows: table1\nmodels: [pocket/gpt2-0.1m]\nschemes: [fp32, absmax]\nblock: 32\nblocks: 2\n"


def test_a_set_goes_on_past_what_cannot_run(tmp_path, ship, calls_of):
    files = {
        "table1": SMALL,
        "table4": SMALL.replace("table1", "table4").replace("schemes: [fp32, absmax]\n", ""),
        "figure4b": "extends: table4.yaml\nshows: figure4b\n",
        "figure1": "shows: figure1\nmodels: [pocket/gpt2-0.1m]\ntasks: [piqa-local]\ndata: nowhere\n",
    }
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    ship({f"small/{name}": tmp_path / f"{name}.yaml" for name in files})
    loaded, out = calls_of("outliers.subjects.model_cache.load_model"), tmp_path / "results"
    said = report_experiments("small", out)[0]
    assert len(loaded) == 1, "the measurements of a page share a model"
    assert "Not run: file 'nowhere/piqa_valid.jsonl' does not exist" in said
    assert "Measured beside published" not in said, "of another model there is nothing to stand beside"
    page = (out / "report.html").read_text()
    for title in ("Table 1: perplexity", "Figure 1", "Table 4: emergence", "Figure 4b: number", "Not run: "):
        assert title in page
    assert "python -m outliers.report small" in page
    assert (out / "table1" / "table1.md").exists()
    assert (out / "table4" / "figure4b.svg").exists()
    assert not (out / "figure1").exists()
    again = report_experiments("small", out, redraw=True)[0]
    assert "has no finished rows" in again
    assert again.partition("Table 4")[2] == said.partition("Table 4")[2], "drawn again, it is the same"


def test_models_that_cannot_be_reached_are_named_and_the_others_measured(tmp_path):
    models = "models: [pocket/gpt2-0.1m, pocket/nothing, pocket/gpt2-0.5m]"
    (tmp_path / "mine.yaml").write_text(SMALL.replace("models: [pocket/gpt2-0.1m]", models))
    said = report_experiments(str(tmp_path / "mine.yaml"), tmp_path / "out")[0]
    assert "Not run: pocket/nothing: unknown model 'pocket/nothing'" in said
    assert "Not run: pocket/nothing" in (tmp_path / "out" / "report.html").read_text()
    lines = (tmp_path / "out" / "table1.md").read_text().splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == ["", "Perplexity", "gpt2-0.1m", "gpt2-0.5m", ""]


@pytest.mark.slow
def test_redrawing_needs_no_model_and_gives_the_same_tables(tmp_path):
    folder = shutil.copytree(KEPT / "pocket", tmp_path / "pocket")
    kept = {path: path.read_text() for end in ("*.md", "*_published.csv") for path in folder.rglob(end)}
    assert len(kept) > 25
    for path in kept:
        path.unlink()
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from outliers.paper.report import report_experiments\n"
        f"report_experiments('pocket', Path({str(folder)!r}), force=False, redraw=True)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert {path: path.read_text() for path in kept} == kept
    assert (folder / "report.html").exists()


def test_blocks_end_with_the_context_of_a_model_that_the_file_does_not_know(caplog):
    """With room for the prefix of some variants."""
    caplog.set_level("INFO")
    (spec,) = experiments_of("remedies", models=["pocket/gpt2-0.1m"])
    assert spec.block == 255
    assert "blocks of 255 tokens, not 512: the context of pocket/gpt2-0.1m ends there" in caplog.text
    assert experiments_of("remedies")[0].block == 512
