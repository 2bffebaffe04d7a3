"""All that waits for an NVIDIA GPU, for the first person who has one: tests, tables, a sweep and a trace on it.

    make gpu

Runs `STEPS` one after the other, about half an hour, and leaves one file to send back, `results/gpu.zip`: the rows,
tables and logs of every step, and `about.json` with the versions, what nvidia-smi says, and each step's command, exit
code and seconds. A step that fails is recorded, and the others go on. Exits with 1 if one failed, and with 2 if there
is no GPU.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from outliers.errors import UserError
from outliers.files import write_whole
from outliers.subjects.provenance import environment
from outliers.terminal.command import answering

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "gpu"
SECONDS = 1800  # of a step, after which it counts as hung
# Tests that skip, or run otherwise, where there is no GPU: all that compare a Triton kernel with the reference.
TESTS = sorted(
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "tests").glob("test_*.py")
    if re.search(r"\bHAS_GPU\b", file.read_text(encoding="utf-8"))
)
MODEL = "smollm2-135m"
# Step to the arguments of Python. What measures leaves its results in a folder of the step's name.
STEPS = {
    "model": ["-m", "outliers.get", MODEL],
    "tests": ["-m", "pytest", "--quiet", *TESTS],
    "layers": ["kernels/benchmarks/linear_layer.py"],
    "table5": ["-m", "outliers.report", "paper/table5"],
    "table6": ["-m", "outliers.report", "pocket/table6", "--device", "cuda"],
    "sweep": ["-m", "outliers.sweep", "--model", MODEL, "--block", "512", "--blocks", "16", "--device", "cuda"],
    "trace": ["-m", "outliers.trace", MODEL, "--block", "512", "--blocks", "16", "--device", "cuda"],
}
MEASURING = ("layers", "table5", "table6", "sweep", "trace")


def check_gpu() -> None:
    """Raise UserError where torch has no NVIDIA GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} finds no NVIDIA GPU, which all of this is for; "
            "expected one with its driver, and a build of torch for CUDA"
        )


def arguments_of(name: str) -> list[str]:
    """Those of Python in a step."""
    return [*STEPS[name], *(["--out", str(FOLDER / name)] if name in MEASURING else [])]


def run(name: str) -> dict:
    """What became of a step; what it printed is in `NAME.log`."""
    command, start = [sys.executable, *arguments_of(name)], time.perf_counter()
    with open(FOLDER / f"{name}.log", "w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {SECONDS} seconds"
    seconds = round(time.perf_counter() - start, 1)
    return {"step": name, "arguments": STEPS[name], "exit_code": code, "seconds": seconds}


def about_gpu() -> dict:
    """Versions, and what the driver says."""
    try:
        driver = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        driver = str(error)
    return environment("cuda") | {"cuda": torch.version.cuda, "nvidia-smi": driver}


def main() -> int:
    """Run all steps and pack what they left; whether one failed."""
    with answering():
        check_gpu()
    FOLDER.mkdir(parents=True, exist_ok=True)
    about, steps = about_gpu(), []
    for number, name in enumerate(STEPS, 1):
        print(f"{number}/{len(STEPS)} {name}: python {' '.join(STEPS[name])}", flush=True)
        steps.append(run(name))
        if steps[-1]["exit_code"]:
            print(f"    failed (exit code {steps[-1]['exit_code']}), see {FOLDER / name}.log", flush=True)
        # after each, so that a run that is stopped leaves what it has
        write_whole(FOLDER / "about.json", json.dumps(about | {"steps": steps}, indent=1) + "\n")
        packed = shutil.make_archive(str(FOLDER), "zip", FOLDER)
    print(f"\n{about['device_name']}: {packed}\nSend this file back, with an issue of the repository.")
    return int(any(step["exit_code"] for step in steps))


if __name__ == "__main__":
    sys.exit(main())
