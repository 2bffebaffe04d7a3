"""The tokens that carry the increase of the loss, as a figure, tables and sentences."""

from collections.abc import Mapping
from operator import itemgetter

import pandas as pd
from matplotlib.axes import Axes

from outliers.models.names import short_name
from outliers.show.legends import legend, variant_styles
from outliers.show.section import Context, Drawing, Finding, Section, together
from outliers.show.style import figure_function, panels_of
from outliers.show.tables import MISSING, Table, cell, scattered
from outliers.show.value import DEVIATIONS, RowsOrFrame, comparable_rows, exact, grouped, scattered_by, value_of
from outliers.show.words import part, span


@figure_function
def loss_by_position(rows: RowsOrFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the increase of the loss per predicted token, in nats, by position, one line per variant.

    Positions are grouped, each group twice as long as the one before; a point is the mean of its group.

    Args:
        rows: of the metric token_losses, of one model.
    """
    rows = [row for row in comparable_rows(rows) if row["metric"] == "token_losses.position"]
    axes = panels_of(ax, 1, 1, (5.6, 2.8)).item()
    for variant, style in variant_styles(rows).items():
        line = [row for row in rows if row["variant"] == variant]
        middles = [(row["first"] + row["last"]) / 2 for row in line]
        axes.plot(middles, [row["value"] / row["tokens"] for row in line], **style)
    axes.axhline(0, color="black", linewidth=0.6, zorder=0)
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xlim(left=-0.2)  # cuts the negative half of the symmetric scale
    axes.set(xlabel="position", ylabel="increase of the loss (nats)")
    axes.xaxis.set_major_formatter("{x:g}")
    legend(ax, axes, axes.lines[:-1], "right upper")
    return axes


TITLE = "Loss by token"
HALF = 0.5
SUMMARY = (
    "Increase of the loss under each variant, over all predicted tokens and for each of them; the fewest tokens that "
    "carry half of it, and their share. ±: the scatter of {}; of numbers of tokens, of rounding alone."
)
BY_POSITION = "Increase of the loss of a predicted token by its position, in groups that double; points are means."
OF_VARIANTS = (
    ("variant", "{variant}"),
    ("increase (nats)", lambda row: cell("+.2f", row["value"], row["value_bar"])),
    ("nats a token", lambda row: cell("+.4f", row["value_a_token"], row["value_bar_a_token"])),
    ("tokens", "{tokens:,}"),
    ("carry half", scattered("half", ".0f")),
    ("of the tokens", lambda row: MISSING if pd.isna(row["half"]) else part(row["half_a_token"])),
)
OF_PART = (
    ("tokens", "{tokens:.0f}"),
    ("of the tokens", "{tokens_share:.1%}"),
    ("of the increase", "{increase_share:.1%}"),
    ("nats a token", scattered("each", "+.4f")),
)
TABLES = (  # metric without its prefix: title, columns of its own, whether a page folds it
    ("type", "by type of the predicted token", (("type", "{type}"), *OF_PART), False),
    ("position", "by position", (("positions", lambda row: span(int(row["first"]), int(row["last"]))), *OF_PART), True),
    ("token", "by token, those with the largest", (("token", "{name}"), ("type", "{type}"), *OF_PART), True),
    (
        "context",
        "by context, the places with the largest",
        (
            ("context", "{around}"),
            ("sequence", "{sequence:.0f}"),
            ("position", "{position:.0f}"),
            ("loss without", "{loss:.3f}"),
            ("increase (nats)", "{value:+.3f}"),
        ),
        False,
    ),
)
WORDS = ("type", "positions", "token", "context")


def token_losses_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show the increase of the loss of each model under each variant."""
    sections = [_of_model(model, group) for model, group in grouped(rows, itemgetter("model")).items()]
    return together(TITLE, sections)._replace(rows=rows)


def _of_model(model: str, rows: list[dict]) -> Section:
    name, by_variant = short_name(model), grouped(rows, itemgetter("variant"))
    ending = name.replace("/", "-")
    totals = {variant: _summary(variant, group) for variant, group in by_variant.items()}
    caption = f"{name}: {SUMMARY.format(scattered_by(rows))}"
    tables = [_summary_table(f"token_losses_{ending}", caption, list(totals.values()))]
    findings = [
        Finding(text, tables[0].name) for total in totals.values() if total["rises"] for text in _sentences(name, total)
    ]
    for number, (variant, group) in enumerate(by_variant.items(), 1):
        if totals[variant]["value"]:
            tables += [_loss_table(f"{ending}_{number}", name, variant, group, *shown) for shown in TABLES]
    drawing = Drawing.of(f"loss_by_position_{ending}", f"{name}: {BY_POSITION}", loss_by_position(rows))
    return Section(TITLE, rows, tables, [drawing], findings=findings)


def _summary(variant: str, rows: list[dict]) -> dict:
    """Return the row of a variant in the first table. `rises`: whether the loss rises beyond its scatter."""
    by_metric = grouped(rows, itemgetter("metric"))
    (total,) = by_metric["token_losses.total"]
    carriers = by_metric["token_losses.carriers"] if _has_shares(total) else []
    half = next((row for row in carriers if row["share"] == HALF), {})
    value = value_of(total)
    types = max(by_metric["token_losses.type"], key=lambda row: row["value"])
    return {
        "variant": variant,
        "value": value.mean,
        "value_deviation": value.deviation,
        "value_error": value.error,
        "value_bar": value.bar,
        "tokens": total["tokens"],
        "half": half.get("value"),
        "half_deviation": half.get("standard_deviation"),
        "type": types["type"],
        "type_share": types["value"] / value.mean if value.mean else None,
        "type_tokens": types["tokens"] / total["tokens"],
        "rises": bool(half) and value.deviation is not None and value.is_above(exact(0)),
    }


def _has_shares(total: Mapping) -> bool:
    """Return whether parts of an increase can be given as shares of it: not if it lies within its scatter."""
    value = value_of(total)
    return value.mean > DEVIATIONS * (value.bar or 0)


def _summary_table(name: str, caption: str, totals: list[dict]) -> Table:
    data = pd.DataFrame(totals)
    of_a_token = data[["value", "value_bar", "half"]].astype(float).div(data["tokens"], axis=0)
    shown = data.join(of_a_token.add_suffix("_a_token"))
    return Table.of(name, caption, OF_VARIANTS, data.drop(columns="value_bar"), shown)


def _sentences(name: str, total: Mapping) -> list[str]:
    share = total["half"] / total["tokens"]
    each = cell(".4f", total["value"], total["value_bar"], 1 / total["tokens"]).replace("±", " ± ")
    return [
        f"Under {total['variant']}, {total['half']:,.0f} of {total['tokens']:,} predicted tokens ({part(share)}) carry "
        f"half of the increase of the loss of {name}, {each} nats a token.",
        f"Tokens of the type '{total['type']}' carry {part(total['type_share'])} of the increase of the loss of {name} "
        f"under {total['variant']}, and are {part(total['type_tokens'])} of the tokens.",
    ]


def _loss_table(
    ending: str, name: str, variant: str, rows: list[dict], kind: str, what: str, columns: tuple, folded: bool
) -> Table:
    """Make the table of the increases of a kind of rows, such as positions or contexts; what: continues its caption."""
    (total,) = (row for row in rows if row["metric"] == "token_losses.total")
    own = [_shares(row, total) for row in rows if row["metric"] == f"token_losses.{kind}"]
    fields = ["type", "first", "last", "token", "name", "others", "sequence", "position", "around", "loss", "value"]
    each = ["each", "each_deviation", "each_error"]
    data = pd.DataFrame(own, columns=[*fields, "tokens", "tokens_share", "increase_share", *each])
    caption = f"{name} under {variant}: increase of the loss {what}."
    return Table.of(
        f"losses_by_{kind}_{ending}", caption, columns, data.dropna(axis=1, how="all"), data, texts=WORDS, folded=folded
    )


def _shares(row: Mapping, total: Mapping) -> dict:
    """Add to a row its shares of all tokens and of the whole increase."""
    if "tokens" not in row:
        return dict(row)
    value = value_of(row)
    return {
        "type": MISSING,
        **row,
        "name": row.get("token_text", f"{row.get('others', 0):,} others"),
        "tokens_share": row["tokens"] / total["tokens"],
        "increase_share": row["value"] / total["value"] if _has_shares(total) else None,
        "each": value.mean / row["tokens"],
        "each_deviation": None if value.deviation is None else value.deviation / row["tokens"],
        "each_error": None if value.error is None else value.error / row["tokens"],
    }
