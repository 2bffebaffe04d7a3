"""What reads a feature: attention to the first position, features taken out at places, and what is said of them."""

import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

import outliers
from outliers import Ablated, Intervention, load_model, plant, run, variant
from outliers.commands.origins import Account
from outliers.metrics import attention
from outliers.metrics.sinks import COMPUTATION as SINKS
from outliers.runs.stages import readers as preset
from outliers.views.account import account_section
from outliers.views.origins import origins_section
from tests.small_models import make_model, sample_blocks, top1_softmax
from tests.views.shown import shown

AS_IT_IS = Ablated(Intervention(()))


# Attention to the first position


def probabilities(model, ids, written: str = "fp32") -> list[torch.Tensor]:
    """What transformers says that each layer attends to, float64 (heads, T, T)."""
    model.config._attn_implementation = "eager"
    with torch.no_grad(), variant(written).on(model) as changed:
        return [one[0].double() for one in changed(ids[None], output_attentions=True).attentions]


def by_definition(of_layer: torch.Tensor, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The share and the margin of the first position by head."""
    shares, margins = [], []
    for head in of_layer.clamp(min=torch.finfo(torch.float32).tiny):
        of_queries = []
        for query in range(1, len(head)):
            keys = range(0 if window is None else max(0, query - window + 1), query + 1)
            if 0 in keys:
                logs = [head[query, key].log().item() for key in keys]
                of_queries.append(logs[0] - np.mean(logs[1:]))
        margins.append(np.mean(of_queries))
    for head in of_layer:
        shares.append(head[1:window, 0].mean().item())
    return np.array(shares), np.array(margins)


def sinks(model, blocks, ablated=AS_IT_IS) -> tuple[dict, np.ndarray, np.ndarray]:
    """What the metric says: over all heads, and shares and margins (layers, heads)."""
    whole, *heads = SINKS.values([attention.attention_results(model, blocks, [(ablated, [SINKS])])[0][0][""]])
    by_head = pd.DataFrame(heads).pivot(index="layer", columns="head")
    return whole, by_head["value"].to_numpy(), by_head["margin"].to_numpy()


@pytest.mark.parametrize(
    ("case", "windows"),
    [
        *[("gpt2", [None, None]), ("llama", [None, None]), ("falcon", [None, None])],
        *[("gemma2", [8, None]), ("gemma3", [8, None]), ("gpt-oss", [8, None]), ("gpt_neo", [None, 8])],
    ],
)
def test_sinks_are_what_transformers_attends_to(case, windows, blocks):
    model = make_model(case)
    ids = blocks[0]
    want = [by_definition(*pair) for pair in zip(probabilities(model, ids), windows, strict=True)]
    whole, shares, margins = sinks(model, [ids])
    assert shares == pytest.approx(np.stack([share for share, _ in want]), rel=1e-5)
    assert margins == pytest.approx(np.stack([margin for _, margin in want]), rel=1e-4, abs=1e-5)
    assert (whole["value"], whole["margin"]) == pytest.approx((shares.mean(), margins.mean()), rel=1e-5)
    assert whole["heads"] == (shares > 0.3).mean()


def test_probabilities_that_underflow_are_clamped():
    logits = torch.zeros(1, 2, 3, 3)
    logits[0, 0, 2, 0] = -200.0
    logits += torch.full((3, 3), -torch.inf).triu(1)
    found = SINKS.measure(logits.softmax(-1), torch.ones(3, 3, dtype=torch.bool).tril(), False)
    least = np.log(torch.finfo(torch.float32).tiny)
    assert found[0].tolist() == pytest.approx([0.5, 2, least - np.log(0.5), 2])
    assert found[1].tolist() == pytest.approx([0.5 + 1 / 3, 2, 0, 2], abs=1e-6)


def test_the_mean_margin_is_over_the_heads_that_have_one():
    """As those of a layer that gives the first position no probability have none."""
    seen = torch.tensor([[0.5, 2.0, 1.5, 2.0], [0.5, 2.0, 0.5, 2.0]], dtype=torch.float64)
    unseen = torch.tensor([[0.0, 2.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    whole, *heads = SINKS.values([torch.stack([seen, unseen])])
    assert [head["margin"] for head in heads] == [0.75, 0.25, None, None]
    assert whole["margin"] == 0.5


# Features at places


@pytest.mark.parametrize(
    ("case", "places"),
    {
        "gpt2": ["q", "k", "v", "attn_in", "ffn_in"],
        "llama": ["q", "k", "v", "attn_in", "gate", "up", "ffn_in"],
        "mixtral": ["q", "k", "v", "attn_in", "router", "experts", "ffn_in"],
        "qwen3-moe-dense-first": ["q", "k", "v", "attn_in", "ffn_in"],
    }.items(),
)
def test_by_default_all_that_read_the_stream_in_every_layer(case, places, blocks):
    found = outliers.readers(make_model(case), blocks[:1, :8], [3], controls=2)
    assert found.loc[found["subject"] == "feature", "place"].tolist() == places
    of_attention = found[found["margin"].notna()]
    assert set(of_attention["place"]) == {"", "q", "k", "v", "attn_in"}
    assert {one.shape for one in of_attention["margins"]} == {(2, 4)}


def test_rows_are_perplexities_and_attention_without_a_feature(blocks):
    model = make_model("llama")
    found = outliers.readers(model, blocks, [3, 17], ["k", "layers.1.up"], controls=2, seed=4)
    names = ["fp32" if row.place == "" else f"zero({row.feature}@{row.place})" for row in found.itertuples(index=False)]
    assert len(names) == 1 + 2 * (2 + 2)
    want = outliers.perplexities(model, blocks, [variant(one) for one in names])
    assert found["perplexity"].tolist() == want
    assert found["cost"].tolist() == pytest.approx([one / want[0] - 1 for one in want])
    row = found.set_index(["feature", "place"]).loc[(17, "k")]
    ablated = variant("zero(17@k)")
    assert row["top1_softmax"] == pytest.approx(top1_softmax(model, blocks, [ablated])[0], rel=1e-12)
    assert row["margins"] == pytest.approx(sinks(model, blocks, ablated)[2])


def test_controls_are_all_others_and_no_outliers(blocks):
    model = plant(make_model("gpt2"), [5, 6], 64)
    traced = set(outliers.trace(model, blocks).outlier_features()["feature"])
    assert {5, 6} <= traced and len(traced) < 25
    others = set(range(32)) - traced - {3}
    some = [outliers.readers(model, blocks[:1, :8], [3], ["q"], 2, seed)["feature"].tolist() for seed in (0, 0, 1)]
    assert some[0] == some[1] != some[2]
    everyone = preset._drawn([3], 32, len(others), 0, traced)
    assert sorted(everyone) == sorted(others)


# What is said


def made_up(costs: dict[str, float], margins: dict[str, float], controls=(0.0, 0.01, 0.02)) -> list[dict]:
    """Rows of feature 3 and of random features as nobody measured them, of a model with perplexity 20 and one head."""

    def of_cell(cost, margin, **about) -> list[dict]:
        heads = {"unit": "1", "margin": margin}
        return [
            {"metric": "perplexity", "value": 20 * (1 + cost), **about},
            *(
                []
                if margin is None
                else [
                    {"metric": "top1_softmax", "value": 0.4, **about},
                    {"metric": "sinks", "value": 0.5, "heads": 1.0, **heads, **about},
                    {"metric": "sinks.head", "value": 0.5, "layer": 0, "head": 0, **heads, **about},
                ]
            ),
        ]

    rows = of_cell(0.0, 8.0)
    for place, cost in costs.items():
        margin, about = margins.get(place), {"where": [place]}
        rows += of_cell(cost, margin, subject="feature", features=[3], **about)
        for draw, control in enumerate(controls):
            at = None if margin is None else 8.0 + control
            rows += of_cell(control, at, subject="control", features=[9 + draw], draw=draw, **about)
    return [{"model": "a", "variant": f"zero(@{row['where'][0]})" if "where" in row else "fp32", **row} for row in rows]


BEYOND = {"q": 0.0295, "k": 0.031, "up": 1.5, "gate": -0.5}  # two deviations, of which k and up are
ACCOUNTS = {
    "read by two beyond two deviations": made_up(BEYOND, {"q": 8.0295, "k": 5.0}),
    "read by none": made_up({"q": 0.0295, "up": -0.009}, {"q": 8.0295}),
    "read without attention": made_up({"k": 0.5, "up": 0.0}, {"k": 5.0}),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_account(name, as_kept):
    as_kept(name, shown(account_section(ACCOUNTS[name])))


# Runs


@pytest.fixture(scope="module")
def pocket(tmp_path_factory) -> tuple:
    folder = tmp_path_factory.mktemp("account")
    fields = {"features": [3, 5], "places": "q,up", "controls": 2, "neurons": 1}
    spec = Account(model="pocket/gpt2-0.1m", by="writers,readers", block=16, blocks=8, **fields)
    return spec, folder, run(spec, folder)


def test_an_account_is_what_python_returns(pocket):
    _, _, rows = pocket
    blocks = sample_blocks("pocket/gpt2-0.1m", 16, 8)
    want = outliers.readers(load_model("pocket/gpt2-0.1m"), blocks, [3, 5], ["q", "up"], controls=2)
    arrays = ["shares", "margins"]
    kept = preset.readings(rows).drop(columns=[*arrays, "increase"])
    pd.testing.assert_frame_equal(kept, want.drop(columns=arrays), rtol=1e-12)


def test_the_sentences_on_a_feature_stand_together(pocket):
    _, _, rows = pocket
    section = account_section(rows)
    assert [table.name for table in section.tables] == ["parts", "writers", "gates", "readers", "heads"]
    numbers = [re.search(r"[Ff]eature (\d+)", finding.text)[1] for finding in section.findings]
    assert Counter(numbers).keys() == {"3", "5"} and sorted(numbers) == numbers
    of_writers = [row for row in rows if "where" not in row]
    assert account_section(of_writers).text == origins_section(rows).text


def test_writers_alone_of_given_features_need_no_trace(tmp_path):
    spec = Account(model="pocket/gpt2-0.1m", features=[3], by="writers", block=32, blocks=1)
    assert {row["metric"].partition(".")[0] for row in run(spec, tmp_path)} == {"origins"}
    assert spec.blocks == 1
