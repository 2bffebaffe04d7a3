"""Kept rows of before, to rows in four parts; deleted when all are."""

import json
import sys
from pathlib import Path

from outliers.runs.rows import Row, line_of

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


OF_DAMAGE = {"damage.largest_input": "inputs", "damage.error": "errors", "damage.error_by_token": "errors"}
OF_DAMAGE |= {"perplexity": "perplexity", "damage.kl": "agreement", "damage.top1_agreement": "agreement"}
OF_DAMAGE |= {"damage.perplexity_only": "places", "damage.perplexity_without": "places"}


def damage(rows: list[dict]) -> list[Row]:
    cells: dict[str, list[tuple]] = {}
    for row in rows:
        metric = {"name": OF_DAMAGE[row["metric"]]}
        if metric["name"] == "places" and "layer" in row:
            metric["by"] = "layer"
        if row.get("draws", 1) != 1:
            metric["draws"] = row["draws"]
        row = {"scheme": "fp32"} | {name: value for name, value in row.items() if name != "draws"}
        cells.setdefault(json.dumps([row["scheme"], metric]), []).append(parts(row, row["scheme"], metric))
    found = []
    for of_cell in cells.values():
        asked, facts, _, made = of_cell[0]
        spent = dict.fromkeys((one["wall_seconds"], one["peak_memory_bytes"]) for *_, one in of_cell)  # of each pass
        made |= {"wall_seconds": round(sum(seconds for seconds, _ in spent), 3)}
        made |= {"peak_memory_bytes": max(peak for _, peak in spent)}
        found.append(Row(asked=asked, facts=facts, values=[value for *_, value, _ in of_cell], made=made))
    return found


KINDS = {"sweep": sweep, "damage": damage}

if __name__ == "__main__":
    kind, *files = sys.argv[1:]
    for file in map(Path, files):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_bytes(b"".join(line_of(row) + b"\n" for row in KINDS[kind](rows)))
        print(file, len(rows))
