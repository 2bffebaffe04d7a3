"""Put into README and docs the tables and the numbers that kept results and the code hold.

    python scripts/fill_docs.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. NAME is a Markdown file that a run has kept,
the JSON file of a benchmark, the CSV file of a machine's kernels, or one of `TABLES`, made of kept numbers or of the
code.

Behind a paragraph with numbers stands `<!-- = EXPRESSION, EXPRESSION -->`: Python, in which `VALUES` are known, for
every number of the paragraph (or of what follows the marker before) in their order. An expression may give several,
and a number that nothing here makes stands there as itself. A number keeps the digits, the sign and the commas that it
has on the page; text stands as it is. Code, links and what `NOT_NUMBERS` matches are left alone.

Run it after a result changed. It names the paragraphs whose numbers and values are not as many, and fails then. With
`--check` it writes nothing, and fails where something is left to fill in.
"""

import json
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml
from tabulate import tabulate

from outliers.models.gguf import MODEL_TYPES
from outliers.paper.facts import read_facts
from outliers.quantization.plans.plan import read_plan
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.runs.frame import frame
from outliers.runs.frame import records_in as read_rows
from outliers.show.spreadsheet import read_csv
from outliers.show.tables import NEGATIVE, cell
from outliers.show.value import value_of
from outliers.views.emergence import fits_of
from outliers.views.perplexity import costs_of_schemes
from outliers.views.plan import plan_points
from outliers.views.published import TABLE1, published_models

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "kernels" / "benchmarks")]
from kept import table as benchmark_table  # noqa: E402, the scripts are no packages
from linear_layer import table as layers_table  # noqa: E402

PLACE = re.compile(r"<!-- table: (?P<name>[^>]+) -->\n(?P<content>((?!<!--).)*)<!-- end of table -->", re.DOTALL)
NOT_MEASURED = "*Not measured yet"
MAKES = {  # by the ending of what is kept; of reports, those of trainings alone may wait
    ".csv": "kernels/benchmarks/linear_layer.py",
    ".json": "benchmarks/{}.py",
    ".md": "-m outliers.training training/{}",
}


def pages() -> list[Path]:
    """README, every page of docs, and the pages beside them that have numbers."""
    beside = ("README.md", "SECURITY.md", "kernels/README.md", "outliers/models/pocket/README.md")
    made = ROOT / "docs/types.md"  # as a whole, by scripts/every_type.py
    return [*(ROOT / page for page in beside), *sorted({*(ROOT / "docs").glob("*.md")} - {made})]


def filled(text: str) -> tuple[str, list[str]]:
    """A page with its tables and numbers as they are now, and what is wrong with its numbers."""
    form = "<!-- table: {name} -->\n\n{table}\n\n<!-- end of table -->"
    return with_numbers(PLACE.sub(lambda place: form.format(name=place["name"], table=table(place["name"])), text))


# Numbers

MARKER = re.compile(r"<!-- = (.*?) -->", re.DOTALL)
NOT_NUMBERS = re.compile(  # what is no prose, and names that have digits
    r"```.*?```|<!-- table: .*?<!-- end of table -->|<!--.*?-->|`[^`]+`|\]\([^)]*\)"
    r"|(?:Tables?|Figures?|[Ss]ections?|equations?)\s+\d[\w.]*(?:(?:, | and | to )\d[\w.]*)*|et\s+al\.,\s+\d{4}"
    r"|\b(?:8|16|32)\s+bits?\b|95 %\s+(?=intervals|bootstrap)|Zen\s+4",
    re.DOTALL,
)
NUMBER = re.compile(r"(?:(?<![\w.)\]])[−+])?(?<![\w.#-])\d(?:[\d,]*\d)?(?:\.\d+)*(?![\w⁻-]|\.\d)")


def with_numbers(text: str) -> tuple[str, list[str]]:
    """A page with the numbers of its markers as they are now; and its numbers without one, and wrong markers."""
    prose = NOT_NUMBERS.sub(lambda found: "\0" * len(found[0]), text)
    numbers, pieces, problems, last = list(NUMBER.finditer(prose)), [], [], 0
    for marker in MARKER.finditer(text):
        start = max(last, prose.rfind("\n\n", 0, len(prose[: marker.start()].rstrip())))
        problems += [f"no marker: {_around(text, one)}" for one in numbers if last <= one.start() < start]
        mine = [one for one in numbers if start <= one.start() < marker.start()]
        try:
            values = [value for one in eval(f"({marker[1]},)", dict(VALUES)) for value in np.ravel(one).tolist()]
        except Exception as error:
            error.add_note(f"in {marker[0]}")
            raise
        if len(mine) == len(values):
            for one, value in zip(mine, values, strict=True):
                pieces += [text[last : one.start()], as_on_page(value, one[0])]
                last = one.end()
        else:
            problems.append(f"{', '.join(one[0] for one in mine)} are not as many as {values}: {marker[0]}")
        pieces.append(text[last : marker.end()])
        last = marker.end()
    problems += [f"no marker: {_around(text, one)}" for one in numbers if last <= one.start()]
    return "".join([*pieces, text[last:]]), problems


def _around(text: str, found: re.Match) -> str:
    return " ".join(text[max(0, found.start() - 50) : found.end() + 50].split())


def as_on_page(value: float | str, number: str) -> str:
    """A value in the form that a number has on a page."""
    if isinstance(value, str):
        return value
    sign, comma = "+" if number[0] in "−+" else "", "" if re.match(r"\D?\d{4}", number) else ","
    return f"{value:{sign}{comma}.{len(number.partition('.')[2])}f}".replace("-", "−")


@cache
def _frame(file: str) -> pd.DataFrame:
    """A file of numbers, or the rows in a folder."""
    path = ROOT / "results/kept" / file
    path = path if path.exists() else ROOT / file
    if path.is_dir():
        return frame(path, provenance=True)
    if path.suffix == ".csv":
        return read_csv(path)
    read = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON too
    return pd.DataFrame(read.get("rows", [read]))


def kept(file: str, columns: str | list[str] = "value", **where) -> np.ndarray:
    """Columns of a file below results/kept (or the repository), CSV, JSON, YAML or the rows in a folder, where others
    have a value, or one of a list, and then in the order of that."""
    found = _frame(file)
    for name, value in where.items():
        values = list(value) if isinstance(value, (list, range)) else [value]
        place = found[name].map({one: number for number, one in enumerate(values)})
        found = found[place.notna()].iloc[place.dropna().argsort(kind="stable")]
    if found.empty:
        raise LookupError(f"no row of {file} has {where}")
    return found[columns].to_numpy()


def same(file: str, *fields: str) -> list:
    """The one value that each field has in all rows of a folder that have it."""
    return [one for (one,) in (_frame(file)[field].dropna().unique() for field in fields)]


def found(file: str, pattern: str) -> list[float | str]:
    """The numbers of the one place of a file of the repository that a pattern matches; other text as it is."""
    ((first, *others),) = (one.groups() for one in re.finditer(pattern, (ROOT / file).read_text("utf-8"), re.MULTILINE))
    return [float(one) if one.count(".") < 2 else one for one in (text.replace(",", "") for text in (first, *others))]


def rise(ratios: np.ndarray) -> np.ndarray:
    """By how many per cent something grows that is multiplied by these."""
    return 100 * (ratios - 1)


def bar(run: str, variant: str) -> float:
    """Return the bar of the increase of perplexity under a variant in a kept run, in per cent."""
    costs = costs_of_schemes([row | {"scheme": row["variant"]} for row in read_rows(ROOT / "results/kept" / run)])
    (cost,) = (row["cost"] for row in costs if row["scheme"] == variant)
    return 100 * cost.shown[1]


VALUES = {
    "kept": kept,
    "bar": bar,
    "same": same,
    "found": found,
    "rise": rise,
    "code": resolve_name,
    "np": np,
    "ROOT": ROOT,
}


# Tables


def table(name: str) -> str:
    """The Markdown of a table; what makes it, where it was not measured yet."""
    if name in TABLES:
        return TABLES[name]()
    path = ROOT / name
    if not path.exists():
        return f"{NOT_MEASURED}: `python {MAKES[path.suffix].format(path.stem)}` makes this table.*"
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
    """Every scheme and its parts."""
    rows = [
        [
            f"`{scheme.name}`",
            ", ".join([str(scheme.activations or "–"), *scheme.parts.split(", ")[2:]]),  # and its remedies
            str(scheme.weights or "–"),
            "no" if scheme.outlier_threshold is None else "yes",
            IN_PAPER.get(scheme.name, "–"),
        ]
        for scheme in SCHEMES.values()
    ]
    headers = ["name", "activations", "weights", "outlier features in 16 bits", "in the paper"]
    return _markdown(headers, rows, texts=len(headers))


def gguf_types() -> str:
    """The types of models, as configurations call them, that are read from GGUF files."""
    return ", ".join(f"`{name}`" for name in MODEL_TYPES)


class System(NamedTuple):
    """A serving system: what it is here, and the published perplexity of a model under it, by the name of its source
    and what the model was under; None where a source states none for one model."""

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
    """What serving systems cost models of their sources, and what their rules cost SmolLM2-135M."""
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
    """What some schemes cost SmolLM2-135M, with their scatter, beside what they cost models of the paper."""
    rows = read_rows(ROOT / "results/kept/smollm2-135m/sweep")
    own, sizes = {row["scheme"]: row["cost"] for row in costs_of_schemes(rows)}, ("1.3b", "6.7b", "13b")

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
    """The exponentials of Figure 3b, of the kept runs and of the published rows."""
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
    """What kept plans of SmolLM2 leave exact, and cost on blocks that were not searched, with and without that."""
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
    """texts: so many columns from the left are text, the others numbers."""
    align = ["left"] * texts + ["right"] * (len(headers) - texts)
    rows = [[*row[:texts], *(NEGATIVE.sub("−", cell) for cell in row[texts:])] for row in rows]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align)


TABLES: dict[str, Callable[[], str]] = {
    "schemes": schemes,
    "systems": systems,
    "GGUF types": gguf_types,
    "smollm2-135m": smollm2,
    "five schemes": partial(smollm2, TELLING),
    "fits": fits,
    "plans": plans,
}


def main() -> None:
    """Fill every page, and say which ones changed and what is wrong."""
    failed = False
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after, problems = filled(before)
        changed, name = after != before, page.relative_to(ROOT)
        for line in [*(f"{name}: {problem}" for problem in problems), *([str(name)] if changed else [])]:
            print(line)
        failed = failed or bool(problems) or (changed and "--check" in sys.argv)
        if changed and "--check" not in sys.argv:
            page.write_text(after, encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
