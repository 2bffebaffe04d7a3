"""README and docs: they read well, what their sentences say is so, and what a stranger types works."""

import ast
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import typer

from outliers import Sweep, UserError
from outliers.app import command_of
from outliers.metrics.measurement import MemoryNeeds, stored_bytes
from outliers.models.load import find_config, load_model, weights_hash
from outliers.models.names import POCKET, pocket_models
from outliers.quantization.schemes import get_scheme
from outliers.runs.forecast import FreeBytes, ModelRun, forecast, model_shape
from outliers.show.value import Value
from outliers.terminal.command import app_of
from outliers.views.causes import trained
from outliers.views.origins import HIDDEN
from tests.conftest import ROOT, needs_smollm2, read
from tests.kept import KEPT, OTHERS, SECTIONS, kept, plan_at

sys.path.insert(0, str(ROOT / "scripts"))
import page_values
import pages
import prose

KERNELS, TRAINING = "kernels/README.md", "outliers/models/pocket/README.md"
CAUSAL = pocket_models("next tokens")
PAGES = [page.relative_to(ROOT).as_posix() for page in pages.pages()]


# How pages read


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.name)
def test_a_page_reads_well(page):
    assert not prose.problems(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" ".join(["word"] * 36), "36 words"),
        (" ".join(["word"] * 18) + ".", "18.0 words a sentence"),
        ("## What is measured\n", "a heading that is no noun: ## What is measured"),
        ("\n" * 251, "251 lines of 250"),
    ],
)
def test_a_rule_that_is_broken(text, said):
    assert any(said in problem for problem in prose.problems("docs/page.md", text))


# What pages say


def value(file: str, columns: str | list[str], **where: Any) -> np.ndarray:
    """Columns of a kept table, of the rows that have these values."""
    return page_values.kept(file, **where)[columns].to_numpy()


def test_sentences_without_numbers():
    measured = plan_at("plans/w4a8-g64").measured
    assert measured["cost"] > measured["allowed"], "plans.md: no set brings it there"
    ablation = partial(value, "ablation/gpt2-1.7m/ablation.csv", "top1_softmax")
    shuffled = ablation(subject="outliers", method="shuffle")
    assert shuffled > ablation(subject="none"), "pocket.md: shuffled, the attention is more certain"
    for fit in map(ast.literal_eval, value("emergence/fits.csv", "scale_interval")):
        assert fit[0] < 0 < fit[1], "pocket.md: over the seven models the exponential is not determined"
    outliers = partial(value, "outliers/models/pocket/emergence.csv", "outlier_features")
    with_outliers = [name for name in CAUSAL if outliers(model=name)[-1]]
    assert len(CAUSAL) == 8
    assert len(with_outliers) == 3, "pocket.md: in three of them outlier features grew"
    others = [row for row in kept("pocket/families_table4") if row["metric"] == "count"]
    having = {(row["model"], row.get("stack")): row["value"] for row in others if row["value"]}
    assert having == {("pocket/t5-1.9m", "encoder"): 2}, "pocket.md: the encoder of the T5 has two, the others none"
    right = {row["value"] for row in kept("pocket/pictures_table1") if row["metric"] == "accuracy"}
    assert len(right) == 1, "pocket.md: no scheme changes how many are right"
    columns = ["features", "outputs", "times_16_bits", "times_16_bits_smallest"]
    layers = [
        value(f"benchmarks/layers-{one}.csv", columns, tokens=512, way="LLM.int8()")
        for one in ("amd-epyc-avx512-vnni", "intel-xeon-amx")
    ]
    (fast, _), (_, gains) = (one[one[:, 1] == 4 * one[:, 0]].T[2:] for one in layers)
    assert len(fast) == 8
    assert fast.min() > 1, "int8-models.md: faster than bfloat16 at every dimension"
    assert sorted(gains > 1) == list(gains > 1), "int8-models.md: from one dimension on"
    weights = partial(value, "weights/table1_increase.csv", "pocket/gpt2-5.9m")
    assert weights(variant="w4-g64+awq") > weights(variant="w4-g64"), "formats.md: AWQ shows no gain"
    layers = partial(value, "attention/attention_layers.json", ["cost", "standard_deviation"])
    (less,), (none,) = layers(exact="layer 1"), layers(exact="no layer")
    assert less[0] < none[0], "attention.md: less, but not by two standard deviations"
    assert not Value(*less).is_apart(Value(*none))
    decay = partial(value, "training-runs/causes", ["learning_rate", "weight_decay"])
    plain, less = (decay(run=run)[0].prod() for run in ("as it is", "Adafactor, less decay"))
    assert less == pytest.approx(plain), "causes.md: as much of the weights at each step"
    worst = value("damage/against/damage_worst.csv", "projection", variant="against(smollm2-nf4)")[0]
    assert worst.endswith("v_proj"), "checkpoints.md: the value projection"
    gates = partial(value, "mechanism/smollm2-135m/gates.csv", ["value", "median"], feature=247, role="attn_in")
    hidden = abs(gates(layer=range(1, 9)))
    assert (hidden[:, 0] < HIDDEN * hidden[:, 1]).all(), "mechanism.md: the norms hide it"
    (share,) = value("mechanism/readers/heads.csv", "share_before", feature=247, place="attn_in", layer=18, head=8)
    assert share > 0.9995, "mechanism.md: gives it all of its attention"
    assert value("mechanism/weights/super_weights.csv", "count")[0] == 10, "mechanism.md: the ten weights nearest"
    assert {*value("mechanism/checkpoints/accounts.csv", "part")} == {"feed-forward"}, "mechanism.md: writes most"
    published = read("results/kept/pocket/table3/table3_published.md").splitlines()[2:]
    *others, (*_, ours, theirs, _, _) = [[cell.strip() for cell in line.split("|")] for line in published]
    assert [row[-2] for row in others] == 11 * ["same"], "paper.md: all twelve cells"
    assert (ours, theirs) == ("GPT-2 XL 1.5B", "GPT-2 1.3B"), "paper.md: if GPT-2 XL is taken for it"


@pytest.mark.parametrize(("run", "section"), [*SECTIONS.items(), *OTHERS])
def test_kept_tables_and_figures_are_those_of_their_rows(run, section):
    """Of figures the words, which Matplotlib writes into an SVG file as comments, too."""
    section = section(kept(run))
    for drawn in section.tables:
        assert read(f"results/kept/{run}/{drawn.name}.md") == drawn.form("github") + "\n"
        assert read(f"results/kept/{run}/{drawn.name}.csv") == drawn.data.to_csv(index=False, float_format="%.6g")
    for drawing in section.drawings:
        path = f"results/kept/{run}/{drawing.name}.svg"
        if (ROOT / path).exists():
            words = [re.findall(r"<!-- (.*?) -->", svg) for svg in (read(path), drawing.svg.decode())]
            assert words[0] == words[1], "run: python scripts/redraw.py"


def test_outlier_features_of_models_that_were_trained():
    said = {
        "table7": ("docs/paper-training.md", "None of these models has an [outlier feature]"),
        "table10": ("docs/paper-training.md", "[one outlier feature](damage.md) in both"),
        "causes": ("docs/causes.md", "**No other run meets the criterion**"),
    }
    assert all(words in " ".join(read(page).split()) for page, words in said.values())
    found = {name: trained(kept(f"training-runs/{name}")) for name in said}
    assert {name: {*one["run"][one["count"] > 0]} for name, one in found.items()} == {
        "table7": set(),
        "table10": {*found["table10"]["run"]},
        "causes": {"Adafactor", "SGD", "Adafactor, less decay", "higher learning rate"},
    }
    assert set(found["table10"]["count"]) == {1}


def test_how_many_seeds_the_causes_have():
    assert "Nine of the thirteen runs were made with one seed" in " ".join(read("docs/causes.md").split())
    seeds = trained(kept("training-runs/causes")).groupby("run")["seed"].nunique()
    assert (len(seeds), (seeds == 1).sum(), (seeds == 2).sum()) == (13, 9, 4)


@pytest.mark.parametrize("model", [*pocket_models(), pytest.param("smollm2-135m", marks=needs_smollm2)])
def test_kept_rows_are_of_the_models_that_this_repository_names(model):
    """But those of a latency under 8 bits, whose hash is that of codes too."""
    folders = [file.parent.relative_to(KEPT) for file in KEPT.rglob("rows.jsonl")]
    rows = [row for folder in folders for row in kept(folder) if row.get("model") == model]
    rows = [row for row in rows if row["experiment"] != "training"]  # which are of what became of it
    exact = [row for row in rows if not row["metric"].startswith("latency") or row["scheme"] == "fp32"]
    hashes = {(row["dtype"], row["weights_hash"]) for row in exact}
    assert hashes
    assert hashes == {(dtype, weights_hash(load_model(model, dtype))) for dtype, _ in hashes}


def test_the_example_of_a_refusal():
    """The command sweep with OPT-6.7B where 23.5 GB are free."""
    spec = Sweep(models=["facebook/opt-6.7b"])
    sizes = model_shape(find_config("facebook/opt-6.7b"))
    per_weight = tuple(stored_bytes([get_scheme(name)]) for name in spec.schemes)
    needs = MemoryNeeds(per_weight, variant_count=len(spec.schemes))
    run = ModelRun("opt-6.7b", sizes, 0, needs, "float32", "cpu", False, None, spec.block, spec.blocks)
    room = FreeBytes(23_500_000_000, 23_500_000_000, 10**12, 10**12)
    with pytest.raises(UserError) as refused:
        forecast([run], room)
    assert f"```text\nerror: {refused.value}\n```" in read("docs/large-models.md")


def test_all_fields_of_rows_are_defined():
    defined = set(re.findall(r"`([^`\n]+)`", read("docs/rows.md").partition("## Fields")[2]))
    for run in ("pocket/table1", "emergence", "ablation/gpt2-1.7m"):
        assert {field for row in kept(run) for field in row} <= defined | OF_ONE_METRIC


OF_ONE_METRIC = {"same_weights_as"}


# What a stranger clicks and types

CARDS = [card.relative_to(ROOT).as_posix() for card in sorted(POCKET.glob("*/README.md"))]
ROOMS = "benchmarks|docs|experiments|kernels|notebooks|outliers|results/kept|scripts|tests"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *CARDS])
def test_links_and_paths_exist(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = folder / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    words = re.sub(r"\]\([^)]*\)", "]", read(page))
    for path in re.findall(rf"(?<![\w/.])(?:{ROOMS})/[\w./-]*\w", words):
        assert (ROOT / path).exists() or (folder / path).exists(), path


def test_pages_are_linked():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in read("README.md")
    for page in (KERNELS, TRAINING):
        assert any(re.search(rf"\]\((?:\.\./)?{re.escape(page)}\)", read(other)) for other in PAGES), page


def test_docstrings_cite_what_is_there():
    for file in sorted(ROOT.glob("outliers/**/*.py")):
        for path, anchor in re.findall(r"(docs/[\w-]+\.md)(?:#([\w-]+))?", file.read_text(encoding="utf-8")):
            assert not anchor or anchor in anchors(ROOT / path), f"{file}: {path}#{anchor}"


def typed(text: str, program: str) -> Iterator[list[str]]:
    """The arguments of each line of a text that runs a program."""
    for block in re.findall(r"```\w*\n(.*?)```|(?<!`)`([^`]+)`(?!`)", text, re.DOTALL):
        for line in "".join(block).splitlines():
            for found in re.findall(rf"(?<!\S)'?{program}\S*[^'#|]*", line):
                yield shlex.split(found.strip("'"))


def texts() -> Iterator[tuple[str, str]]:
    """All that shows commands: pages, cards of models, the help of commands, and the words of notebooks."""
    for page in [*PAGES, *CARDS]:
        yield page, read(page)
    for path in sorted(ROOT.glob("outliers/*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8").replace("``", "")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        yield path.name, "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


COMMANDS = [
    pytest.param(arguments, id=f"{place}: {' '.join(arguments)}")
    for place, text in texts()
    for arguments in typed(text, "python -m outliers")
    if "{" not in " ".join(arguments)
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_take_what_is_typed(arguments):
    module, options = arguments[2], arguments[3:]
    name = module.rpartition(".")[2]
    assert importlib.util.find_spec(module), module
    if module == "outliers" or "." in module.removeprefix("outliers."):
        return  # the list of commands; scripts of the package
    typer.main.get_command(app_of(command_of(name))).make_context(name, options)


@pytest.mark.parametrize("page", PAGES)
def test_other_programs_are_there(page):
    for arguments in typed(read(page), "python (?:benchmarks|scripts|kernels)/"):
        source = read(arguments[1]) + read("benchmarks/kept.py")
        assert all(option in source for option in arguments if option.startswith("--"))
    for _, script, *options in typed(read(page), "sbatch "):
        test_commands_take_what_is_typed(["python", "-m", "outliers.sweep", *options])
        assert (ROOT / script).exists()
    for _, *targets in typed(read(page), "make "):
        for target in targets:
            name, variable, _ = target.partition("=")
            wanted = rf"\$[({{].*\b{name}\b" if variable else rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:"
            assert re.search(wanted, read("Makefile"), re.MULTILINE), target
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.findall(r"(?:outliers|\.)\[(\w+)\]", read(page))) <= set(extras)
