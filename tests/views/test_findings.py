"""Sentences about what was measured: true of the rows, and not there where the rows do not support them."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from outliers.commands.trace import OneModel
from outliers.metrics.damages import damages_of
from outliers.show import words
from outliers.show.section import Finding, Section
from outliers.show.value import Value, exact
from outliers.show.words import count, features, listed, percent, ranges
from outliers.views.ablation import ablation_findings
from outliers.views.damage import damage_findings
from outliers.views.emergence import Fit, emergence_findings
from outliers.views.linear_layer import speed_findings
from outliers.views.memory import memory_findings
from outliers.views.perplexity import sweep_findings
from outliers.views.plan import plan_section
from outliers.views.remedies import NONE, Point, remedies_findings
from outliers.views.table4 import panel_section
from outliers.views.trace import trace_findings, traced_section
from outliers.views.zeroshot import zeroshot_findings
from tests.conftest import STORIES, needs_shared, needs_smollm2
from tests.kept import SECTIONS, kept, plan_at, section_of
from tests.small_models import trace_model

FINDINGS = Path(__file__).parent / "findings.yaml"


def said(findings: list[Finding]) -> str:
    """All sentences in one line."""
    return " ".join(finding.text for finding in findings)


def test_words():
    assert [count(number) for number in (0, 1, 12, 13, 1024)] == ["none", "one", "twelve", "13", "1,024"]
    assert [listed(things) for things in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
    assert [features(numbers) for numbers in ([3], [3, 17], range(7))] == [
        "feature 3",
        "features 3 and 17",
        "seven features",
    ]
    assert [ranges(numbers) for numbers in ([2, 3, 4, 7, 9, 10], [5])] == ["2–4, 7, 9–10", "5"]
    assert [percent(1.106, 0.014), percent(-0.012), percent(113.0)] == ["+110.6 % ± 1.4", "−1.2 %", "+11,300 %"]
    assert [percent(0.0013, 0.0005), percent(0.0)] == ["+0.13 % ± 0.05", "0.00 %"]


@pytest.mark.parametrize("run", SECTIONS)
def test_each_sentence_is_of_a_table_or_figure(run):
    section = section_of(run)
    places = {one.name for one in (*section.tables, *section.drawings)}
    assert section.findings
    assert {finding.at for finding in section.findings} <= places
    for finding in section.findings:
        assert finding.text[0].isupper() or finding.text.split()[0].rstrip(",") in finding.text
        assert finding.text.endswith(".")
        assert "nan" not in finding.text
    printed = " ".join(section.terminal.split())
    assert all(" ".join(finding.text.split()) in printed for finding in section.findings)


@pytest.mark.parametrize(("run", "whole"), yaml.safe_load(FINDINGS.read_text(encoding="utf-8")).items())
def test_all_findings_of_a_kept_run(run, whole):
    assert [finding.text for finding in section_of(run).findings] == whole.splitlines()


def test_an_empty_plan_says_so():
    section = plan_section(kept("plans/w8a8"), plan_at("plans/w8a8").model_copy(update={"exact": []}), {})
    assert "plan_projections" not in [table.name for table in section.tables]
    assert said(section.findings) == (
        "Nothing has to stay exact: with all 210 projections under w8a8, the perplexity changes by +1.6 % ± 0.4 on "
        "blocks outside the search. The distance to the allowed +2.0 % is within the scatter of rounding."
    )


# Traces


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """What makes the section of the trace of a model."""

    def section_of(model: str, **fields) -> tuple[Section, object]:
        folder = tmp_path_factory.mktemp("trace")
        trace, rows = trace_model(OneModel(model=model, **({"block": 256, "blocks": 2} | fields)), folder)
        return traced_section(trace, rows, "token {}".format), trace

    return section_of


@needs_smollm2
def test_a_model_with_one_outlier_feature(traced):
    section, _ = traced("smollm2-135m", block=128)
    text = said(section.findings)
    assert "One of 576 features is an outlier feature: feature 247, which reaches |x| ≥ 6 in " in text
    assert "feature 1229 of layer 11's ffn_out, at position 0, token token " in text
    assert "The residual stream has massive activations after layers 11–" in text
    assert "Position 0 is an attention sink for " in text
    assert 3 <= len(section.findings) <= 6


def test_a_model_with_several(traced):
    section, trace = traced("pocket/gpt2-5.9m")
    found = trace.outlier_features()
    assert len(found) > 1
    start = f"{count(len(found)).capitalize()} of 256 features are outlier features; the most common is feature "
    assert section.findings[0].text.startswith(f"{start}{found['feature'][0]}, which")
    assert "massive" not in said(section.findings)


@pytest.mark.parametrize(
    ("model", "alpha", "first"),
    [
        ("pocket/gpt2-0.1m", 30.0, r"None of 24 features is an outlier feature: no value reaches \|x\| ≥ 30.*"),
        pytest.param(str(STORIES), 30.0, "None of 64 features is an outlier feature: no value .*", marks=needs_shared),
        (
            "pocket/gpt2-0.5m",
            5.0,
            r"None of .*: the nearest, feature {nearest}, reaches \|x\| ≥ 5 in .* of layers \(25 % required\) and .* "
            r"of positions \(6 % required\)\.",
        ),
        ("pocket/gpt2-0.1m", 0.1, r".* meet the criterion at \|x\| ≥ 0\.1: it does not discriminate\."),
    ],
)
def test_models_without_any_or_with_next_to_all(traced, model, alpha, first):
    section, trace = traced(model, alpha=alpha)
    assert re.fullmatch(first.format(nearest=trace.features()["feature"][0]), section.findings[0].text)
    assert trace.outlier_features().empty == (alpha > 1)
    assert len(section.findings) >= 3
    assert "with outlier features set to zero" not in said(section.findings) or alpha < 1


def test_a_sink_is_no_position_of_the_second_half(traced):
    """Few queries attend to it, and the last one to itself."""
    _, trace = traced("pocket/gpt2-0.1m", block=16)
    for position, told in ((15, False), (9, False), (8, True)):
        sinks = torch.zeros_like(trace.statistics["attention.sinks"])
        sinks[:, position] = trace.heads * trace.sequences
        found = said(trace_findings(replace(trace, statistics=trace.statistics | {"attention.sinks": sinks}), {}, str))
        assert (f"Position {position} is an attention sink for 100 % of (layer, head) pairs." in found) == told
        assert ("attention sink" in found) == told


def test_from_a_doubling_on_a_change_is_a_ratio():
    changes = [words.changed(share) for share in (-0.5, 0.99, 1.0)]
    assert changes == ["falls by 50.0 %", "rises by 99.0 %", "is multiplied by 2.0"]


# What vanishes


def cost(scheme: str, value: float, deviation: float | None = None, model: str = "gpt2") -> dict:
    """A row with its cost, both numbers in per cent."""
    scatter = None if deviation is None else deviation / 100
    return {"model": model, "scheme": scheme, "cost": Value(value / 100, scatter)}


def test_a_sweep_within_its_scatter():
    names = {"gpt2": "gpt2"}
    assert sweep_findings([], names) == []
    nothing = "No scheme raises the perplexity of gpt2 beyond the scatter of rounding."
    assert sweep_findings([cost("absmax", 90.0)], names) == [], "one draw"
    assert said(sweep_findings([cost("absmax", 0.9, 0.5)], names)) == nothing
    raised = "absmax raises the perplexity of gpt2 by 0.9 % ± 0.2."
    assert said(sweep_findings([cost("absmax", 0.9, 0.2)], names)) == raised
    assert "any of two models" in said(sweep_findings([cost("absmax", 0.1, 0.2)], names | {"b": "b"}))


def test_what_outlier_features_in_16_bits_save():
    names, absmax = {"gpt2": "gpt2"}, cost("absmax", 50.0, 1.0)
    saved = sweep_findings([absmax, cost("absmax-vector", 9.0, 0.2), cost("llm.int8", 1.0, 0.2)], names)
    reduced = "reduces the increase for gpt2 from +9.0 % ± 0.2 (absmax-vector) to +1.0 % ± 0.2 (llm.int8)."
    assert reduced in said(saved)
    assert "The smallest increase for gpt2 is that of llm.int8: +1.0 % ± 0.2." in said(saved)
    same = said(sweep_findings([absmax, cost("absmax-vector", 1.2, 0.2), cost("llm.int8", 1.0, 0.2)], names))
    assert "has no measurable benefit for gpt2: +1.2 % ± 0.2 (absmax-vector)" in same
    assert "smallest" not in same
    free = said(sweep_findings([absmax, cost("absmax-vector", 0.1, 0.2), cost("llm.int8", 0.2, 0.2)], names))
    assert "llm.int8 and absmax-vector have no measurable cost for gpt2." in free


def test_how_many_models_lose():
    costs = [cost("absmax", value, 0.1, model) for model, value in (("a", 50.0), ("b", 0.5), ("c", 1.1))]
    text = said(sweep_findings(costs, {name: name for name in "abc"}))
    assert text.endswith("The perplexity of one of three models rises by more than 1 % under at least one scheme.")
    text = said(sweep_findings(costs[:1] * 2 + [costs[0] | {"model": "b"}], {name: name for name in "ab"}))
    assert text.endswith("The perplexity of every model rises by more than 1 % under at least one scheme.")
    text = said(sweep_findings([cost("absmax", 0.5, 0.1, model) for model in "ab"], {name: name for name in "ab"}))
    assert text.endswith("No scheme raises the perplexity of any model by measurably more than 1 %.")


def summary(damage: float, control: tuple[float, float, float], top1: float = 0.2, singles=()) -> pd.DataFrame:
    """An ablation of two features; control: mean and ends of the interval of the damage by random ones."""
    rows = [
        {"subject": "none", "method": "", "features": (), "damage": 0.0, "top1_softmax": 0.4},
        {"subject": "outliers", "method": "zero", "features": (3, 17), "damage": damage, "top1_softmax": top1},
        {"subject": "control", "method": "zero", "features": (), "top1_softmax": 0.4, "damage": control[0]},
        *({"subject": "single", "method": "zero", "features": (3 + n,), "damage": d} for n, d in enumerate(singles)),
    ]
    rows[2] |= {
        "draws": 9,
        "top1_softmax_low": 0.38,
        "top1_softmax_high": 0.42,
        "damage_low": control[1],
        "damage_high": control[2],
    }
    return pd.DataFrame([row | {"perplexity": 30 * (1 + row["damage"])} for row in rows])


def test_an_ablation_within_its_scatter():
    supported = said(ablation_findings(summary(0.5, (0.01, 0.0, 0.02))))
    assert "to zero multiplies the perplexity by 1.500; doing so with two random features, by 1.010" in supported
    assert "falls from 40.0 to 20.0 %" in supported
    within = ((0.15, (0.05, -0.1, 0.2)), (0.012, (0.01, 0.009, 0.011)))  # the interval; what one draw may do
    for damage, control in within:
        text = said(ablation_findings(summary(damage, control, 0.41)))
        assert "has no measurably different effect on the perplexity than doing so with two random features" in text
        assert "multiplies" not in text
        assert "softmax" not in text


def test_which_single_feature_does_most():
    control = (0.01, 0.0, 0.02)
    text = said(ablation_findings(summary(0.5, control, singles=(0.1, 0.4))))
    assert "Of single features, feature 4 raises the perplexity most when removed: +40.0 %" in text
    assert "single" not in said(ablation_findings(summary(0.5, control, singles=(0.4, 0.44)))), "as draws scatter"
    assert "single" not in said(ablation_findings(summary(0.5, control, singles=(0.4,))))


def damaged(
    perplexity: float = 80.0,
    deviation: float | None = 0.1,
    roles=(44.0, 70.0),
    layers=(40.1, 50.0, 41.0),
    once: bool = False,
) -> str:
    """What a scheme damages in a model of perplexity 40; deviation: of every perplexity under it, None of one draw;
    once: whether roles and layers have one draw all the same."""
    scattered = {} if deviation is None else {"standard_deviation": deviation}

    def row(metric, value, **fields):
        of_draws = {} if once and {"role", "layer"} & {*fields} else scattered
        return {"metric": metric, "scheme": "absmax", "value": value, **of_draws, **fields}

    names = ("ffn_in", "ffn_out")
    rows = [
        row("perplexity", 40.0, scheme="fp32"),
        row("perplexity", perplexity),
        *(row("damage.perplexity_only", value, role=role) for role, value in zip(names, roles, strict=True)),
        *(row("damage.perplexity_without", value, role=role) for role, value in zip(names, roles[::-1], strict=True)),
        *(row("damage.perplexity_only", value, layer=layer) for layer, value in enumerate(layers)),
    ]
    return said(damage_findings(damages_of(rows), str))


def test_where_a_scheme_does_its_damage():
    assert damaged() == (
        "Most of the cost of absmax is in ffn_out (+75.0 % ± 0.2 alone, 81 % of the increase of log-perplexity); with "
        "ffn_out exact, +10.0 % ± 0.2 remains. Under absmax the perplexity rises from 40.00 to 80.00 (+100.0 % ± 0.2). "
        "Under absmax the layer that costs most alone is 1 (+25.0 % ± 0.2)."
    )
    assert damaged(deviation=30.0).endswith("(+100 % ± 75), within the scatter of rounding.")
    assert "No role stands out under absmax. " in damaged(roles=(69.9, 70.0))
    assert damaged(layers=(40.1, 40.0, 40.0)).endswith("No layer stands out under absmax.")


def test_one_draw_names_no_role_and_no_layer():
    assert damaged(deviation=None) == (
        "Under absmax the perplexity rises from 40.00 to 80.00 (+100.0 %) in a single draw; --draws 4 measures the "
        "scatter of rounding."
    )


def test_roles_that_were_measured_once_scatter_as_the_whole_model():
    assert damaged(once=True).startswith("Most of the cost of absmax is in ffn_out (+75.0 % ± 0.2 alone, 81 % of")
    assert "(+75 % ± 9 alone" in damaged(once=True, deviation=4.0), "of 80; 3.5 of 70"
    assert "No role stands out" in damaged(once=True, deviation=14.0)


def test_a_layer_is_named_for_a_tenth_of_the_damage():
    tenth = 40 * 2**0.1  # of the rise of log-perplexity from 40 to 80
    assert damaged(layers=(tenth + 0.1, 40.0)).endswith("the layer that costs most alone is 0 (+7.4 % ± 0.2).")
    assert damaged(layers=(tenth - 0.1, 40.0)).endswith("No layer stands out under absmax.")


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ((50.0, 49.0, 40.0), "layers that cost most alone are 0 (+25.0 % ± 0.2) and 1 (+22.5 % ± 0.2)."),
        ((50.0, 49.0, 48.9, 48.8, 40.0), "layer that costs most alone is 0 (+25.0 % ± 0.2)."),
        ((50.0, 49.9, 49.8, 49.7), "No layer stands out under absmax."),
    ],
)
def test_a_layer_is_named_if_no_other_one_costs_as_much(layers, named):
    assert damaged(layers=layers).endswith(named)


def family(**columns) -> pd.DataFrame:
    """Models as Table 4 has them."""
    about = {"positions": [0.1, 0.5], "layers": [0.3, 0.5], "median": [6.5, -7.0]}
    return pd.DataFrame({"parameters": [1e6, 4e6], **about, **columns}, index=["small", "large"])


def test_a_family():
    none = emergence_findings(family(count=[0, 0]), {"layers": None}, "table4")
    assert said(none) == "None of two models has an outlier feature by the criterion."
    one = said(emergence_findings(family(count=[0, 1]), {}, "table4"))
    assert one.startswith(
        "One of two models has an outlier feature by the criterion. The most common outlier feature, that of large, "
    )
    assert "All models of at least 4M parameters have outlier features, and none of at most 1M." in one
    other = said(emergence_findings(family(count=[2, 0]), {}, "table4"))
    assert "outlier feature, one of two in small, affects 30 % of layers and 10 % of positions" in other
    assert "All models" not in other


def test_a_fit_whose_interval_includes_0_is_no_finding():
    models = family(count=[1, 1])
    assert "grows e-fold" in said(emergence_findings(models, {"layers": Fit(9, (8, 10), 3, (1, 5), 9)}, "table4"))
    assert "grows e-fold" not in said(emergence_findings(models, {"layers": Fit(9, (8, 10), 3, (-1, 7), 9)}, "table4"))


def test_panels_say_what_the_family_shows():
    section = panel_section("figure4b", kept("pocket/table4"))
    assert {finding.at for finding in section.findings} == {"figure4b"}


def point(format: str, remedy: str, ratio: float, bits: float = 8, deviation: float | None = 0.05) -> Point:
    perplexity = Value(30 * ratio, deviation)
    return Point("gpt2", format, remedy, "tensor", bits, bits, perplexity, perplexity.beside(exact(30)))


def test_remedies_within_their_scatter():
    saved = said(remedies_findings([point("w4a4", NONE, 3.0, 4), point("w4a4", "hadamard", 1.2, 4)]))
    reduced = "hadamard reduces its increase of perplexity from +200.00 % ± 0.17 to +20.00 % ± 0.17."
    assert f"w4a4 gains most from a remedy: {reduced}" in saved
    assert "No format of weights and activations keeps gpt2 within 5 % of its perplexity." in saved
    assert "With every remedy tried, w4a4 raises the perplexity of gpt2 by more than 5 %." in saved
    same = said(remedies_findings([point("w8a8", NONE, 1.011), point("w8a8", "hadamard", 1.010)]))
    assert "No remedy has a measurable benefit." in same
    near = [said(remedies_findings([point("w8a8", NONE, ratio, deviation=0.3)])) for ratio in (1.045, 1.055)]
    assert near == 2 * [
        "No format of weights and activations keeps gpt2 within 5 % of its perplexity. No remedy has a measurable "
        "benefit."
    ], "neither within nor beyond it with certainty"
    assert remedies_findings([point("w8a8", NONE, 2.0, deviation=None)]) == [], "one draw"


def test_remedies_that_draws_do_not_tell_apart():
    def saved(other: float) -> str:
        formats = {"w4a4": 1.2, "w4a8": other}
        points = [point(name, NONE, 3.0, 4) for name in formats]
        return said(remedies_findings([*points, *(point(n, "hadamard", r, 4) for n, r in formats.items())]))

    assert "w4a4 gains most from a remedy" in saved(1.22)
    assert "gains most" not in saved(1.205)
    held = said(remedies_findings([point("w8a8", NONE, 1.011), point("w8a8", "hadamard", 1.010)]))
    assert "are 8: w8a8 with none (+1.10 % ± 0.17) and w8a8 with hadamard (+1.00 % ± 0.17)." in held


def test_the_fewest_bits_of_weights_and_of_a_cache():
    kept = point("int4", "hadamard", 1.02)._replace(cache_bits=4.5)
    alone = [point("w6", NONE, 1.01, 6), point("w4", NONE, 1.01, 4), point("w4", "hadamard", 1.2, 4)]
    alone = [one._replace(activation_bits=None, on_grid=one == alone[1]) for one in alone]
    found = said(remedies_findings([kept, *alone]))
    assert "The fewest bits of keys and values that keep gpt2 within 5 % of its perplexity are 4.5: int4 with" in found
    assert "The fewest bits of weights alone that keep gpt2 within 5 % of its perplexity are 6: w6 with none" in found
    assert "weights and activations" not in found


def test_zero_shot_within_standard_errors():
    def mean(scheme, value, error=0.02):
        about = {"model": "gpt2", "scheme": scheme, "value": value, "standard_error": error}
        return about | {"by_task": {"piqa": Value(value, 0.0, error)}}

    lost = said(zeroshot_findings([mean("fp32", 0.5), mean("absmax", 0.3)], 0.25))
    assert lost == "absmax lowers the mean zero-shot accuracy of gpt2 from 50 ± 2 % to 30 ± 2 %."
    same = said(zeroshot_findings([mean("fp32", 0.27), mean("absmax", 0.26)], 0.25))
    assert same.startswith("No scheme measurably lowers zero-shot accuracy")
    assert "gpt2 does not measurably exceed chance (25.0 %)" in same
    assert zeroshot_findings([mean("fp32", 0.5, None), mean("absmax", 0.3, None)], None) == []


def test_speeds_within_their_quartiles():
    def row(way, value, spread):
        return {"way": way, "dimension": 768, "value": value, "q1": value - spread, "q3": value + spread}

    text = said(speed_findings([row("a", 1.5, 0.1), row("b", 0.5, 0.1), row("c", 1.1, 0.2)]))
    assert text.startswith("a is 1.50 times as fast as 16 bits at d = 768.")
    assert text.endswith("Slower than 16 bits at every measured d: b.")
    assert "c" not in text.split("Slower")[0].split("Faster")[1].split(": ")[1]
    assert speed_findings([row("c", 1.1, 0.2)]) == []


def test_memory():
    footprints = pd.DataFrame({"total 16": [2.0], "total 8": [1.0], "loaded 8": [None]}, index=["gpt2"])
    none = pd.DataFrame({"8-bit": ["a"], "16-bit": ["a"], "hardware": ["GPU"], "gigabytes": [8.0]})
    assert said(memory_findings(none, footprints)) == (
        "On no hardware does a larger model fit in 8 bits than in 16 bits. In 8 bits, gpt2 needs 50 % of its memory in "
        "16 bits."
    )
    assert "A larger model fits in 8 bits than in 16 bits: b instead of a on GPU of 8 GB." in said(
        memory_findings(none.assign(**{"8-bit": ["b"]}), footprints)
    )
