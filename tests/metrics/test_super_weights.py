"""Single weights that carry a model: planted ones are found, others are not claimed; their controls."""

from pathlib import Path

import pandas as pd
import pytest
import torch

import outliers
from outliers import perplexities, perplexity, run, variant
from outliers.commands.origins import Account
from outliers.criterion import SPIKE
from outliers.metrics.candidates import candidates
from outliers.metrics.records import Candidates
from outliers.models.anatomy import decoder_layers, projections
from outliers.quantization.linear import stored_weight
from outliers.runs.run import show, stored_rows
from outliers.runs.stages.super_weights import (
    CONTROLLED,
    cost_table,
    scalings,
    treatments,
)
from outliers.variants.massive import Massive
from outliers.variants.term import WeightEntry
from outliers.views.account import account_section
from outliers.views.massive import after_removals
from tests.small_models import make_model, make_tokenizer
from tests.views.shown import shown

LAYER, OUTPUT, INPUT = 1, 5, 7


@torch.no_grad()
def written_by(model, count: int = 8) -> torch.Tensor:
    """Token blocks (count, 32) that a model writes itself, so that whatever changes it makes them less likely."""
    generator, ids = torch.Generator().manual_seed(0), torch.arange(count)[:, None]
    for _ in range(31):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, probabilities.multinomial(1, generator=generator)], 1)
    return ids


def weights_of(model) -> list[torch.Tensor]:
    """The second feed-forward projections, (outputs, inputs), sharing memory."""
    return [stored_weight(one.module) for one in projections(model) if one.role == "ffn_out"]


def with_super_weight(case: str):
    model = make_model(case)
    up = [one.module for one in projections(model) if one.role == "ffn_in" and one.layer == LAYER]
    with torch.no_grad():
        for module in up:
            stored_weight(module)[INPUT] *= 12
        weights_of(model)[LAYER][OUTPUT, INPUT] = 30.0
    return model


@pytest.mark.parametrize("case", ["gemma", "llama"])
def test_candidates_are_where_spikes_meet(case):
    """Against hooks of torch alone."""
    model = with_super_weight(case)
    blocks, seen, states = written_by(model), [], []
    (module,) = (one.module for one in projections(model) if one.role == "ffn_out" and one.layer == LAYER)
    hook = module.register_forward_hook(lambda _module, inputs, output: seen.append((inputs[0], output)))
    last = decoder_layers(model)[LAYER].register_forward_hook(lambda _layer, _inputs, output: states.append(output))
    perplexity(model, blocks)
    hook.remove()
    last.remove()
    inputs, outputs = (torch.cat([one[0] for one in side]) for side in zip(*seen, strict=True))
    found = pd.DataFrame(candidates(model, blocks, Candidates()))
    of_layer = found[(found["metric"] == "candidates.layer") & (found["layer"] == LAYER)].iloc[0]
    assert abs(of_layer["spike"]) == inputs.abs().max()
    assert abs(of_layer["value"]) == outputs.abs().max()
    assert (of_layer["output"], of_layer["input"]) == (OUTPUT, INPUT)
    values = torch.cat(states)[..., OUTPUT]  # (sequences, tokens)
    peaks = values.gather(1, values.abs().argmax(1, keepdim=True))
    assert of_layer["state"] == pytest.approx(peaks.mean().item(), rel=1e-5)
    assert of_layer["least"] == pytest.approx(peaks.abs().min().item(), rel=1e-5)
    assert found.iloc[2]["found_by"] == "activations"


def test_a_candidate_by_activations_has_both_spikes():
    model = make_model("opt")
    with torch.no_grad():
        weights_of(model)[LAYER][OUTPUT, INPUT] = 1000.0
    found = pd.DataFrame(candidates(model, written_by(model), Candidates()))
    of_layer = found[(found["metric"] == "candidates.layer") & (found["layer"] == LAYER)].iloc[0]
    assert abs(of_layer["value"]) > SPIKE > abs(of_layer["spike"])
    assert found["found_by"].dropna().eq("weights").all()


def test_a_candidate_by_the_weights_stands_out_of_row_or_column():
    model = make_model("gpt2")
    best = candidates(model, written_by(model), Candidates(count=1))[-1]
    scores = [
        torch.maximum(one.abs() / one.abs().mean(1, keepdim=True), one.abs() / one.abs().mean(0, keepdim=True))
        for one in weights_of(model)
    ]
    assert best["score"] == pytest.approx(max(one.max().item() for one in scores), rel=1e-5)
    assert best["score"] == pytest.approx(scores[best["layer"]][best["output"], best["input"]].item(), rel=1e-5)


@pytest.mark.parametrize("case", ["llama", "falcon"])
def test_a_planted_weight_is_named_first_and_has_the_controls(case):
    model = with_super_weight(case)
    found = outliers.super_weights(model, written_by(model))
    first = found[found["candidate"] == found["candidate"].iloc[0]]
    assert {*zip(first["layer"], first["output"], first["input"], strict=True)} == {(LAYER, OUTPUT, INPUT)}
    assert {"nearest", "neuron", "scaled"} <= {*first["treatment"]}


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_controls_are_the_ten_weights_of_the_model_that_are_nearest_in_magnitude(case):
    model = with_super_weight(case)
    found = [one for one in candidates(model, written_by(model), Candidates()) if "nearest" in one]
    weights = {one.path: stored_weight(one.module) for one in projections(model) if one.role == "ffn_out"}
    chosen = {str(WeightEntry(one["path"], one["output"], one["input"])) for one in found}
    for one in found:
        others = [
            (abs(abs(value) - abs(one["value"])), value, str(WeightEntry(path, *divmod(place, weight.shape[1]))))
            for path, weight in weights.items()
            for place, value in enumerate(weight.flatten().tolist())
        ]
        nearest = [other for other in sorted(others) if other[2] not in chosen][:10]
        assert one["nearest"] == [place for _, _, place in nearest]
        assert one["nearest_values"] == [value for _, value, _ in nearest]
    assert len({place.partition("[")[0] for one in found for place in one["nearest"]}) == 2, "of all layers"


def test_what_is_returned_is_what_perplexity_says():
    model = with_super_weight("gpt2")
    blocks = written_by(model, 3)  # in each of which its activation is massive
    before = [parameter.clone() for parameter in model.parameters()]
    found = outliers.super_weights(model, blocks, controls=2)
    assert all(map(torch.equal, before, model.parameters()))
    assert set(found["treatment"]) == {"weight", "nearest", "largest", "neuron", "row", "massive", "scaled"}
    variants = found.drop_duplicates("variant")
    measured = perplexities(model, blocks, [variant(one) for one in variants["variant"]])
    assert measured == variants["perplexity"].tolist()
    assert found["cost"].tolist() == (found["perplexity"] / perplexity(model, blocks) - 1).tolist()
    assert found["kl"].is_monotonic_decreasing
    drawn = found[found["treatment"].eq("weight") & found["deviation"].notna()]
    assert drawn["candidate"].nunique() == found.loc[found["treatment"] == "neuron", "candidate"].nunique()
    assert found.loc[found["treatment"] == "neuron", "candidate"].nunique() <= CONTROLLED


def test_a_super_weight_in_an_expert_is_found(blocks):
    """A weight that meets a unit with large inputs, in the expert that most tokens choose."""
    model = make_model("mixtral").requires_grad_(False)
    shares = outliers.trace(model, blocks).expert_shares().query("layer == 1")
    number = shares.sort_values("share")["expert"].iloc[-1]
    experts = decoder_layers(model)[1].mlp.experts
    experts.gate_up_proj[number, [5, 48 + 5]] *= 100
    experts.down_proj[number, 7, 5] = 3
    found = outliers.super_weights(model, blocks)
    assert f"model.layers.1.mlp.experts.{number}.down_proj[7,5]" in set(found["candidate"])
    costs = found[found["treatment"] == "weight"].set_index("candidate")["cost"]
    assert costs.abs().idxmax() == f"model.layers.1.mlp.experts.{number}.down_proj[7,5]"


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_massive_activations_at_a_value(case, blocks):
    """Against a hook of torch alone."""
    model = make_model(case)

    def hook(_module, _inputs, output):
        state = output[0] if isinstance(output, tuple) else output
        entries = state[..., 3]
        entries[entries.abs() > 0.5] = 7.0

    handle = decoder_layers(model)[0].register_forward_hook(hook)
    want = perplexity(model, blocks)
    handle.remove()
    changed = Massive((3,), 0, 7.0, 0.5)
    assert perplexities(model, blocks, [changed])[0] == want != perplexity(model, blocks)


def searched(costs: list[float], others: list[float], scatter: float = 1e-6, earlier: bool = False) -> list[dict]:
    """Made-up records of candidates with these costs, and of three other weights that all are compared with."""
    base = {"variant": "fp32", "metric": "perplexity", "value": 10.0, "model": "a/model"}
    records = [base]
    for number, cost in enumerate(costs):
        candidate = {"metric": "candidates.weight", "variant": "fp32", "found_by": "weights", "value": 2.0, "layer": 1}
        candidate |= {"path": "h.1.down", "output": 5, "input": number, "largest": [4, number], "least": 0, "state": 0}
        places = [f"8,{3 * number + one}" for one in range(3)]
        nearest = {"nearest": [f"h.0.down[{place}]" for place in places], "nearest_values": [1.5, -2.25, 2.0]}
        candidate |= {"equal": places} if earlier else nearest
        beside = iter(others)
        records.append(candidate)
        for kind, treated in treatments(candidate):
            value = 10 * (1 + {"weight": cost, "largest": 0.01, "neuron": 0.02, "row": 1.0}.get(kind, next(beside, 0)))
            row = base | {"variant": treated.name, "value": value}
            records += [row, row | {"value": 1.0001 * value, "standard_deviation": scatter * value}]
            if kind == "weight":
                records.append(row | {"metric": "damage.kl", "value": cost})
    return records + [base | {"variant": one.name, "value": 10.5} for one in scalings(records[1])]


NEAREST = [0.0, 0.07, 0.0]  # what the weights nearest in magnitude cost
ACCOUNTS = {
    "one super weight": searched([5.0, 0.06], [-0.01, 0.07, 0.01]),
    "two super weights": searched([5.0, 0.3], NEAREST),
    "two super weights of an earlier version": searched([5.0, 0.3], NEAREST, earlier=True),
    "a super weight within twice its cost": searched([0.3, 0.06], NEAREST),
    "none beyond the scatter of rounding": searched([0.3, 0.06], NEAREST, scatter=0.2),
    "none beyond its controls": searched([0.06, 0.05], NEAREST),
    "none, and the largest change is a fall": searched([0.001, -0.03], [0.0, -0.02, 0.0, 0.0]),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_account(name, as_kept):
    """Several may be super weights; the cost of the neuron stands beside each."""
    as_kept(name, shown(account_section(ACCOUNTS[name])))


def test_what_both_parts_of_an_account_search_counts_once():
    records = ACCOUNTS["one super weight"]
    assert len(cost_table([*records, *records])) == 2 * 7 + 3


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Account, Path, list[dict]]:
    """The account of a model with a massive activation that one weight writes, its folder, and its rows."""
    place = tmp_path_factory.mktemp("planted")
    model = with_super_weight("gemma")
    with torch.no_grad():
        weights_of(model)[LAYER][OUTPUT, INPUT] = 300.0
    model.save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    text = written_by(model).tolist()
    spec = Account(model=str(place / "model"), text=text, block=32, blocks=2, controls=2)
    return spec, place / "rows", run(spec, place / "rows")


def test_an_interrupted_account_is_drawn_without_what_is_missing(planted, tmp_path):
    spec, folder, _ = planted
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    without = [line for line in lines if '"name":"agreement"' not in line.replace(" ", "")]
    first = next(line for line in lines if line not in without)
    (tmp_path / "rows.jsonl").write_text("".join([*without, first]))
    section = show(spec, tmp_path, stored_rows(spec, tmp_path))
    assert "parts" in [table.name for table in section.tables]
    assert "(agreement): not measured yet" in section.notes[-1]


def test_massive_activations_without_what_makes_them(planted):
    *_, rows = planted
    becomes = after_removals(rows).set_index("removed")
    assert becomes.index.tolist() == ["nothing", "weight", "neuron", "activation", "feature", "position"]
    assert (becomes.loc["nothing", ["feature", "layer"]] == [OUTPUT, LAYER]).all()
    assert abs(becomes.loc["nothing", "entry"]) > 1000
    assert (becomes.loc[["weight", "neuron"], "entry"].abs() < 100).all()
    assert abs(becomes.loc["activation", "entry"]) <= abs(becomes.loc["nothing", "entry"]) / 2
    assert abs(becomes.loc["feature", "entry"]) > 1000, "it is there, but nobody reads it"
    assert becomes.loc["position", "share"] == 0
    assert (becomes["perplexity"].diff().dropna() != 0).all()


def test_the_whole_account(planted):
    *_, rows = planted
    section = account_section(rows)
    names = ["parts", "writers", "gates", "readers", "heads", "super_weights", "scaled", "massive", "sinks", "keys"]
    assert [table.name for table in section.tables] == names
    first = section.tables[names.index("super_weights")].data.iloc[0]
    assert (first["layer"], first["output"], first["input"]) == (LAYER, OUTPUT, INPUT)
    assert any("a massive activation" in finding.text for finding in section.findings)
