"""What a person waits for at the start: `import torch`, a model's class, a model in memory, the smallest trace.

    OMP_NUM_THREADS=1 python benchmarks/start.py

Each is a process of its own, with all files in the system's cache and what numba compiles on disk; they take turns.
Kept are medians of wall and of CPU seconds, the latter also as a median of ratios to those of `import torch` in the
same turn; and of loading a model the modules that take longest to import, each with what it imports first.
"""

import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from kept import from_other_folders, keep, parser

MODEL = "pocket/gpt2-0.1m"
LOAD = f"import outliers; outliers.load_model('{MODEL}')"
TORCH = "import torch"
WAYS = {
    TORCH: ["-c", TORCH],
    "import a model's class": ["-c", "from transformers import GPT2LMHeadModel"],
    "load_model": ["-c", LOAD],
    "trace": ["-m", "outliers.trace", MODEL, "--force"],
    "trace again": ["-m", "outliers.trace", MODEL],
}
IMPORTED = re.compile(r"import time: +\d+ \| +(\d+) \| +(\S+)")  # microseconds, module
LARGEST = 20  # modules


def seconds(arguments: list[str], folder: str) -> tuple[float, float]:
    """Return the wall and CPU seconds of a process."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], cwd=folder, env=from_other_folders(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, spent


def measure(rounds: int) -> list[dict]:
    """Return a row for each way; the first round, which fills the caches, does not count."""
    found = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for way, arguments in WAYS.items():
                spent = seconds(arguments, folder)
                if number:
                    found[way].append(spent)
    return [
        {
            "what": way,
            "wall": statistics.median(wall for wall, _ in spent),
            "cpu": statistics.median(cpu for _, cpu in spent),
            "of_torch": statistics.median(cpu / one for (_, cpu), (_, one) in zip(spent, found[TORCH], strict=True)),
        }
        for way, spent in found.items()
    ]


def imports(rounds: int) -> list[dict]:
    """Return a row for each of the modules that take longest to import when a model is loaded, in the fastest round."""
    program = [sys.executable, "-X", "importtime", "-c", LOAD]
    lines = [subprocess.run(program, check=True, capture_output=True, text=True).stderr for _ in range(rounds)]
    modules = [[(int(time), name) for time, name in IMPORTED.findall(found)] for found in lines]
    fastest = min(modules, key=lambda found: max(found))
    return [{"module": name, "seconds": time / 1e6} for time, name in sorted(fastest, reverse=True)[:LARGEST]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    arguments = options.parse_args()
    columns = {"": "{what}", "seconds": "{wall:.2f}", "CPU seconds": "{cpu:.2f}", "of `import torch`": "{of_torch:.2f}"}
    keep("start", measure(arguments.rounds), columns, arguments.out)
    columns = {"module": "{module}", "seconds": "{seconds:.2f}"}
    keep("start_imports", imports(arguments.rounds), columns, arguments.out)


if __name__ == "__main__":
    main()
