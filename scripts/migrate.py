"""Kept rows of before, to rows in four parts; deleted when all are."""

import json
import sys
from pathlib import Path

from outliers.runs.rows import Row, line_of
from outliers.variants.ablated import Ablated, Intervention

MADE = ("version", "commit", "python", "torch", "transformers", "triton", "bitsandbytes", "device_name", "threads")
MADE += ("wall_seconds", "peak_memory_bytes", "experiment", "same_weights_as", "streamed", "lm_eval_version")
SUBJECT = ("model", "checkpoint", "text", "block", "blocks", "dtype")
VALUES = ("metric", "value", "unit", "standard_deviation", "standard_error", "q1", "q3", "examples")
VALUES += ("layer", "role", "feature", "position", "token", "projection")


def subject_of(row: dict) -> dict:
    """A causal model, as its subject says it."""
    found = {name: row[name] for name in SUBJECT if name in row}
    if "text" in found:
        found["text"] = Path(found["text"]).name
    if row.get("protocol", "").endswith("+bos"):
        found["bos"] = True
    return found | ({"device": row["device"]} if row["device"] != "cpu" else {})


def parts(row: dict, variant: str, metric: dict, also_made: tuple = ()) -> tuple[dict, dict, dict, dict]:
    """What a flat row asks, its facts, its value, and where it was made; `metric` has its name and parameters."""
    subject = subject_of(row)
    asked = {"subject": subject, "variant": variant, "metric": metric}
    made = {name: row[name] for name in (*MADE, "device", *also_made) if name in row}
    value = {name: row[name] for name in VALUES if name in row}
    taken = {*subject, *made, *value, *metric, *also_made}
    return asked, {name: one for name, one in row.items() if name not in taken}, value, made


def sweep(rows: list[dict]) -> list[Row]:
    found = []
    for row in rows:
        draws = {"draws": row["draws"]} if row.get("draws", 1) != 1 else {}
        asked, facts, value, made = parts(row, row["scheme"], {"name": "perplexity", **draws})
        facts.pop("draws", None)
        found.append(Row(asked=asked, facts=facts, values=[value], made=made))
    return found


# Outlier features of models that have several, by the hash of their tokens: of kept ablations of that text, or traced
# again. Of checkpoints that are gone they are not known any more.
OUTLIERS = {
    ("pocket/gpt2-5.9m", "f41d2e2eb9953ac4"): [40, 224],
    ("pocket/opt-1.7m", "f41d2e2eb9953ac4"): [47, 91],
    ("pocket/gpt2-5.9m", "31df83e787883d42"): [40, 173, 224],
    ("pocket/opt-1.7m", "31df83e787883d42"): [47, 91],
}


def whole(of_model: list[dict], variant: str, metric: dict, drop: tuple = ()) -> Row:
    """One row of all values of a model."""
    asked = facts = made = None
    values = []
    for row in of_model:
        kept = {name: one for name, one in row.items() if name not in drop}
        asked, facts, value, made = parts(kept | {"scheme": "fp32"}, variant, metric)
        values.append(value)
    return Row(asked=asked, facts=facts, values=values, made=made)


def emergence(rows: list[dict], metric: dict | None = None) -> list[Row]:
    models: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        models.setdefault((row["model"], row.get("checkpoint")), {}).setdefault(row["metric"], []).append(row)
    found = []
    for of_metrics in models.values():
        perplexity, top1, without = (of_metrics.pop(m, []) for m in ("perplexity", *TOP1))
        (count,), (most,) = of_metrics["count"], of_metrics["most_common"]
        several = OUTLIERS.get((count["model"], count["tokens_hash"]))
        known = several if count["value"] > 1 else [int(most["value"])][: int(count["value"])]
        traced = whole([row for some in of_metrics.values() for row in some], "fp32", metric or {"name": "trace"})
        for value in traced.values if known is not None else ():
            value |= {"features": known} if value["metric"] == "count" else {}
        found += [whole(perplexity, "fp32", {"name": "perplexity"}, OF_TRACE), traced]
        if known:
            ablated = Ablated(Intervention(tuple(known)))
            without = [row | ablated.fields() | {"metric": "top1_softmax"} for row in without]
            found += [whole(top1, "fp32", {"name": "top1"}, OF_TRACE)]
            found += [whole(without, ablated.name, {"name": "top1"}, OF_TRACE)]
        else:
            found += [whole([*top1, *without], "fp32", {"name": "top1"}, OF_TRACE)]
    return found


OF_TRACE, TOP1 = ("alpha", "roles"), ("top1_softmax", "top1_softmax_without")


def trace(rows: list[dict]) -> list[Row]:
    return emergence(rows, {"name": "trace", "roles": rows[0]["roles"], "attention": True, "details": True})


def watched(rows: list[dict]) -> list[Row]:
    steps: dict[tuple, list[dict]] = {}
    for row in rows:
        steps.setdefault((row["model"], row["checkpoint"]), []).append(row)
    return [whole(of_step, "fp32", {"name": "watch"}) for of_step in steps.values()]


def ablation(rows: list[dict]) -> list[Row]:
    found = []
    for row in rows:
        features, method = tuple(row["features"]), row.get("method", "zero")
        variant = Ablated(Intervention(features, method, row["seed"]), tuple(row["where"])).name
        metric = {"name": {"top1_softmax": "top1"}.get(row["metric"], row["metric"])}
        found.append(whole([row], variant, metric))
    return found


KINDS = {"sweep": sweep, "emergence": emergence, "trace": trace, "watched": watched, "ablation": ablation}

if __name__ == "__main__":
    kind, *files = sys.argv[1:]
    for file in map(Path, files):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_bytes(b"".join(line_of(row) + b"\n" for row in KINDS[kind](rows)))
        print(file, len(rows))
