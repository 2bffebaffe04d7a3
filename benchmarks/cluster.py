"""What a second worker brings: equal cells on a Ray of one core and on one of two.

    python benchmarks/cluster.py

A cell is the perplexity of a pocket model on a text, on one thread. The clock runs over all cells with the workers
warm; how long it takes to start Ray and to import torch in its workers is printed beside. Rounds alternate, because
machines have moods.
"""

import argparse
import statistics
import time

import ray
from tqdm import tqdm

from outliers.evaluation.perplexity import perplexity
from outliers.experiment.cell import Bench, Cell
from outliers.experiment.cluster import Cluster
from outliers.experiment.job import Job, prepare
from outliers.experiment.spec import Settings

MODEL = "pocket/gpt2-5.9m"


def measure(bench: Bench, job: Job, settings: Settings) -> float:
    """One cell."""
    model, _ = bench.load(job, settings)
    return perplexity(model, job.blocks)


def seconds(workers: int, cells: int, settings: Settings) -> tuple[float, float]:
    """Seconds to start so many workers, and to run so many cells on them."""
    job = prepare(MODEL, None, settings)
    cell = Cell("cell", measure, job, (settings,), 0)
    start = time.perf_counter()
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        with Cluster(settings, tqdm(disable=True)) as cluster:
            list(cluster.run([cell] * 4 * workers))
            started = time.perf_counter()
            list(cluster.run([cell] * cells))
            return started - start, time.perf_counter() - started
    finally:
        ray.shutdown()


def main() -> None:
    """Measure in turns and print the ratio of throughputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=32, help="of 256 tokens, a cell")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    settings = Settings(name="cluster", blocks=arguments.blocks, engine="ray")
    ratios = []
    for _ in range(arguments.rounds):
        (start_1, one), (start_2, two) = (seconds(workers, arguments.cells, settings) for workers in (1, 2))
        ratios.append(one / two)
        print(
            f"{arguments.cells} cells: one worker {one:.1f} s (start {start_1:.1f} s), two {two:.1f} s (start "
            f"{start_2:.1f} s): {ratios[-1]:.2f} times the throughput",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
