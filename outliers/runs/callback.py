"""Measure outlier features while transformers' Trainer trains, for its reporters and as rows of the emergence."""

import re
import time
from pathlib import Path
from typing import ClassVar

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from outliers.config.experiment import Experiment
from outliers.config.fields import text_label
from outliers.criterion import ALPHA, PICTURES, check_threshold
from outliers.errors import BrokenModel, UserError, shown
from outliers.files import locked, write_whole
from outliers.metrics.records import Metric
from outliers.metrics.training import ERROR, KURTOSES, flat, watch_views, watched_values
from outliers.models.anatomy.examples import Examples
from outliers.models.anatomy.stack_views import of_stack
from outliers.models.anatomy.weights import device_of
from outliers.models.load import weights_hash
from outliers.models.stream import AS_IT_IS
from outliers.quantization.schemes import BASELINE
from outliers.runs.planner import CODE
from outliers.runs.rows import FILE, Row, Rows, append, read_rows
from outliers.subjects.provenance import environment
from outliers.text.blocks import tokens_hash
from outliers.text.given import checked_ids
from outliers.trainer.loop import log_extra

EVERY = 100  # steps; benchmarks/callback_cost.py says what that costs
PREFIX = "outliers/"  # of metrics' names in reporters
# Metrics that reporters get, also by role; rows have all metrics.
REPORTED = ("perplexity", ERROR, "count", "layers", "positions", "max", *KURTOSES, "attention_sink")
STEP = "step-"  # followed by a number: the checkpoint of a row


class WatchMetric(Metric):
    """The measurement of `outliers.watch`."""

    name: ClassVar[str] = "watch"

    alpha: float = ALPHA
    attention: bool = True


class OutlierCallback(TrainerCallback):
    """A callback of transformers' Trainer that measures how outlier features grow, see `outliers.watch`.

    `trainer.add_callback(OutlierCallback(trainer, blocks))` measures before the first step, after every `every` steps,
    and after the last one; it changes nothing in the model. Each time the Trainer logs the results as `outliers/count`
    and so on to all its reporters, and rows are added to `rows.jsonl`, from which `python -m outliers.emergence
    --redraw FOLDER` draws the growth of the features. A training that resumes from a checkpoint continues these rows.
    In a distributed training the main process measures while the others wait at their next step.
    """

    def __init__(
        self,
        trainer: Trainer,
        blocks: torch.Tensor | Examples,
        every: int = EVERY,
        alpha: float = ALPHA,
        attention: bool = True,
        folder: str | Path | None = None,
        name: str | None = None,
    ):
        """
        Args:
            trainer: whose reporters get the results.
            blocks: held-out token ids, int64 (blocks, T), as `outliers.load_text` makes them; or examples of the
                model's family, as the functions of `outliers.subjects` make them.
            every: steps between two measurements.
            alpha, attention: as for `outliers.watch`.
            folder: where the rows go; by default `outliers` in the Trainer's output folder. Rows of steps that this
                training has not reached yet, left there by another one, are moved to `rows.jsonl.left`.
            name: of the model in the rows; by default the Trainer's output folder.

        Raises:
            UserError: the blocks are none; `every` or alpha is out of range. While the Trainer trains, as
                `outliers.watch`, with the step; or the rows cannot be written.
        """
        if isinstance(blocks, torch.Tensor) and blocks.ndim == 2:
            blocks = checked_ids(blocks, "blocks")
        elif not isinstance(blocks, Examples):
            raise UserError(
                f"blocks are of type {type(blocks).__name__}; expected int64 token ids (blocks, T): outliers.load_text"
            )
        if not isinstance(every, int) or every < 1:
            raise UserError(f"every is {shown(every)}; expected a number of steps, at least 1")
        self.trainer, self.blocks, self.every = trainer, blocks, every
        self.alpha, self.attention = check_threshold("alpha", alpha), attention
        output = trainer.args.output_dir
        self.name = name or str(output)
        self.folder = Path(folder or Path(output, "outliers"))
        self.written: int | None = None  # step of the last row
        self.text = {"text": text_label(blocks), "block": blocks.shape[-1], "blocks": len(blocks)}
        self.metric = WatchMetric(alpha=self.alpha, attention=attention)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **_others: object,
    ) -> None:
        """Measure before the first step, so that an error of the measurement shows before any training."""
        if state.is_world_process_zero and not state.global_step:
            self._measure(state.global_step, control, model)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **_others: object,
    ) -> None:
        last = control.should_training_stop
        if state.is_world_process_zero and (last or state.global_step % self.every == 0):
            self._measure(state.global_step, control, model)

    def _measure(self, step: int, control: TrainerControl, model: torch.nn.Module) -> None:
        start = time.perf_counter()
        try:
            by_view = watch_views(model, self.blocks, self.alpha, self.attention)
        except BrokenModel as error:
            raise BrokenModel(f"step {step}: {error}") from None
        values = [of_stack(view) | value for view, metrics in by_view.items() for value in watched_values(metrics)]
        self._write(step, self._row(step, model, values, round(time.perf_counter() - start, 3)))
        reported = {
            view: {name: value for name, value in metrics.items() if name.partition(".")[0] in REPORTED}
            for view, metrics in by_view.items()
        }
        log_extra(self.trainer.log, control, {f"{PREFIX}{name}": value for name, value in flat(reported).items()})

    def _row(self, step: int, model: torch.nn.Module, values: list[dict], seconds: float) -> Row:
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        dtype, machine = str(model.dtype).removeprefix("torch."), environment(device_of(model))
        subject = {"model": self.name, "checkpoint": f"{STEP}{step}", **self.text, "dtype": dtype}
        subject |= Experiment.model_construct(device=machine["device"]).non_default()
        predicted = getattr(self.blocks, "protocol", "")
        provenance = {
            "weights_hash": weights_hash(model),
            "architecture": model.config.model_type,
            "parameters": model.num_parameters(),
            "tokens_hash": tokens_hash(self.blocks),
            "protocol": f"given-{predicted if predicted == PICTURES else f'blocks{predicted}'}",
            "code": machine.pop(CODE),
            "scheme": BASELINE,
            "alpha": self.alpha,
        }
        request = {"subject": subject, "variant": AS_IT_IS.name, "metric": self.metric.request}
        run = {"experiment": "emergence", **machine, "wall_seconds": seconds}
        return Row(request=request, provenance=provenance, values=values, run=run)

    def _write(self, step: int, row: Row) -> None:
        """Append the row of a step, after moving aside rows of this step and later ones that another training left."""
        if self.written is None or step <= self.written:
            self._move_aside(step)
        with locked(self.folder):
            append(self.folder, [row])
        self.written = step

    def _move_aside(self, step: int) -> None:
        with Rows(self.folder) as rows:
            stored = read_rows(self.folder)
            ahead = [row for row in stored if self._is_ahead(row, step)]
            if ahead:
                aside = rows.path.with_name(f"{FILE}.left")
                before = aside.read_bytes() if aside.exists() else b""
                write_whole(aside, before + _lines(ahead))
                write_whole(rows.path, _lines([row for row in stored if row not in ahead]))

    def _is_ahead(self, row: Row, step: int) -> bool:
        """Return whether a row is of this training's model and of a step that the training has not finished."""
        subject = row.request["subject"]
        match = re.fullmatch(rf"{STEP}(\d+)", subject.get("checkpoint", ""))
        return subject.get("model") == self.name and match is not None and int(match[1]) >= step


def _lines(rows: list[Row]) -> bytes:
    return b"".join(row.line + b"\n" for row in rows)
