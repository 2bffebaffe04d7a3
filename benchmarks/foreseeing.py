"""How well a run is foreseen: time and memory that it says it needs beside those that it takes.

    python benchmarks/foreseeing.py

Traces and sweeps of three shapes with random weights, resident and streamed, run as the commands run them, each in a
process of its own. Kept: what each run prints that it will need, and what it takes: seconds from then on, and the peak
of its own memory. Checkpoint files that are mapped into it do not count, because the system drops them when it needs
their memory.
"""

import multiprocessing
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from checkpoints import checkpoint
from kept import keep, parser

TOKENS = 256
BLOCKS = {"gpt2-124m": 8, "opt-350m": 4, "opt-1.3b": 2}  # the larger the model, the shorter the text
SCHEMES = ["fp32", "absmax-vector", "llm.int8"]
COLUMNS = {
    "": "{what}",
    "model": "{model}",
    "layers": "{layers}",
    "seconds foreseen": "{foreseen_seconds:.1f}",
    "seconds taken": "{seconds:.1f}",
    "ratio of seconds": "{of_seconds:.2f}",
    "MB foreseen": "{foreseen_MB:.0f}",
    "MB taken": "{MB:.0f}",
    "ratio of MB": "{of_MB:.2f}",
}


def measure(what: str, name: str, folder: Path, blocks: int, stream: bool) -> dict:
    """A row of the table, measured in this process."""
    from outliers.experiment import engine
    from outliers.experiment.runner import run
    from outliers.specification.kinds import Experiment, OneModel

    specify = {
        "trace": lambda **fields: OneModel(model=str(folder), **fields),
        "sweep": lambda **fields: Experiment(models=[str(folder)], schemes=SCHEMES, **fields),
    }
    announced = []
    engine.announce = lambda foreseen: announced.append((foreseen.needs[0], time.perf_counter()))
    with TemporaryDirectory() as out, peak_of_own_memory() as peak:
        run(specify[what](block=TOKENS, blocks=blocks, stream=stream), out)
        end = time.perf_counter()
    ((needed, start),) = announced
    return {
        "what": what,
        "model": name,
        "layers": "streamed" if stream else "resident",
        "foreseen_seconds": needed.seconds,
        "seconds": end - start,
        "of_seconds": needed.seconds / (end - start),
        "foreseen_MB": needed.memory / 1e6,
        "MB": peak[0] / 1e6,
        "of_MB": needed.memory / peak[0],
    }


@contextmanager
def peak_of_own_memory():
    """The most bytes, mapped files aside, that this process has resident within the context; looked at 100 times a
    second."""
    peak, done, process = [0], threading.Event(), psutil.Process()

    def look() -> None:
        while not done.wait(0.01):
            taken = process.memory_info()
            peak[0] = max(peak[0], taken.rss - taken.shared)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield peak
    finally:
        done.set()
        looking.join()


def main() -> None:
    """Write the checkpoints if need be, run, and keep the table."""
    options = parser(__doc__)
    options.add_argument("--work", type=Path, default=Path("build/checkpoints"), help="where the checkpoints are")
    options.add_argument("--model", choices=BLOCKS, action="append", help="repeatable; by default all")
    arguments = options.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in arguments.model or BLOCKS:
            folder = pool.apply(checkpoint, (name, arguments.work))
            for stream in (False, True):
                for what in ("trace", "sweep"):
                    rows.append(pool.apply(measure, (what, name, folder, BLOCKS[name], stream)))
                    print(rows[-1], flush=True)
    keep("foreseeing", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
