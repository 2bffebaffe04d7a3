"""Greedy continuations of one prompt under several variants, as a table and sentences."""

from itertools import takewhile

import pandas as pd

from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.section import Context, Finding, Section, together
from outliers.show.tables import Table
from outliers.show.value import grouped

COLUMNS = (
    ("variant", "{variant}"),
    ("tokens as fp32", "{shared:.0f}"),
    ("continuation", lambda row: repr(row["continuation"])),
)


def continuation_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show the continuations of each model; rows of other metrics are left out."""
    of_models = grouped([row for row in rows if row["metric"] == "continuation"], lambda row: row["model"]).values()
    return together("Continuations", [_of_model(of_model, number) for number, of_model in enumerate(of_models, 1)])


def _of_model(rows: list[dict], number: int) -> Section:
    name, ending = short_name(rows[0]["model"]), f"_{number}" if number > 1 else ""
    exact = next((row["continuation_ids"] for row in rows if row["variant"] == BASELINE), None)
    data = pd.DataFrame(rows).reindex(columns=["variant", "continuation", "continuation_ids"])
    data["shared"] = [None if exact is None else _shared_count(exact, ids) for ids in data.pop("continuation_ids")]
    caption = f"Greedy continuations by {name} of: {rows[0]['prompt_text']!r}"
    table = Table.of(f"continuations{ending}", caption, COLUMNS, data, texts=("variant", "continuation"))
    others = data[data["variant"] != BASELINE].to_dict("records") if exact is not None else []
    findings = [Finding(_sentence(name, row, len(exact)), table.name) for row in others]
    return Section(f"Continuations by {name}", rows, tables=[table], findings=findings)


def _shared_count(exact: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(exact, other, strict=False)))


def _sentence(name: str, row: dict, tokens: int) -> str:
    if row["shared"] == tokens:
        return f"Under {row['variant']} {name} continues a text with the same {tokens} tokens."
    return f"Under {row['variant']} {name} continues a text with other tokens, from token {row['shared'] + 1:.0f} on."
