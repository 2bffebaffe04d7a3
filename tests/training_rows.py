"""Rows of training runs as nobody measured them, with numbers that a test can foresee."""

from collections.abc import Mapping

from outliers.commands.training import Training
from outliers.criterion import OF_EVERY_STACK
from tests.small_models import names_of

TABLE7 = {
    "16 bits": {},
    "FFN": {"int8": ["ffn"]},
    "FFN, linear": {"int8": ["ffn", "linear"]},
    "FFN, linear, 2 %": {"int8": ["ffn", "linear"], "decomposition": 0.02},
    "FFN, linear, attention, 2 %": {"int8": ["ffn", "linear", "attention"], "decomposition": 0.02},
}


def rows_of_runs(
    spec: Training, ends: Mapping[str, list[float]], grows: Mapping[str, float] | None = None
) -> list[dict]:
    """What an experiment would measure, seed by seed.

    ends: of each run the perplexity that it ends with, by seed in the order of the experiment. grows: the largest
    |x| at the end, 4 unless it says another; everything from 6 on makes an outlier feature.
    """
    rows = []
    for place, seed in enumerate(spec.seeds):
        for name, values in ends.items():
            largest = (grows or {}).get(name, 4.0) * 1.01**place
            rows += _of_run(spec, name, seed, values[place], largest)
    return rows


def _of_run(spec: Training, name: str, seed: int, perplexity: float, largest: float) -> list[dict]:
    recipe = spec.runs[name]
    about = {
        "experiment": "training",
        "run": name,
        "seed": seed,
        **recipe.in_rows,
        "trained_on": "0123456789ab",
        "text": spec.text,
        "protocol": "first-blocks",
        **spec.model_dump(include={"block", "blocks", "alpha", "dtype", "draws", "device"}),
        "architecture": "gpt2",
        "parameters": 478_560,
        "unit": "1",
    }
    rows = []
    for step in sorted({*(step for step in spec.watched if step < recipe.steps), recipe.steps}):
        found = _watched(perplexity * recipe.steps / step, 1 + (largest - 1) * step / recipe.steps, spec.alpha)
        kept = found if step == recipe.steps else {k: v for k, v in found.items() if not k.startswith("kurtosis")}
        rows += [about | {"checkpoint": f"step-{step}", "metric": metric, "value": v} for metric, v in kept.items()]
    for scheme, times in {"fp32": 1.0, **dict(zip(names_of(spec), (1.1, 1.01), strict=False))}.items():
        end = {"metric": f"perplexity.{scheme}", "value": times * perplexity, "standard_deviation": 0.001 * perplexity}
        rows.append(about | {"checkpoint": f"step-{recipe.steps}"} | end)
    return rows


def _watched(perplexity: float, largest: float, alpha: float) -> dict[str, float]:
    """As `outliers.watch` names it."""
    inputs = {f"max.{role}": largest / number for number, role in enumerate(OF_EVERY_STACK, 1)}
    kurtoses = {f"kurtosis_feature.{role}": 1 + largest / number for number, role in enumerate(OF_EVERY_STACK, 1)}
    count = float(largest >= alpha)
    found = {"perplexity": perplexity, "count": count, "max": largest, "max.residual": 10 * largest}
    return found | {"attention_sink": 0.25} | inputs | kurtoses
