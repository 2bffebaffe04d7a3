"""The losses of tokens with and without a variant, and their differences by kinds of tokens."""

import math
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import LogitsComputation, by_seed
from outliers.metrics.perplexity import LossReader
from outliers.models.anatomy import family_of
from outliers.models.anatomy.examples import Block
from outliers.show import units
from outliers.subjects.causal import ModelWithText
from outliers.text.tokens import named_ids
from outliers.tracing.tokens import BEFORE, TokenNames, context_of, token_name, windows_of
from outliers.variants.draw import value_over_draws

LISTED = 16  # number of listed tokens, and of contexts; all other tokens share a row
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the increase; the fewest tokens that carry each share are counted


class TokenLossReader:
    """A reader of the losses of each prediction without and with the variant, float64 (2, predictions)."""

    compares = True

    def __init__(self, model: PreTrainedModel, block: Block, targets: torch.Tensor):
        self.exact, self.changed = (LossReader(model, block, targets) for _ in range(2))

    def add(self, start: int, logits: torch.Tensor, exact: torch.Tensor) -> None:
        self.exact.add(start, exact, None)
        self.changed.add(start, logits, None)

    def result(self) -> torch.Tensor:
        """Return both losses in host memory; raise BrokenModel if one is NaN or inf."""
        return torch.stack([self.exact.losses(), self.changed.losses()]).cpu()


def _values(draws: list[list[torch.Tensor]], subject: ModelWithText) -> list[dict]:
    """Return the values of a row, in nats: means over draws of sums over the predicted tokens of all blocks."""
    targets = [family_of(subject.config).targets(block) for block in subject.blocks]
    by_sequence = by_seed(targets, subject.seed_count)  # the seeds of a draw follow each other
    tables = [_token_table(losses, by_sequence[draw % subject.seed_count]) for draw, losses in enumerate(draws)]
    table = pd.concat(tables, keys=range(len(tables)), names=["draw"]).reset_index(["draw", "sequence"])
    tokens = pd.unique(table["token"]).tolist()
    contexts = _contexts(table, by_sequence)
    shown = {token for *_, window in contexts for token in window} | set(tokens)
    names = named_ids(subject.config, subject.preprocessor, [id for id in shown if id >= 0])
    table["type"] = table["token"].map({token: names[token][1] for token in tokens})
    table["first"] = table["position"].map(lambda position: 1 << position.bit_length() >> 1)
    total = partial(_sum, len(draws), len(by_sequence[0]))
    before = {"loss": float(table["before"].mean())}
    values = [{"metric": "token_losses.total", **before, **total(table), **_units(draws)}, *_carriers(table)]
    values += [{"metric": "token_losses.type", "type": kind, **total(part)} for kind, part in table.groupby("type")]
    for first, part in table.groupby("first"):
        ends = {"first": int(first), "last": max(2 * int(first) - 1, 0)}
        values.append({"metric": "token_losses.position", **ends, **total(part)})
    values += _tokens(table, names, total)
    for (sequence, position), place, window in contexts:
        at = {"sequence": sequence, "position": position, "token": window[BEFORE]}
        text = {"token_text": token_name(window[BEFORE], names), "around": context_of(window, names)}
        values.append({"metric": "token_losses.context", **at, **text, **place})
    return [value | {"unit": "nat" if "loss" in value or "tokens" in value else "1"} for value in values]


def _token_table(losses: list[torch.Tensor], targets: list[tuple[torch.Tensor, torch.Tensor]]) -> pd.DataFrame:
    """Return predicted tokens with their losses; targets: tokens and positions of each sequence."""
    parts = [
        pd.DataFrame({"token": tokens[at], "position": at, "before": before, "increase": after - before})
        for (before, after), (tokens, at) in zip(losses, targets, strict=True)
    ]
    return pd.concat(parts, keys=range(len(parts)), names=["sequence"])


def _sum(draws: int, sequences: int, part: pd.DataFrame) -> dict:
    """Return the increase over the tokens of a part, over draws, and the rounded number of these tokens per draw.

    If there are several sequences, include the standard error over the text.
    """
    by_draw = part.groupby("draw")["increase"].agg(math.fsum).reindex(range(draws), fill_value=0.0)
    by_sequence = part.groupby("sequence")["increase"].agg([math.fsum, "size"]).reindex(range(sequences), fill_value=0)
    sums, counts = (by_sequence / draws).to_numpy().T.tolist()
    error = units.standard_error(units.residuals(sums, counts, sum(counts)))
    of_text = {} if error is None else {"standard_error": error}
    return {**value_over_draws(by_draw.tolist()), **of_text, "tokens": -(-len(part) // draws)}


def _units(draws: list[list[torch.Tensor]]) -> dict:
    """Return the fields of a row for the increase over all tokens, whose units are the sequences."""
    increases = [[(after - before).tolist() for before, after in losses] for losses in draws]
    by_sequence = [[(math.fsum(increase), len(increase)) for increase in losses] for losses in increases]
    return units.fields(by_sequence, sum(count for losses in by_sequence for _, count in losses) / len(draws))


def _carriers(table: pd.DataFrame) -> list[dict]:
    """Return the least number of tokens that carry each of `SHARES` of the increase; [] if a draw has no increase."""
    counts = []
    for _, part in table.groupby("draw"):
        carried = part["increase"].sort_values(ascending=False).cumsum().to_numpy()
        total = math.fsum(part["increase"])
        if total <= 0:
            return []
        counts.append([int((carried >= share * total).argmax()) + 1 for share in SHARES])
    by_share = zip(SHARES, zip(*counts, strict=True), strict=True)
    return [
        {"metric": "token_losses.carriers", "share": share, **value_over_draws(list(map(float, by_draw)))}
        for share, by_draw in by_share
    ]


def _tokens(table: pd.DataFrame, names: TokenNames, total: Callable[[pd.DataFrame], dict]) -> list[dict]:
    sums = table.groupby("token")["increase"].sum().sort_values(ascending=False, kind="stable")
    listed = sums[:LISTED][sums > 0].index.tolist()
    parts = ((token, *names[token], table[table["token"] == token]) for token in listed)
    values = [{"token": token, "token_text": name, "type": kind, **total(part)} for token, name, kind, part in parts]
    others = table[~table["token"].isin(listed)]
    if listed and len(others):
        values.append({"others": len(sums) - len(listed), **total(others)})
    return [{"metric": "token_losses.token", **value} for value in values]


def _contexts(table: pd.DataFrame, by_sequence: list[list]) -> list[tuple]:
    """Return the positions with the largest increases: sequence and position, values, and the surrounding ids."""
    contexts = []
    means = table.groupby(["sequence", "position"])[["increase", "before"]].mean()
    for place, row in means.sort_values("increase", ascending=False, kind="stable")[:LISTED].iterrows():
        if row["increase"] > 0:
            sequence, position = map(int, place)
            tokens = next(of_seed[sequence][0] for of_seed in by_sequence if position in of_seed[sequence][1])
            window = windows_of(tokens, -1)[position].tolist()
            values = {"value": float(row["increase"]), "loss": float(row["before"])}
            contexts.append(((sequence, position), values, window))
    return contexts


COMPUTATION = LogitsComputation(TokenLossReader, _values, of_subject=True)
