"""Table 3 of the paper: the largest model that fits on given hardware, and the memory that models need."""

from functools import partial

import pandas as pd

from outliers.metrics.records import BITS, GIB
from outliers.models.names import known_configs, short_name
from outliers.show.axes import count_label
from outliers.show.section import Context, Finding, Section
from outliers.show.tables import Table, scattered
from outliers.show.value import grouped
from outliers.show.words import count, part

ABOUT_THE_SAME = 0.95  # share of the most parameters from which models are named together, as OPT-175B and BLOOM
HARDWARE = ["owner", "hardware", "gpus", "gigabytes"]
NEEDS = {"weights 16": "16-bit weights", "weights 8": "8-bit weights", "cache": "cache", "activations": "activations"}
TOTALS = {"total 16": "16-bit total", "total 8": "8-bit total"}
LOADED = {"loaded 16": "16-bit as loaded", "loaded 8": "8-bit as loaded"}


def memory_section(rows: list[dict], _context: Context | None = None) -> Section:
    fitting, needs = largest(rows), footprints(rows)
    tables = [largest_table(fitting, rows)] if len(fitting) else []
    tables.append(footprints_table(needs, rows[0]))
    findings = memory_findings(fitting, needs)
    return Section("Memory at inference", rows, tables=tables, findings=findings)


def largest(rows: list[dict]) -> pd.DataFrame:
    """Return the largest model that fits, one row per hardware in the order of the rows.

    Columns: owner, hardware, gpus, gigabytes; "8-bit" and "16-bit", the largest candidate by parameters, joined by " /
    " with others of about the same size; "8-bit, any" and "16-bit, any", the largest of all models if that is larger
    than any candidate, otherwise None.
    """
    fits = (row for row in rows if row["metric"] == "fits")
    places = grouped(fits, lambda row: tuple(row.get(field) for field in HARDWARE))
    table = [dict(zip(HARDWARE, place, strict=True)) | _largest_of_all(fit) for place, fit in places.items()]
    columns = [*HARDWARE, *(f"{bits}-bit{any_}" for any_ in ("", ", any") for bits in sorted(BITS))]
    return pd.DataFrame(table, columns=columns)


def _largest_of_all(rows: list[dict]) -> dict[str, str | None]:
    cells: dict[str, str | None] = {}
    for bits in BITS:
        fitting = [row for row in rows if row["bits"] == bits and row["value"]]
        candidates = [row for row in fitting if row["candidate"]]
        size, size_of_candidates = _most(fitting), _most(candidates)
        cells[f"{bits}-bit"] = _names(candidates, size_of_candidates)
        cells[f"{bits}-bit, any"] = _names(fitting, size) if size > size_of_candidates else None
    return cells


def _most(rows: list[dict]) -> int:
    return max((row["parameters"] for row in rows), default=0)


def _names(rows: list[dict], size: int) -> str:
    same = dict.fromkeys(row["model"] for row in rows if row["parameters"] >= ABOUT_THE_SAME * size)
    return " / ".join(map(_paper_name, same)) or "none"


def _paper_name(model: str) -> str:
    return known_configs().get(model, {}).get("shown", short_name(model))


def largest_table(table: pd.DataFrame, rows: list[dict]) -> Table:
    """Make Table 3 of the result of `largest`, with a larger model that is no candidate in brackets."""
    run = next(row for row in rows if row["metric"] == "fits")
    caption = (
        f"Largest model that fits at batch {run['batch']} with {run['context']} tokens of context (half input, half "
        f"output for an encoder-decoder) and {run['headroom']:g} GiB of each GPU left free. Whole layers fill the GPUs "
        "in order; a GPU's GB are GiB."
    )
    if table[["8-bit, any", "16-bit, any"]].notna().any(axis=None):
        caption += (
            " In brackets: the largest of all known models, where it is larger than every candidate of the table."
        )
    owners = [
        (header, lambda row, field=field: row[field] or "")
        for header, field in (("class", "owner"), ("hardware", "hardware"))
        if table[field].notna().any()
    ]
    columns = [
        *owners,
        ("GPU memory", "{gigabytes:g} GB"),
        ("8-bit", partial(_fitting, 8)),
        ("16-bit", partial(_fitting, 16)),
    ]
    return Table.of("table3", caption, columns, table, texts=len(columns))


def _fitting(bits: int, row: dict) -> str:
    largest, larger = row[f"{bits}-bit"], row[f"{bits}-bit, any"]
    return largest if pd.isna(larger) else f"{largest} ({larger})"


def footprints(rows: list[dict]) -> pd.DataFrame:
    """Return the bytes that models need, one row per model (index) in the order of the rows.

    Columns: parameters, context, "weights 16", "weights 8", cache, activations; "total 16" and "total 8", their sums;
    "loaded 16" and "loaded 8", the totals if transformers keeps some weights in float32, NaN if it keeps none.
    """
    wide: dict[str, dict] = {}
    for row in rows:
        if row["metric"] != "fits":
            name = f"{row['metric']} {row['bits']}" if "bits" in row else row["metric"]
            wide.setdefault(row["model"], {"context": row["context_used"]})[name] = row["value"]
    table = pd.DataFrame.from_dict(wide, orient="index").reindex(columns=["parameters", "context", *NEEDS, *LOADED])
    for bits in BITS:
        table[f"total {bits}"] = table[f"weights {bits}"] + table["cache"] + table["activations"]
        table[f"loaded {bits}"] += table["cache"] + table["activations"]
    return table[["parameters", "context", *NEEDS, *TOTALS, *LOADED]].rename_axis("model")


def footprints_table(table: pd.DataFrame, run: dict) -> Table:
    """Make the table of the result of `footprints` in GiB; run: a row of the measurement."""
    of_tokens = f"{_context_words(table, run['context'])} tokens of context"
    caption = f"Memory requirement of models in GiB at batch {run['batch']} with {of_tokens}."
    loaded = LOADED if table["loaded 8"].notna().any() else {}
    if loaded:
        caption += " As loaded: with the weights that transformers keeps in float32 in a float16 or 8-bit model."
    columns = [
        ("model", lambda row: _paper_name(row["model"])),
        ("parameters", lambda row: count_label(row["parameters"])),
        *((header, scattered(name, ".2f", 1 / GIB)) for name, header in (NEEDS | TOTALS | loaded).items()),
    ]
    return Table.of("footprints", caption, columns, table.reset_index())


def _context_words(table: pd.DataFrame, most: int) -> str:
    less = [f"{_paper_name(model)} {context}" for model, context in table["context"].items() if context < most]
    return f"{most} ({', '.join(less)})" if less else str(most)


def memory_findings(largest: pd.DataFrame, footprints: pd.DataFrame) -> list[Finding]:
    """State on how much hardware a larger model fits in 8 bits, and the share of memory that models need in 8 bits.

    largest, footprints: the results of the functions of these names.
    """
    other = largest[largest["8-bit"] != largest["16-bit"]]
    shares = (footprints["total 8"] / footprints["total 16"]).dropna()
    findings = [Finding(_fit_clause(other, len(largest)), "table3", of_every=True)] if len(largest) else []
    findings += [Finding(_share_clause(shares), "footprints", of_every=True)] if len(shares) else []
    loaded = footprints["loaded 8"].dropna()
    return findings + ([Finding(_growth_clause(footprints.loc[loaded.idxmax()]), "footprints")] if len(loaded) else [])


def _fit_clause(other: pd.DataFrame, every: int) -> str:
    if other.empty:
        return "On no hardware does a larger model fit in 8 bits than in 16 bits."
    row = other.iloc[0]
    where = f"{row['hardware']} of {row['gigabytes']:g} GB"
    kinds = f" on {count(len(other))} of {count(every)} kinds of hardware" if every > 1 else ""
    example = f"{row['8-bit']} instead of {row['16-bit']} on {where}"
    return f"A larger model fits in 8 bits than in 16 bits{kinds}: {example}."


def _share_clause(shares: pd.Series) -> str:
    low, high = part(shares.min()), part(shares.max())
    if len(shares) == 1:
        return f"In 8 bits, {shares.index[0]} needs {low} of its memory in 16 bits."
    return f"In 8 bits, models need {low} ({shares.idxmin()}) to {high} ({shares.idxmax()}) of their memory in 16 bits."


def _growth_clause(row: pd.Series) -> str:
    loaded, total = (f"{row[name] / GIB:.1f} GiB" for name in ("loaded 8", "total 8"))
    model = _paper_name(row.name)
    return f"transformers keeps some weights of {model} in float32; as loaded in 8 bits it needs {loaded}, not {total}."
