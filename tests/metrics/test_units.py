"""Standard errors over a text: the closed formula beside a bootstrap, and the rules of lm-eval and llama.cpp."""

import math
import random
import statistics

import numpy as np
import pandas as pd
import pytest
import torch

from outliers import Cells, Emergence, load_model, load_text, load_tokenizer, readers, run, super_weights, variant
from outliers.commands.ablate import Ablation
from outliers.metrics.perplexity import variant_losses
from outliers.metrics.token_losses import _sum
from outliers.show import units
from outliers.show.claims import Claim, say
from outliers.show.tables import cell, scatter_note
from outliers.show.value import Value, exact, value_of, with_paired_errors
from outliers.show.words import percent
from outliers.views.ablation import ablation_section
from outliers.views.causes import final_values
from outliers.views.emergence import by_model, emergence_table
from outliers.views.perplexity import sweep_findings
from tests.conftest import STORIES, needs_shared

RESAMPLES = 2000
MODELS = ["pocket/gpt2-1.7m", "pocket/opt-1.7m", pytest.param(str(STORIES), marks=needs_shared, id="stories260K")]


def measured(model: str, variants: list[str], folder, metrics=("perplexity",), **fields) -> list[dict]:
    fields = {"block": 48, "blocks": 48} | fields
    return run(Cells(models=[model], metrics=list(metrics), variants=variants, **fields), folder)


def bootstrap(statistic, *columns: list[float]) -> float:
    """The standard deviation of a statistic of the sums of columns, over resamples of their units."""
    table, generator = np.array(columns), np.random.default_rng(0)
    resamples = (generator.integers(table.shape[1], size=table.shape[1]) for _ in range(RESAMPLES))
    return statistics.stdev(statistic(*table[:, chosen].sum(1)) for chosen in resamples)


@pytest.mark.parametrize("model", MODELS)
def test_closed_formulas_equal_a_bootstrap(model, tmp_path):
    exact, absmax = measured(model, ["fp32", "absmax"], tmp_path)
    sums, counts = (exact["unit_sums"], absmax["unit_sums"]), exact["unit_counts"]
    alone = bootstrap(lambda total, count: math.exp(total / count), sums[1], counts)
    assert absmax["standard_error"] == pytest.approx(alone, rel=0.05)
    difference = bootstrap(lambda one, other, count: math.exp(other / count) - math.exp(one / count), *sums, counts)
    assert absmax["paired_error"] == pytest.approx(difference, rel=0.05)
    increase = bootstrap(lambda one, other, count: math.exp((other - one) / count) - 1, *sums, counts)
    assert value_of(absmax).increase_over(value_of(exact)).error == pytest.approx(increase, rel=0.05)
    assert absmax["paired_error"] < absmax["standard_error"] / 3, "pairs share what is hard in the text"


def test_losses_by_token_have_the_errors_of_their_pairs(tmp_path):
    exact, changed, *rows = measured("pocket/gpt2-0.1m", ["fp32", "w4a4"], tmp_path, ["perplexity", "token_losses"])
    exact, changed = (row for row in (exact, changed, *rows) if row["metric"] == "perplexity")
    (total,) = (row for row in rows if row["metric"] == "token_losses.total" and row["variant"] == "w4a4")
    increases = np.subtract(changed["unit_sums"], exact["unit_sums"]).tolist()
    assert total["unit_sums"] == pytest.approx(increases, rel=1e-6)
    assert value_of(total).minus(Value(0.0, 0.0)).error == pytest.approx(total["standard_error"])


def test_errors_of_parts_of_the_tokens_equal_a_bootstrap():
    generator = np.random.default_rng(1)
    sequences = np.repeat(np.arange(300), generator.integers(0, 9, size=300))
    part = pd.DataFrame({"draw": 0, "sequence": sequences, "increase": generator.gamma(1, 3, size=len(sequences))})
    by_sequence = part.groupby("sequence")["increase"].agg(["sum", "size"]).reindex(range(300), fill_value=0)
    expected = bootstrap(lambda total, count: len(part) * total / count, *by_sequence.to_numpy().T)
    assert _sum(1, 300, part)["standard_error"] == pytest.approx(expected, rel=0.05)


def test_errors_of_costs_equal_a_bootstrap():
    """Of a feature at a place, relative to the perplexity; and of a single weight, in nats."""
    model, blocks = load_model("pocket/gpt2-0.1m"), load_text("sample", load_tokenizer("pocket/gpt2-0.1m"), 48, 48)
    weight = super_weights(model, blocks, controls=1).iloc[0]
    found = readers(model, blocks, features=[3], places=["q"], controls=2)
    feature = found[found["subject"] == "feature"].iloc[0]
    losses = variant_losses(model, blocks, list(map(variant, ("fp32", "zero(3@q)", weight["variant"]))))
    before, at_q, without = ([loss.total for loss in of_variant] for of_variant in losses)
    counts = [47] * 48
    expected = bootstrap(lambda one, other, count: math.exp((other - one) / count) - 1, before, at_q, counts)
    assert feature["cost_error"] == pytest.approx(expected, rel=0.05)
    expected = bootstrap(lambda one, other, count: (other - one) / count, before, without, counts)
    assert weight["error"] == pytest.approx(expected, rel=0.05)


def test_a_trace_has_the_error_of_its_perplexity(tmp_path):
    rows = run(Emergence(models=["pocket/gpt2-0.1m"], block=48, blocks=8), tmp_path)
    (perplexity,) = (row for row in rows if row["metric"] == "perplexity")
    (model,) = by_model(rows).to_dict("records")
    assert model["perplexity_error"] == perplexity["standard_error"] > 0
    assert f"{cell('.1f', perplexity['value'], perplexity['standard_error'])} " in emergence_table(rows).printed
    (top1,) = (row for row in rows if row["metric"] == "top1_softmax")
    assert model["top1_softmax_error"] == top1["standard_error"] > 0
    assert f" {cell('.1f', top1['value'], top1['standard_error'], 100)}%" in emergence_table(rows).printed


def test_an_ablation_has_the_errors_of_its_perplexities(tmp_path):
    rows = run(Ablation(model="pocket/gpt2-0.1m", features=[3], block=48, blocks=8), tmp_path)
    perplexities = [row for row in rows if row["metric"] == "perplexity"]
    by_subject = {row["subject"]: row for row in perplexities if row["subject"] in ("none", "outliers")}
    (table,) = ablation_section(rows).tables
    errors = table.data.set_index("subject")["perplexity_error"]
    nothing, removed = by_subject["none"], by_subject["outliers"]
    assert errors["none"] == pytest.approx(nothing["standard_error"])
    assert errors["outliers"] == pytest.approx(removed["paired_error"])
    shown = [cell(".2f", row["value"], errors[subject]) for subject, row in by_subject.items()]
    assert all("±" in text and text in table.printed for text in shown)


def test_costs_of_trained_models_are_paired():
    """Under a scheme, with those of the same run and seed without one."""
    about = {"run": "plain", "seed": 0, "checkpoint": "step-9", "steps": 9}
    more = [loss + 1 + 0.01 * number for number, loss in enumerate(HARD)]
    rows = [
        row(sums, "fp32", standard_deviation=0.0) | about | {"metric": f"perplexity.{name}"}
        for name, sums in (("fp32", HARD), ("absmax", more))
    ]
    others = {"perplexity": 9.0, "kurtosis_feature.attn_in": 3.0, "kurtosis_feature.ffn_in": 3.0}
    others = [rows[0] | {"metric": name, "value": value} for name, value in others.items()]
    (end,) = final_values([*rows, *others]).to_dict("records")
    fp32, absmax = map(value_of, rows)
    assert end["cost.absmax_error"] == pytest.approx(100 * absmax.increase_over(fp32).error)
    of_other_seed = [one | {"seed": 1, "unit_sums": one["unit_counts"]} for one in rows]
    *_, paired = with_paired_errors([*of_other_seed, *rows])
    assert paired["paired_error"] == pytest.approx(absmax.minus(fp32).error)


def test_units_of_a_row_are_the_losses_of_blocks(tmp_path):
    """As transformers computes them."""
    (row,) = measured("pocket/gpt2-0.1m", ["fp32"], tmp_path, blocks=3)
    model, tokenizer = load_model("pocket/gpt2-0.1m"), load_tokenizer("pocket/gpt2-0.1m")
    blocks = load_text("sample", tokenizer, 48, 3)
    expected = [47 * model(block[None], labels=block[None]).loss.item() for block in blocks]
    assert row["unit_sums"] == pytest.approx(expected, rel=1e-5)
    assert row["unit_counts"] == [47] * 3


def test_units_are_documents_where_these_stand_for_themselves(tmp_path):
    (row,) = measured("pocket/gpt2-0.1m", ["fp32"], tmp_path, block=256, blocks=8, documents=True)
    assert len(row["unit_sums"]) > 8
    assert math.exp(sum(row["unit_sums"]) / sum(row["unit_counts"])) == pytest.approx(row["value"], rel=1e-9)


@pytest.mark.parametrize("metric", ["agreement", "top1"])
def test_units_add_up_to_every_value(metric, tmp_path):
    for row in measured("pocket/gpt2-0.1m", ["absmax"], tmp_path, [metric], blocks=4):
        assert sum(row["unit_sums"]) / sum(row["unit_counts"]) == pytest.approx(row["value"], rel=1e-9)
        by_block = [total / count for total, count in zip(row["unit_sums"], row["unit_counts"], strict=True)]
        assert row["standard_error"] == pytest.approx(statistics.stdev(by_block) / 2, rel=1e-6)


def test_units_are_means_over_draws(tmp_path):
    (row,) = measured("pocket/gpt2-0.1m", ["absmax"], tmp_path, blocks=3, draws=2)
    by_mean = math.exp(sum(row["unit_sums"]) / sum(row["unit_counts"]))
    assert by_mean == pytest.approx(row["value"], rel=1e-4)
    assert row["standard_deviation"] > 0


def test_one_block_has_no_error(tmp_path):
    rows = measured("pocket/gpt2-0.1m", ["fp32", "absmax"], tmp_path, blocks=1)
    assert not any("standard_error" in row or "paired_error" in row for row in rows)
    assert value_of(rows[0]).bar is None
    assert "±" not in cell(".2f", *value_of(rows[1]).shown)


def losses(count: int) -> list[float]:
    generator = random.Random(0)
    return [generator.gammavariate(1, 3) for _ in range(count)]


def test_tokens_as_units_are_the_rule_of_llama_cpp():
    """Its perplexity tool: sqrt((mean of squares − square of mean) / (tokens − 1)) times the perplexity."""
    found = losses(500)
    mean = sum(found) / len(found)
    theirs = math.exp(mean) * math.sqrt((sum(loss**2 for loss in found) / len(found) - mean**2) / (len(found) - 1))
    residuals = units.residuals(found, [1] * len(found), math.exp(mean))
    assert units.standard_error(residuals) == pytest.approx(theirs, rel=1e-12)


def test_questions_as_units_are_the_rule_of_lm_eval():
    """`mean_stderr`, and its bootstrap of a perplexity over documents."""
    metrics = pytest.importorskip("lm_eval.api.metrics")
    right = [float(loss < 2) for loss in losses(300)]
    found = units.standard_error(units.residuals(right, [1] * len(right)))
    assert found == pytest.approx(metrics.mean_stderr(right), rel=1e-12)
    counts = [1 + number % 7 for number in range(300)]
    sums = [loss * count for loss, count in zip(losses(300), counts, strict=True)]
    perplexity = metrics.weighted_perplexity([(-total, count) for total, count in zip(sums, counts, strict=True)])
    theirs = bootstrap(lambda total, count: math.exp(total / count), sums, counts)
    assert units.standard_error(units.residuals(sums, counts, perplexity)) == pytest.approx(theirs, rel=0.05)


def row(sums: list[float], variant: str = "absmax", **fields) -> dict:
    value = math.exp(sum(sums) / len(sums) / 10)
    about = {"metric": "perplexity", "model": "m", "variant": variant, "tokens_hash": "t", "value": value}
    return about | {"unit_sums": sums, "unit_counts": [10] * len(sums)} | fields


HARD = [10.0, 40.0, 20.0, 30.0, 12.0, 36.0, 24.0, 28.0]  # losses of blocks, which differ much


def test_variants_pair_with_each_other_and_not_by_their_own_errors():
    first = value_of(row([loss + 1 for loss in HARD], standard_deviation=0.0))
    second = value_of(row([loss + 1 + 0.01 * number for number, loss in enumerate(HARD)], standard_deviation=0.0))
    baseline = value_of(row(HARD, "fp32", standard_deviation=0.0))
    assert second.is_above(first), "each block costs more"
    assert second.increase_over(baseline).is_above(first.increase_over(baseline))
    of_other_text = second._replace(pairs=second.pairs._replace(text="other"))
    assert not of_other_text.is_above(first), "by their own errors nothing is seen"


def test_the_bar_is_of_text_and_rounding_together():
    baseline, cost = value_of(row(HARD, "fp32")), [1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.3, 0.7]
    changed = value_of(row([loss + more for loss, more in zip(HARD, cost, strict=True)], standard_deviation=0.05))
    increase = changed.increase_over(baseline)
    assert increase.bar == pytest.approx(math.hypot(increase.error, 0.05 / baseline.mean))
    assert increase.error == pytest.approx((1 + increase.mean) * statistics.stdev(cost) / 10 / math.sqrt(8))
    assert increase.is_above(exact(0))
    noisy = increase._replace(deviation=increase.mean)
    assert not noisy.is_above(exact(0)), "rounding counts"


def test_few_blocks_bear_no_claim():
    baseline, changed = (row([loss + more for loss in HARD], "fp32", standard_deviation=0.0) for more in (0, 1))
    assert value_of(changed).increase_over(value_of(baseline)).is_above(exact(0))
    for of_row in (baseline, changed):
        of_row["unit_sums"], of_row["unit_counts"] = of_row["unit_sums"][:7], of_row["unit_counts"][:7]
    cost = value_of(changed).increase_over(value_of(baseline))
    assert not cost.is_above(exact(0)), "seven are fewer than eight"
    assert say(Claim("table", by="cost", against=[0], yes="costs", no="costs nothing"), [{"cost": cost}]) == []
    assert sweep_findings([changed | {"variant": "absmax", "cost": cost}], {"m": "m"}) == []


def test_rows_without_units_are_as_they_were():
    old = {"metric": "perplexity", "model": "m", "variant": "absmax", "value": 9.0, "standard_deviation": 0.1}
    assert value_of(old) == Value(9.0, 0.1)
    assert value_of(old).increase_over(exact(6.0)).bar == pytest.approx(0.1 / 6)
    assert with_paired_errors([old, old | {"variant": "fp32"}]) == [old, old | {"variant": "fp32"}]
    assert scatter_note([old | {"draws": 4}]).startswith("Mean ± standard deviation over 4 draws")


def test_a_note_says_what_the_bar_is():
    rows = with_paired_errors(
        [row(HARD, "fp32", standard_error=1.0), row([loss + 1 for loss in HARD], standard_error=1)]
    )
    assert "standard error over the text (8 blocks) of the difference" in scatter_note(rows)
    drawn = scatter_note([one | {"draws": 6} for one in rows])
    assert "standard deviation over 6 draws of rounding" in drawn
    assert "claim" not in drawn
    few = [one | {"unit_sums": one["unit_sums"][:5]} for one in rows]
    assert "A claim needs 8 blocks." in scatter_note(few)


def test_pairs_are_of_one_model_and_text():
    rows = [row(HARD, "fp32"), row([loss + 1 for loss in HARD]), row(HARD, tokens_hash="u"), row(HARD, model="n")]
    assert ["paired_error" in one for one in with_paired_errors(rows)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("form", "value", "bar", "expected"),
    [
        (".4f", 0.7364, 0.0117, "0.736±0.012"),
        ("+.2f", -0.04, 0.004, "-0.040±0.004"),
        ("+.2f", -0.4, 2.0, "+0±2"),
        (".2f", 31.314, 0.0000001, "31.31"),
        (".2f", 31.314, 1.84, "31.3±1.8"),
        (".2f", 110.2, 37.0, "110±37"),
        (".2e", 1.2345e-4, 1.1e-5, "1.23e-04±1.1e-05"),
        (".2e", 0.0, 1.1e-5, "0.0e+00±1.1e-05"),
        (".6g", 131.0909, 0.37, "131.1±0.4"),
        (".6g", 131.0909, None, "131.091"),
        (".2f", 31.314, math.nan, "31.31"),
        (".4g", 3843021.7, None, "3,843,022"),
    ],
)
def test_digits_of_a_cell_follow_the_bar(form, value, bar, expected):
    assert cell(form, value, bar) == expected


@pytest.mark.parametrize(
    ("share", "bar", "expected"),
    [
        (0.003, 0.0012, "+0.30 % ± 0.12"),
        (-0.0004, 0.00004, "−0.040 % ± 0.004"),
        (8.89, 0.56, "+889 % ± 56"),
        (0.0, 0.0, "0.00 %"),
    ],
)
def test_digits_of_a_change_follow_the_bar(share, bar, expected):
    assert percent(share, bar) == expected


def test_bits_per_byte_have_the_bytes_of_their_blocks(tmp_path):
    fp32, absmax = measured("pocket/gpt2-0.1m", ["fp32", "absmax"], tmp_path, blocks=16)
    total = math.log2(math.e) * sum(absmax["unit_sums"]) / sum(absmax["unit_bytes"])
    assert total == pytest.approx(absmax["bits_per_byte"], rel=1e-9)
    difference = value_of(absmax, "bits_per_byte").minus(value_of(fp32, "bits_per_byte"))
    assert 0 < difference.error < value_of(absmax, "bits_per_byte").minus(exact(0)).error / 3
    assert torch.tensor(absmax["unit_bytes"]).sum() == absmax["bytes"]
