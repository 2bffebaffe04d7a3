"""The tables of README and docs that kept results and the code make, as Markdown."""

import json
import sys
from ast import literal_eval
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from tabulate import tabulate

from outliers.published.facts import read_facts
from outliers.published.numbers import TABLE1, published_models
from outliers.quantization.plans.plan import read_plan
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.runs.frame import records_in as read_rows
from outliers.show.spreadsheet import read_csv
from outliers.show.tables import NEGATIVE, cell
from outliers.show.value import value_of
from outliers.views.emergence import fits_of
from outliers.views.perplexity import costs_of_variants
from outliers.views.plan import plan_points

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from kept import table as benchmark_table  # noqa: E402, the scripts are no packages
from linear_layer import table as layers_table  # noqa: E402


def table(name: str) -> str:
    """Return the Markdown of a table: a file of the repository, or one of `TABLES`."""
    if name in TABLES:
        return TABLES[name]()
    path = ROOT / name
    text = path.read_text(encoding="utf-8").strip()
    drawn = {".json": lambda: benchmark_table(json.loads(text)), ".csv": lambda: layers_table(pd.read_csv(path))}
    return drawn.get(path.suffix, lambda: text)()


IN_PAPER = {  # schemes of the paper's Table 1, as it names them
    "fp32": "32-bit Float",
    "absmax": "Int8 absmax",
    "zeropoint": "Int8 zeropoint",
    "absmax-row": "Int8 absmax row-wise",
    "absmax-vector": "Int8 absmax vector-wise",
    "zeropoint-vector": "Int8 zeropoint vector-wise",
    "absmax-row-decomp": "Int8 absmax row-wise + decomposition",
    "llm.int8": "Absmax LLM.int8() (vector-wise + decomp)",
    "llm.int8-zeropoint": "Zeropoint LLM.int8() (vector-wise + decomp)",
}


def schemes() -> str:
    """Return the table of all schemes and their parts."""
    rows = [
        [
            f"`{scheme.name}`",
            ", ".join([str(scheme.activations or "–"), *scheme.description.split(", ")[2:]]),  # and its remedies
            str(scheme.weights or "–"),
            "no" if scheme.outlier_threshold is None else "yes",
            IN_PAPER.get(scheme.name, "–"),
        ]
        for scheme in SCHEMES.values()
    ]
    headers = ["name", "activations", "weights", "outlier features in 16 bits", "in the paper"]
    return _markdown(headers, rows, texts=len(headers))


class System(NamedTuple):
    """A serving system, and the published perplexity of a model under it.

    variant: what it is here. source: None if no publication states its perplexity for one model. under: the name of the
    system in the source.
    """

    variant: str
    source: str | None = None
    model: str = ""
    under: str = ""


SYSTEMS = {
    "QServe": System("qserve-g64+kv=int4", "qserve", "meta-llama/Llama-2-7b-hf", "QoQ W4A8KV4, groups of 128"),
    "COMET": System("comet-g64+kv=int4/channels=128", "comet", "meta-llama/Llama-2-7b-hf", "FMPQ W4AxKV4"),
    "FireQ": System("fireq-g64+kv=int4", "fireq", "meta-llama/Meta-Llama-3-8B", "FireQ"),
    "FlexQ": System("flexq-g64"),
}


def systems() -> str:
    """Return the table of what serving systems cost published models, and what their formats cost SmolLM2-135M."""
    kept = {row["variant"]: row for row in read_rows(ROOT / "results/kept/founding")}
    facts, rows = read_facts(), []
    for name, one in SYSTEMS.items():
        row, published = kept[one.variant], "no value for one model"
        if one.source:
            theirs = [fact for fact in facts if (fact.source.name, fact.model) == (one.source, one.model)]
            values = {fact.under: float(fact.published) for fact in theirs}
            cited = "" if theirs[0].source.looked_up else " (as cited)"
            published = f"{one.model.partition('/')[2]}: {values['']:.2f} to {values[one.under]:.2f}{cited}"
        bits = f"{row['weight_bits']:.2f}, {row['activation_bits']:.2f}"
        ours = f"{kept['fp32']['value']:.2f} to {cell('.2f', *value_of(row).shown)}"
        rows.append([name, f"`{one.variant}`", bits, published, ours])
    headers = ["system", "here", "bits of weights, activations", "published, WikiText-2", "SmolLM2-135M here"]
    return _markdown(headers, rows, texts=len(headers))


TELLING = ("fp32", "absmax", "zeropoint", "absmax-vector", "llm.int8")  # schemes of the first page


def smollm2(schemes: Collection[str] = SCHEMES) -> str:
    """Return the table of what some schemes cost SmolLM2-135M, with scatter, beside what they cost models of the
    paper."""
    rows = read_rows(ROOT / "results/kept/smollm2-135m/sweep")
    own, sizes = {row["scheme"]: row["cost"] for row in costs_of_variants(rows)}, ("1.3b", "6.7b", "13b")

    def of_paper(scheme: str, size: str) -> str:
        model = f"fairseq-dense-{size}"
        return f"{100 * (TABLE1[model, scheme] / TABLE1[model, BASELINE] - 1):+.1f}"

    cells = []
    for row in sorted(rows, key=lambda row: list(SCHEMES).index(row["scheme"])):
        if row["scheme"] not in schemes:
            continue
        scheme, cost = row["scheme"], own.get(row["scheme"])
        increase = cell("+.1f", *cost.shown, unit=100) if cost else "–"
        paper = [of_paper(scheme, size) if cost else "–" for size in sizes]
        cells.append([f"`{scheme}`", cell(".2f", *value_of(row).shown), increase, *paper])
    headers = ["scheme", "perplexity", "increase (%)", *(f"the paper's {size.upper()} (%)" for size in sizes)]
    return _markdown(headers, cells)


def fits() -> str:
    """Return the table of the exponentials of Figure 3b, fitted to kept runs and to published rows."""
    rows = []
    for run, of in (("training", "along the training of `gpt2-1.7m`"), ("emergence", "over the seven pocket models")):
        for fit in read_csv(ROOT / f"results/kept/{run}/fits.csv").to_dict("records"):
            values = (f"{fit[name]:.0f} [{{:.0f}}, {{:.0f}}]" for name in ("full", "scale"))
            intervals = (literal_eval(fit[f"{name}_interval"]) for name in ("full", "scale"))
            cells = (value.format(*interval) for value, interval in zip(values, intervals, strict=True))
            rows.append([f"{fit['fraction']} affected, {of}", *cells])
    for fraction, fit in fits_of(published_models()).items():
        rows.append([f"{fraction} affected, the rows of the paper's Table 4", f"{fit.full:.1f}", f"{fit.scale:.1f}"])
    return _markdown(["", "a", "b"], rows)


def plans() -> str:
    """Return the table of what kept plans of SmolLM2 leave exact, and of the cost without and with each plan."""
    rows = []
    for folder in ("absmax", "w8a8", "w4a8-g64"):
        points = plan_points(read_rows(ROOT / "results" / "kept" / "plans" / folder)).query("stage == 'confirm'")
        plan = read_plan(ROOT / "results" / "kept" / "plans" / folder / "plan.yaml")
        whole, found = points.iloc[0], plan.measured
        costs = [
            cell("+.1f", *pair, 100)
            for pair in ((whole.cost, whole.cost_deviation), (found["cost"], found["cost_deviation"]))
        ]
        rows.append([f"`{plan.scheme}`", f"{len(plan.exact)} of {plan.projections}", *costs])
    return _markdown(["scheme", "exact", "increase without (%)", "with the plan (%)"], rows)


def _markdown(headers: list, rows: list[list[str]], texts: int = 1) -> str:
    """Return a table in Markdown; texts: how many columns from the left hold text, the others hold numbers."""
    align = ["left"] * texts + ["right"] * (len(headers) - texts)
    rows = [[*row[:texts], *(NEGATIVE.sub("−", cell) for cell in row[texts:])] for row in rows]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align)


TABLES: dict[str, Callable[[], str]] = {
    "schemes": schemes,
    "systems": systems,
    "smollm2-135m": smollm2,
    "five schemes": partial(smollm2, TELLING),
    "fits": fits,
    "plans": plans,
}
