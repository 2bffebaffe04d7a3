"""Write the perplexity of a plan as other libraries compute it, beside ours, to results/kept/plans: rows and a table.

    python scripts/exported.py path/to/c4.jsonl

Each library of the extra `peers` gets the export of one plan of SmolLM2-135M, two layers' second feed-forward
projections exact, and quantizes the model by it. Perplexities are of 2 blocks of 512 tokens, with draws. torchao and
compressed-tensors have 256 codes in int8, and we 255; a scheme of ours in their codes shows what that makes of it.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from outlier_kernels.formats import FORMATS, Format, Quantizer
from outlier_kernels.reference import Quantized
from tabulate import tabulate

import outliers
from outliers.models.anatomy import projections
from outliers.models.load import weights_hash
from outliers.variants.draw import drawn, value_over_draws

sys.path.append(str(Path(__file__).parents[1]))

from tests.peers import APPLIED

PATH = Path(__file__).parents[1] / "results" / "kept" / "plans"
MODEL, BLOCK, BLOCKS, DRAWS = "smollm2-135m", 512, 2, 6
EXACT = ["model.layers.11.mlp.down_proj", "model.layers.28.mlp.down_proj"]
EXPORTS = (
    ("absmax-vector", "torchao"),
    ("absmax-vector", "compressed-tensors"),
    ("llm.int8-bnb", "bitsandbytes"),
    ("absmax", "torchao"),
    ("absmax", "compressed-tensors"),
)


def quantize_256(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize to codes from −128 to 127 at a scale of max/127.5."""
    scale = matrix.abs().amax(1 if quantizer.per_row else (0, 1), keepdim=True) / 127.5
    return Quantized((matrix / scale.clamp(min=1e-30)).round().clamp(-128, 127).to(torch.int8), scale)


FORMATS["int8-256"] = Format(quantize_256, symmetric=(True,), integers=True)
IN_256 = {
    name: outliers.Scheme(f"{name} in 256 codes", *(Quantizer("int8-256", one) for one in granularities))
    for name, granularities in {"absmax-vector": ("row", "column"), "absmax": ("tensor", "tensor")}.items()
}


def main(text: str) -> None:
    """Measure the perplexity of each export, and write the results with the versions of the libraries."""
    model, tokenizer = outliers.load_model(MODEL), outliers.load_tokenizer(MODEL)
    blocks = outliers.load_text(text, tokenizer, block=BLOCK, blocks=BLOCKS)
    count = len(list(projections(model)))
    rows = [{"by": "nobody", "scheme": "fp32", **perplexity(model, blocks)}]
    for scheme in [*dict.fromkeys(scheme for scheme, _ in EXPORTS), *IN_256.values()]:
        made = outliers.quantize(model, scheme, skip=EXACT)
        rows.append({"by": "outliers", "scheme": getattr(scheme, "name", scheme), **perplexity(made, blocks)})
        print(rows[-1], flush=True)
    for scheme, format in EXPORTS:
        plan = outliers.Plan(model=MODEL, scheme=scheme, exact=EXACT, projections=count)
        made = APPLIED[format](model, outliers.export(plan, format, model))
        rows.append({"by": format, "scheme": scheme, **perplexity(made, blocks)})
        print(rows[-1], flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {name: version(name) for name in ("torchao", "compressed-tensors", "bitsandbytes")}
    about = {"model": MODEL, "weights_hash": weights_hash(model), "exact": EXACT, "block": BLOCK, "blocks": BLOCKS}
    PATH.mkdir(parents=True, exist_ok=True)
    kept = {**about, "draws": DRAWS, "versions": versions, "rows": rows}
    (PATH / "exported.json").write_text(json.dumps(kept, indent=1) + "\n")
    (PATH / "exported.md").write_text(table(rows) + "\n")


def perplexity(model: transformers.PreTrainedModel, blocks: torch.Tensor) -> dict:
    """Return the mean and the standard deviation of the perplexity over draws."""
    found = []
    for draw in range(DRAWS):
        with drawn(model, draw):
            found.append(outliers.perplexity(model, blocks))
    return value_over_draws(found)


def table(rows: list[dict]) -> str:
    """Return a table of perplexities: a row a scheme, a column for each library that computed them."""
    cells = {(row["scheme"], row["by"]): f"{row['value']:.2f} ± {row['standard_deviation']:.2f}" for row in rows}
    cells |= {(scheme, "ours, 256 codes"): cells[own.name, "outliers"] for scheme, own in IN_256.items()}
    columns = ["outliers", "ours, 256 codes", *dict.fromkeys(format for _, format in EXPORTS)]
    lines = [[scheme, *(cells.get((scheme, by), "–") for by in columns)] for scheme in dict(EXPORTS)]
    return tabulate(lines, ["scheme", "ours", *columns[1:]], "github", disable_numparse=True)


if __name__ == "__main__":
    main(sys.argv[1])
