"""What models need of GPUs at inference, and on which hardware they fit, to rows (Table 3)."""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from outliers.errors import unknown_name
from outliers.experiment.provenance import environment
from outliers.experiment.rows import RowFile
from outliers.measurements.footprint import BITS, Footprint, fits, measure_footprint
from outliers.models.configs import find_config
from outliers.specification.kinds import Memory

OF_A_MODEL = ("metric", "bits", "hardware", "gpus", "gigabytes", "headroom")  # which of its rows one is


def measure_memory(spec: Memory, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Measure the footprint of every model, and say on which hardware it fits.

    No weights are read: it takes about a second a model. The rows of a model are on disk before the next one starts;
    rows found there are used again.

    Args:
        spec: what to measure.
        out: folder for `rows.jsonl`; by default `results/<name>`.
        force: measure again what is finished.

    Returns:
        Model by model: a row with its parameters, one with the bytes of its weights in 16 bits and one in 8, of its
        cache, and of its activations; and one for each hardware and number of bits: 1 where it fits, else 0. All say
        whether the model is one of the candidates.

    Raises:
        UserError: a model is unknown or unreachable, or cannot be run without its weights.
    """
    for name in spec.candidates or []:
        if name not in spec.models:
            raise unknown_name("candidate", name, spec.models, "(the field 'models' names it too)")
    configs = {name: find_config(name) for name in spec.models}
    with RowFile(Path(out or spec.folder)) as row_file:
        return [row for name, config in configs.items() for row in _measure(name, config, spec, row_file, force)]


def _measure(name: str, config: PretrainedConfig, spec: Memory, row_file: RowFile, force: bool) -> list[dict]:
    """The rows of one model, finished ones if all are there."""
    cell = {"experiment": spec.name, "model": name, "candidate": name in (spec.candidates or spec.models)}
    cell |= {"architecture": config.model_type, "context": spec.context, "batch": spec.batch}
    cell |= environment(torch.device("meta"))
    finished = {} if force else {_which(row): row for row in row_file.find_all(cell)}
    questions = _questions(spec)
    if all(_which(question) in finished for question in questions):
        about = {field: cell[field] for field in ("experiment", "candidate")}
        return [finished[_which(question)] | about for question in questions]
    footprint = measure_footprint(config, spec.context, spec.batch)
    cell |= {"parameters": footprint.parameters, "context_used": footprint.context}
    rows = [cell | question | {"value": _value(question, footprint)} for question in questions]
    row_file.add(*rows)
    return rows


def _which(row: dict) -> tuple:
    return tuple(row.get(field) for field in OF_A_MODEL)


def _questions(spec: Memory) -> list[dict]:
    """What is asked of every model: rows without a value."""
    places = [hardware.model_dump(exclude_none=True) for hardware in spec.hardware]
    return [
        {"metric": "parameters", "unit": "1"},
        *({"metric": "weights", "bits": bits, "unit": "bytes"} for bits in BITS),
        *({"metric": metric, "unit": "bytes"} for metric in ("cache", "activations")),
        *(
            {"metric": "fits", **place, "bits": bits, "headroom": spec.headroom, "unit": "1"}
            for place in places
            for bits in BITS
        ),
    ]


def _value(question: dict, footprint: Footprint) -> int:
    match question["metric"]:
        case "weights":
            return footprint.weights(question["bits"])
        case "fits":
            asked = {name: question[name] for name in ("bits", "gpus", "gigabytes", "headroom")}
            return int(fits(footprint, **asked))
        case metric:
            return getattr(footprint, metric)
