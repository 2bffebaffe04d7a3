"""Sentences about what was measured: true of the rows, and not there where the rows do not support them."""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import pytest

import outliers
from outliers.metrics.damages import damages_of
from outliers.show import words
from outliers.show.section import Finding
from outliers.show.value import Value, exact
from outliers.show.words import count, features, listed, percent, ranges
from outliers.views.ablation import ablation_findings
from outliers.views.damage import damage_findings
from outliers.views.emergence import Fit, emergence_findings
from outliers.views.linear_layer import speed_findings
from outliers.views.memory import memory_findings
from outliers.views.perplexity import sweep_findings
from outliers.views.plan import plan_section
from outliers.views.remedies import NONE, RemedyPoint, remedies_findings
from outliers.views.trace import trace_findings
from outliers.views.zeroshot import zeroshot_findings
from tests.kept import SECTIONS, kept, plan_at, section_of


def said(findings: list[Finding]) -> str:
    """All sentences in one line."""
    return " ".join(finding.text for finding in findings)


def below(name: str, findings: list[Finding]) -> str:
    """A name, and a line for each sentence below it."""
    return "\n  ".join([f"{name}:", *(finding.text for finding in findings)])


def test_words():
    assert [count(number) for number in (0, 1, 12, 13, 1024)] == ["none", "one", "twelve", "13", "1,024"]
    assert [listed(things) for things in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
    named = [features(numbers) for numbers in ([3], [3, 17], range(7))]
    assert named == ["feature 3", "features 3 and 17", "seven features"]
    assert [ranges(numbers) for numbers in ([2, 3, 4, 7, 9, 10], [5])] == ["2–4, 7, 9–10", "5"]
    assert [percent(1.106, 0.014), percent(-0.012), percent(113.0)] == ["+110.6 % ± 1.4", "−1.2 %", "+11,300 %"]
    assert [percent(0.0013, 0.0005), percent(0.0)] == ["+0.13 % ± 0.05", "0.00 %"]
    changes = [words.changed(share) for share in (-0.5, 0.99, 1.0)]
    assert changes == ["falls by 50.0 %", "rises by 99.0 %", "is multiplied by 2.0"]


@pytest.mark.parametrize("run", SECTIONS)
def test_each_sentence_is_of_a_table_or_figure(run):
    section = section_of(run)
    places = {one.name for one in (*section.tables, *section.drawings)}
    assert section.findings
    assert {finding.at for finding in section.findings} <= places
    printed = " ".join(section.terminal.split())
    assert all(" ".join(finding.text.split()) in printed for finding in section.findings)


def test_findings_of_kept_runs(as_kept):
    as_kept("findings of kept runs", "\n".join(below(run, section_of(run).findings) for run in SECTIONS))


def test_an_empty_plan_says_so():
    section = plan_section(kept("plans/w8a8"), plan_at("plans/w8a8").model_copy(update={"exact": []}), {})
    assert "plan_projections" not in [table.name for table in section.tables]
    assert said(section.findings).startswith("Nothing has to stay exact: with all 210 projections under w8a8, the ")


# Traces


def test_a_sink_is_no_position_of_the_second_half():
    """Few queries attend to it, and the last one to itself."""
    import torch

    from tests.small_models import make_model

    trace = outliers.trace(make_model("gpt2"), torch.arange(32).view(2, 16))
    for position, told in ((15, False), (9, False), (8, True)):
        sinks = trace.statistics["attention.sinks"] * 0
        sinks[:, position] = trace.heads * trace.sequences
        found = said(trace_findings(replace(trace, statistics=trace.statistics | {"attention.sinks": sinks}), {}, str))
        assert (f"Position {position} is an attention sink for 100 % of (layer, head) pairs." in found) == told
        assert ("attention sink" in found) == told


# What values support beyond their scatter, and what vanishes within it


def cost(variant: str, value: float, deviation: float | None = None, model: str = "gpt2") -> dict:
    """A row with its cost, both numbers in per cent."""
    scatter = None if deviation is None else deviation / 100
    return {"model": model, "variant": variant, "cost": Value(value / 100, scatter)}


def of_sweep(*costs: dict, models: str = "") -> list[Finding]:
    return sweep_findings(costs, {name: name for name in models or ["gpt2"]})


def of_decomposition(vector: float, decomposed: float) -> list[Finding]:
    """What is said of outlier features in 16 bits that cost so much, and without them so much."""
    costs = {"absmax-vector": vector, "llm.int8": decomposed}
    return of_sweep(cost("absmax", 50.0, 1.0), *(cost(name, value, 0.2) for name, value in costs.items()))


def of_ablation(damage: float, control: tuple[float, float, float], top1: float = 0.2, singles=()) -> list[Finding]:
    """An ablation of two features; control: mean and ends of the interval of the damage by random ones."""
    rows = [
        {"subject": "none", "method": "", "features": (), "damage": 0.0, "top1_softmax": 0.4},
        {"subject": "outliers", "method": "zero", "features": (3, 17), "damage": damage, "top1_softmax": top1},
        {"subject": "control", "method": "zero", "features": (), "top1_softmax": 0.4, "damage": control[0]},
        *({"subject": "single", "method": "zero", "features": (3 + n,), "damage": d} for n, d in enumerate(singles)),
    ]
    interval = {"draws": 9, "top1_softmax_low": 0.38, "top1_softmax_high": 0.42}
    rows[2] |= interval | {"damage_low": control[1], "damage_high": control[2]}
    return ablation_findings(pd.DataFrame([row | {"perplexity": 30 * (1 + row["damage"])} for row in rows]))


def of_damage(
    deviation: float | None = 0.1, roles=(44.0, 70.0), layers=(40.1, 50.0, 41.0), once: bool = False, whole=80.0
) -> list[Finding]:
    """What a scheme damages in a model of perplexity 40, which becomes `whole`.

    deviation: of every perplexity under it, None of one draw. once: whether roles and layers have one draw all the
    same.
    """
    scattered = {} if deviation is None else {"standard_deviation": deviation}

    def row(metric, value, **fields):
        of_draws = {} if once and {"role", "layer"} & {*fields} else scattered
        return {"metric": metric, "variant": "absmax", "value": value, **of_draws, **fields}

    names = ("ffn_in", "ffn_out")
    rows = [
        row("perplexity", 40.0, variant="fp32"),
        row("perplexity", whole),
        *(row("damage.perplexity_only", value, role=role) for role, value in zip(names, roles, strict=True)),
        *(row("damage.perplexity_without", value, role=role) for role, value in zip(names, roles[::-1], strict=True)),
        *(row("damage.perplexity_only", value, layer=layer) for layer, value in enumerate(layers)),
    ]
    return damage_findings(damages_of(rows), str)


TENTH = 40 * 2**0.1  # of the rise of log-perplexity from 40 to 80


def of_family(fits: dict | None = None, **columns) -> list[Finding]:
    """What is said of two models as Table 4 has them."""
    about = {"positions": [0.1, 0.5], "layers": [0.3, 0.5], "median": [6.5, -7.0]}
    models = pd.DataFrame({"parameters": [1e6, 4e6], **about, **columns}, index=["small", "large"])
    return emergence_findings(models, fits or {}, "table4")


def point(format: str, remedy: str, ratio: float, bits: float = 8, deviation: float | None = 0.05) -> RemedyPoint:
    perplexity = Value(30 * ratio, deviation)
    return RemedyPoint("gpt2", format, remedy, "tensor", bits, bits, perplexity, perplexity.increase_over(exact(30)))


def of_two_formats(other: float) -> list[Finding]:
    """What is said where a remedy leaves a format at 1.2 times the perplexity, and another at so much."""
    formats = {"w4a4": 1.2, "w4a8": other}
    points = [point(name, NONE, 3.0, 4) for name in formats]
    return remedies_findings([*points, *(point(name, "hadamard", ratio, 4) for name, ratio in formats.items())])


CACHED = point("int4", "hadamard", 1.02)._replace(cache_bits=4.5)
ALONE = [point("w6", NONE, 1.01, 6), point("w4", NONE, 1.01, 4), point("w4", "hadamard", 1.2, 4)]
ALONE = [one._replace(activation_bits=None, on_grid=one == ALONE[1]) for one in ALONE]


def of_tasks(chance: float | None, error: float | None = 0.02, **values: float) -> list[Finding]:
    means = [
        {"model": "gpt2", "variant": variant, "value": value, "standard_error": error}
        | {"by_task": {"piqa": Value(value, 0.0, error)}}
        for variant, value in values.items()
    ]
    return zeroshot_findings(means, chance)


def of_speeds(**ways: tuple[float, float]) -> list[Finding]:
    """What is said of ways of a product that are so many times as fast, with a spread."""
    return speed_findings(
        [{"way": way, "dimension": 768, "value": x, "q1": x - d, "q3": x + d} for way, (x, d) in ways.items()]
    )


def of_hardware(larger: str) -> list[Finding]:
    """What is said of one GPU on which a model fits in 8 bits."""
    footprints = pd.DataFrame({"total 16": [2.0], "total 8": [1.0], "loaded 8": [None]}, index=["gpt2"])
    fits = pd.DataFrame({"8-bit": [larger], "16-bit": ["a"], "hardware": ["GPU"], "gigabytes": [8.0]})
    return memory_findings(fits, footprints)


LITTLE = (0.01, 0.0, 0.02)
CASES: dict[str, Callable[[], list[Finding]]] = {
    "sweep of one draw": lambda: of_sweep(cost("absmax", 90.0)),
    "sweep within its scatter": lambda: of_sweep(cost("absmax", 0.9, 0.5)),
    "sweep beyond its scatter": lambda: of_sweep(cost("absmax", 0.9, 0.2)),
    "sweep of two models within it": lambda: of_sweep(cost("absmax", 0.1, 0.2), models=["gpt2", "b"]),
    "decomposition that saves": lambda: of_decomposition(9.0, 1.0),
    "decomposition that saves nothing measurable": lambda: of_decomposition(1.2, 1.0),
    "decomposition of what costs nothing": lambda: of_decomposition(0.1, 0.2),
    "one of three models loses": lambda: of_sweep(
        *(cost("absmax", value, 0.1, model) for model, value in {"a": 50.0, "b": 0.5, "c": 1.1}.items()), models="abc"
    ),
    "both models lose": lambda: of_sweep(*(cost("absmax", 50.0, 0.1, model) for model in "ab"), models="ab"),
    "neither model loses": lambda: of_sweep(*(cost("absmax", 0.5, 0.1, model) for model in "ab"), models="ab"),
    "ablation": lambda: of_ablation(0.5, LITTLE),
    "ablation within the interval of controls": lambda: of_ablation(0.15, (0.05, -0.1, 0.2), 0.41),
    "ablation within what one draw may do": lambda: of_ablation(0.012, (0.01, 0.009, 0.011), 0.41),
    "a single feature that does most": lambda: of_ablation(0.5, LITTLE, singles=(0.1, 0.4)),
    "single features alike, as draws scatter": lambda: of_ablation(0.5, LITTLE, singles=(0.4, 0.44)),
    "one single feature": lambda: of_ablation(0.5, LITTLE, singles=(0.4,)),
    "damage": lambda: of_damage(),
    "damage of a hundredth": lambda: of_damage(whole=40.4),
    "damage below nothing": lambda: of_damage(whole=39.6),
    "damage within its scatter": lambda: of_damage(deviation=30.0),
    "damage of one draw, which names no role and no layer": lambda: of_damage(deviation=None),
    "roles of one draw, which scatter as the model": lambda: of_damage(once=True),
    "roles of one draw, alike by its scatter": lambda: of_damage(once=True, deviation=14.0),
    "roles alike": lambda: of_damage(roles=(69.9, 70.0)),
    "a layer of more than a tenth": lambda: of_damage(layers=(TENTH + 0.1, 40.0)),
    "a layer of less than a tenth": lambda: of_damage(layers=(TENTH - 0.1, 40.0)),
    "two layers beside a third": lambda: of_damage(layers=(50.0, 49.0, 40.0)),
    "a layer beside three of one cost": lambda: of_damage(layers=(50.0, 49.0, 48.9, 48.8, 40.0)),
    "all layers alike": lambda: of_damage(layers=(50.0, 49.9, 49.8, 49.7)),
    "family without outlier features": lambda: of_family({"layers": None}, count=[0, 0]),
    "family whose large model has one": lambda: of_family(count=[0, 1]),
    "family whose small model has two": lambda: of_family(count=[2, 0]),
    "fit": lambda: of_family({"layers": Fit(9, (8, 10), 3, (1, 5), 9)}, count=[1, 1]),
    "fit whose interval includes 0": lambda: of_family({"layers": Fit(9, (8, 10), 3, (-1, 7), 9)}, count=[1, 1]),
    "remedy within its scatter": lambda: remedies_findings(
        [point("w8a8", NONE, 1.011), point("w8a8", "hadamard", 1.010)]
    ),
    "perhaps within 5 %": lambda: remedies_findings([point("w8a8", NONE, 1.045, deviation=0.3)]),
    "remedies of one draw": lambda: remedies_findings([point("w8a8", NONE, 2.0, deviation=None)]),
    "a format that gains most": lambda: of_two_formats(1.22),
    "formats that gain alike": lambda: of_two_formats(1.205),
    "fewest bits of weights and of a cache": lambda: remedies_findings([CACHED, *ALONE]),
    "zero-shot beyond errors": lambda: of_tasks(0.25, fp32=0.5, absmax=0.3),
    "zero-shot within errors": lambda: of_tasks(0.25, fp32=0.27, absmax=0.26),
    "zero-shot without errors": lambda: of_tasks(None, None, fp32=0.5, absmax=0.3),
    "speeds": lambda: of_speeds(a=(1.5, 0.1), b=(0.5, 0.1), c=(1.1, 0.2)),
    "a speed within its quartiles": lambda: of_speeds(c=(1.1, 0.2)),
    "memory of one model": lambda: of_hardware("a"),
    "memory where a larger one fits": lambda: of_hardware("b"),
}


def test_findings_of_values(as_kept):
    as_kept("findings of values", "\n".join(below(name, findings()) for name, findings in CASES.items()))
