"""What a second worker brings: equal tasks on a Ray of one core and on one of two.

    python benchmarks/cluster.py

A task is the perplexity of a pocket model on a text, on one thread. The clock runs over all tasks with the workers
warm; how long it takes to start Ray and to import torch in its workers is kept beside. One worker and two are measured
in turns, so that a machine that is slower for a while is slower for both.
"""

import statistics
import time

import ray
from kept import keep, parser

from outliers.metrics.perplexity import perplexity
from outliers.runs.cluster import Cluster
from outliers.specification.kinds import Settings
from outliers.subjects.bench import Bench
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Task
from outliers.terminal.progress import Progress

MODEL = "pocket/gpt2-5.9m"


def measure(bench: Bench, subject: Causal) -> float:
    """One task."""
    return perplexity(subject.load(bench), subject.blocks)


def seconds(workers: int, tasks: int, settings: Settings) -> tuple[float, float]:
    """Seconds to start so many workers, and to run so many tasks on them."""
    subject = Causal(MODEL, None, settings)
    subject.prepare()
    task = Task("task", measure, subject, (), 0)
    start = time.perf_counter()
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        with Progress(0) as bar, Cluster(settings, bar) as cluster:
            list(cluster.run([task] * 4 * workers))
            started = time.perf_counter()
            list(cluster.run([task] * tasks))
            return started - start, time.perf_counter() - started
    finally:
        ray.shutdown()


COLUMNS = {
    "workers": "{workers}",
    "seconds to start": "{start:.1f}",
    "seconds for {tasks} tasks": "{seconds:.1f}",
    "times the throughput of one": "{times:.2f}",
}


def main() -> None:
    """Measure in turns and keep the medians."""
    options = parser(__doc__)
    options.add_argument("--tasks", type=int, default=16)
    options.add_argument("--blocks", type=int, default=32, help="of 256 tokens, a task")
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    settings = Settings(name="cluster", blocks=arguments.blocks, engine="ray")
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append({workers: seconds(workers, arguments.tasks, settings) for workers in (1, 2)})
        print(rounds[-1], flush=True)
    rows = [
        {
            "workers": workers,
            "start": statistics.median(found[workers][0] for found in rounds),
            "seconds": statistics.median(found[workers][1] for found in rounds),
            "times": statistics.median(found[1][1] / found[workers][1] for found in rounds),
        }
        for workers in (1, 2)
    ]
    columns = {header.format(tasks=arguments.tasks): form for header, form in COLUMNS.items()}
    keep("cluster", rows, columns, arguments.out)


if __name__ == "__main__":
    main()
