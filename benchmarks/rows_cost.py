"""What a folder of many rows costs: reading them when a run begins, adding one, and looking one up.

    python benchmarks/rows_cost.py                # a million rows of about a kilobyte
    python benchmarks/rows_cost.py --rows 100000

The rows are those of a sweep of one model under as many ablations. Adding one takes in that it is on the disk; of 100
added rows and 1,000 others, drawn at random, kept are the median and the largest time. Reading is timed once.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kept import keep, parser

from outliers.runs.rows import FILE, Row, Rows, line_of

ADDED, SOUGHT = 100, 1000
COLUMNS = {
    "rows": "{rows:,}",
    "reading (s)": "{reading:.1f}",
    "adding one (ms)": "{adding:.2f}, {adding_most:.2f} at most",
    "looking one up (ms)": "{finding:.3f}, {finding_most:.3f} at most",
}


def row(number: int) -> Row:
    """One of many: the perplexity of a model without a feature."""
    subject = {"model": "facebook/opt-1.3b", "dtype": "float32", "text": "c4", "block": 2048, "blocks": 64}
    hashes = {"weights_hash": "ac1b274ab5e372f9", "tokens_hash": "a0b766dfc9e188a4", "code": "0123456789abcdef"}
    facts = {"architecture": "opt", "parameters": 1_315_758_080, "protocol": "first-blocks", "scheme": "fp32", **hashes}
    machine = {"experiment": "ablate", "device": "cpu", "device_name": "a CPU of some name, 64 cores", "threads": 64}
    versions = dict.fromkeys(("python", "torch", "transformers", "triton", "bitsandbytes", "version"), "1.23.45+cpu")
    return Row(
        asked={"subject": subject, "variant": f"zero({number})", "metric": {"name": "perplexity"}},
        facts=facts | {"method": "zero", "features": [0], "where": ["attn_in"], "seed": 0},
        values=[{"metric": "perplexity", "value": 14.62, "unit": "1"}],
        made={**machine, **versions, "wall_seconds": 12.345, "peak_memory_bytes": 1_661_177_856},
    )


def milliseconds(call: Callable[[Row], object], rows: Iterable[Row]) -> list[float]:
    """What a call takes for each of some rows."""
    found = []
    for one in rows:
        start = time.perf_counter()
        call(one)
        found.append(1000 * (time.perf_counter() - start))
    return found


def measure(count: int, folder: Path) -> dict:
    """What a folder of so many rows costs."""
    before, after = line_of(row(0)).split(b"zero(0)")
    with open(folder / FILE, "wb") as file:
        file.writelines(b"%bzero(%d)%b\n" % (before, number, after) for number in range(count))
        os.fsync(file.fileno())  # now, and not where the first row is added
    sought = map(row, random.Random(0).sample(range(count), SOUGHT))
    start = time.perf_counter()
    with Rows(folder) as rows:
        reading = time.perf_counter() - start
        adding = milliseconds(rows.add, map(row, range(count, count + ADDED)))
        finding = milliseconds(lambda one: rows.find(one.asked, one.facts).values, sought)
    return {
        "rows": count,
        "reading": reading,
        "adding": statistics.median(adding),
        "adding_most": max(adding),
        "finding": statistics.median(finding),
        "finding_most": max(finding),
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="how many")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        keep("rows_cost", [measure(given.rows, Path(place))], COLUMNS, given.out)
