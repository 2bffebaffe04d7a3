"""Everyday tasks with every public name, for type checkers alone: `make types` reads this file, and nothing runs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

import outliers
from outliers.metrics.damages import Damages
from outliers.metrics.origins import WriterAccount
from outliers.models.anatomy.examples import Examples
from outliers.quantization.caches import QuantizedCache
from outliers.views.anatomy import ModelAnatomy

model = outliers.load_model(outliers.pocket_models()[0], device=torch.device("cpu"))
tokenizer = outliers.load_tokenizer("pocket/gpt2-0.1m")
blocks = outliers.load_text("sample", tokenizer, block=256, blocks=8)
sequences = outliers.load_text(["A text.", "Another."], tokenizer, block=None)
pictures = Examples(torch.randn(4, 3, 16, 16), torch.tensor([[0], [1], [2], [0]]))
assert_type(model, PreTrainedModel)
assert_type(tokenizer, PreTrainedTokenizerBase)
assert_type(blocks, torch.Tensor)
assert_type(sequences, list[torch.Tensor])
assert_type(outliers.adopt(model), PreTrainedModel)
assert_type(outliers.anatomy("pocket/gpt2-0.1m"), ModelAnatomy)

trace = outliers.trace(model, blocks, roles=["ffn_out"], tokens=tokenizer)
assert_type(trace, outliers.Trace)
outliers.masks(model, blocks, trace=trace).save("masks")
features: pd.DataFrame = trace.outlier_features()
assert_type(outliers.hidden_states(model, sequences, layer=1, role="ffn_out"), Iterator[torch.Tensor])
assert_type(outliers.table4_row(trace, perplexity=1.0), dict[str, float])
assert_type(outliers.watch(model, pictures), dict[str, float])
outliers.compare(trace, outliers.Trace.load(Path("trace"))).query("share > 0.5")


def clamp(layer: int, role: str, x: torch.Tensor) -> torch.Tensor:
    """A function for hooks."""
    return x.clamp(-layer, len(role))


with outliers.hooks(model, clamp, roles=["attn_in"], layers=range(2)):
    assert_type(outliers.perplexity(model, blocks, attention_mask=torch.ones(8, 256)), float)

row = outliers.Quantizer("int8", "row")
assert_type(outliers.SCHEMES, dict[str, outliers.Scheme])
transform = outliers.Transform(fit=lambda w: w, hidden_states=lambda x, t: x, weight=lambda w, t: w, name="mine")
mine = outliers.Scheme("mine", row, weights=None, remedies=[transform, "clip=0.99@ffn_out"])
calibration = outliers.calibrate(model, blocks, [mine, "w8a8"])
assert_type(calibration, outliers.Calibration)
assert_type(outliers.quantize(model, mine, keep="int8", skip=["*.down_proj"], calibration=calibration), PreTrainedModel)
plan = outliers.read_plan("plan.yaml")
assert_type(plan, outliers.Plan)
print(outliers.export(plan, "llama-quantize", model))
assert_type(outliers.plan(model, blocks, mine, confirm=blocks, cost=0.02, instead=["llm.int8"]), outliers.Plan)
assert_type(outliers.quantize(model, plan.scheme, skip=plan.exact, instead=plan.instead), PreTrainedModel)
assert_type(outliers.export(plan, "torchao", model), Any)
config = outliers.OutliersConfig("llm.int8", skip=["ffn_out"], plan="plan.yaml")
assert_type(config.to_dict(), dict[str, Any])
assert_type(outliers.load_int8("gpt2", scheme="llm.int8"), PreTrainedModel)
assert_type(outliers.load_quantized(Path("folder")), PreTrainedModel)
assert_type(outliers.cache(model, "kv=int4"), QuantizedCache)
outliers.save_quantized(model, "folder")
outliers.train_int8(model, attention=True)
outliers.plant(model, [3], factor=10.0)

variants: list[outliers.Variant] = [
    outliers.variant("absmax+hadamard"),
    outliers.Quantized(mine, skip=("layers.0",)),
    outliers.Planted((3,), 10.0),
    outliers.Together((outliers.Ablated(outliers.Intervention((3,))), outliers.variant("kv=int4"))),
]
assert_type(outliers.perplexities(model, blocks, variants), list[float])
assert_type(outliers.bits_per_byte(model, "sample", tokenizer, 64, 2), float)
assert_type(outliers.ablate(model, blocks, features["feature"], methods=["mean"]), pd.DataFrame)
assert_type(outliers.damage(model, blocks, "absmax", by=["error"]), Damages)
assert_type(outliers.origins(model, blocks, [3], variant=variants[0], tokens=tokenizer), WriterAccount)
assert_type(outliers.readers(model, blocks, [3], places=["q"]), pd.DataFrame)
assert_type(outliers.super_weights(model, pictures), pd.DataFrame)

experiment = outliers.Sweep(models=["gpt2"], schemes=["fp32", mine], blocks=2)
rows = outliers.sweep(experiment) + outliers.sweep(models=["gpt2"], out="results", force=True)
rows += outliers.run(outliers.Emergence(models=["gpt2"]), out=Path("results"))
rows += outliers.run(outliers.Cells(models=["gpt2"], metrics=["top1"]))
assert_type(outliers.frame(rows, provenance=True), pd.DataFrame)


def watched(trainer: Trainer) -> outliers.OutlierCallback:
    """A training that is watched."""
    try:
        return outliers.OutlierCallback(trainer, blocks, every=10, folder="results")
    except outliers.UserError as error:
        raise SystemExit(str(error)) from None


axes = plt.subplots()[1]
print(outliers.plot.LOOK["font.size"])
outliers.plot.heat_map(trace, role="ffn_out", ax=axes)
with outliers.plot.your_style():
    outliers.plot.damage_map(outliers.damage(model, blocks, "absmax"))
