"""What `outliers.OutlierCallback` costs beside the training that it watches.

    OMP_NUM_THREADS=1 python benchmarks/callback_cost.py

The Trainer trains `pocket/gpt2-1.7m` with batches of 8 blocks of 256 tokens, and the callback measures 8, 16 and 32
held-out blocks of 256 tokens in turn, each time with its rows, the hash of the weights and what is logged. All are in
one run, in CPU seconds of the process; kept are medians, and a measurement as a share of the steps between two of them
at the default interval.
"""

import statistics
import tempfile
from itertools import cycle
from time import process_time

import torch
from kept import keep, parser
from transformers import Trainer, TrainerCallback, TrainingArguments

from outliers import OutlierCallback, load_model, load_text, load_tokenizer
from outliers.runs.callback import EVERY

MODEL, TOKENS, BATCH = "pocket/gpt2-1.7m", 256, 8
HELD_OUT = (8, 16, 32)  # blocks


class StepTimer(TrainerCallback):
    """A callback that records the CPU seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_given, **_others) -> None:
        self.start = process_time()

    def on_step_end(self, *_given, **_others) -> None:
        self.seconds.append(process_time() - self.start)


class Timed(TrainerCallback):
    """A callback that calls one of several callbacks after some steps, in turn, and records their CPU seconds."""

    def __init__(self, callbacks: dict[int, OutlierCallback], every: int):
        self.seconds, self.every = {blocks: [] for blocks in callbacks}, every
        self.turns = cycle(callbacks.items())

    def on_step_end(self, arguments, state, control, **others) -> None:
        if state.global_step % self.every == 0:
            blocks, callback = next(self.turns)
            start = process_time()
            callback.on_step_end(arguments, state, control, **others)
            self.seconds[blocks].append(process_time() - start)


def measure(steps: int, every: int) -> list[dict]:
    """Train and time; return a row for each size of the held-out text."""
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    blocks = load_text("sample", tokenizer, TOKENS)
    data = [{"input_ids": ids, "labels": ids} for ids in blocks]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            logging_steps=every,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        timer = StepTimer()
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[timer])
        callbacks = {
            held: OutlierCallback(trainer, blocks[:held], every=1, folder=f"{folder}/{held}") for held in HELD_OUT
        }
        timed = Timed(callbacks, every)
        trainer.add_callback(timed)
        trainer.train()
    step = statistics.median(timer.seconds)
    rows = []
    for held, seconds in timed.seconds.items():
        once = statistics.median(seconds[1:])  # the first one asks for versions and hashes the code
        rows.append({"held_out": held, "step": step, "once": once, "share": once / (EVERY * step), "first": seconds[0]})
    return rows


COLUMNS = {
    "held-out blocks": "{held_out}",
    "CPU seconds a step": "{step:.3f}",
    "CPU seconds a measurement": "{once:.3f}",
    f"share of {EVERY} steps": "{share:.2%}",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--every", type=int, default=4, help="steps from one measurement to the next")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    keep("callback_cost", measure(arguments.steps, arguments.every), COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
