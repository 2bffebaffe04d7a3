"""Outlier features while transformers' Trainer trains: for its reporters, and as rows of the emergence."""

import json
import re
import time
from pathlib import Path

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from outliers.criterion import ALPHA, check_threshold
from outliers.errors import BrokenModel, UserError, shown
from outliers.experiment.provenance import environment
from outliers.experiment.row_check import check_row
from outliers.experiment.rows import RowFile
from outliers.files import locked, write_whole
from outliers.measurements.tracing import EmergenceRows, tidy
from outliers.measurements.training.watch import KURTOSES, watch
from outliers.models.load import weights_hash
from outliers.models.weight_files import state_of
from outliers.specification.kinds import said_of_text
from outliers.text.blocks import tokens_hash
from outliers.text.given import checked_ids
from outliers.training.loop import log_beside

EVERY = 100  # steps; benchmarks/callback_cost.py says what that costs
PREFIX = "outliers/"  # of what reporters call a metric
# What they are told, which may be followed by a role; rows have all.
REPORTED = ("perplexity", "count", "layers", "positions", "max", *KURTOSES, "attention_sink")
STEP = "step-"  # and a number: what rows call a checkpoint


class OutlierCallback(TrainerCallback):
    """Watches outlier features grow in a model that a Trainer trains, see `outliers.watch`, and changes nothing of it.

    `trainer.add_callback(OutlierCallback(trainer, blocks))` measures before the first step, after every so many, and
    after the last one. Each time the Trainer logs what was found, as `outliers/count` and so on, to all that it reports
    to, and its rows are added to `rows.jsonl`, from which `python -m outliers.emergence --redraw FOLDER` draws
    how the features grew. A training that goes on from a checkpoint goes on there. In a distributed training the
    main process measures, with the others waiting at their next step.
    """

    def __init__(
        self,
        trainer: Trainer,
        blocks: torch.Tensor,
        every: int = EVERY,
        alpha: float = ALPHA,
        attention: bool = True,
        folder: str | Path | None = None,
        name: str | None = None,
    ):
        """
        Args:
            trainer: whose reporters are told.
            blocks: held-out token ids, int64 (blocks, T), as `outliers.load_text` makes them.
            every: steps from one measurement to the next one.
            alpha, attention: as for `outliers.watch`.
            folder: where the rows go; by default `outliers` in the Trainer's output folder. Rows of steps that were
                there and that this training has not reached yet are moved to `rows.jsonl.left`.
            name: what rows call the model; by default the Trainer's output folder.

        Raises:
            UserError: the blocks are none; `every` or alpha is out of range. While the Trainer trains, as
                `outliers.watch`, with the step; or the rows cannot be written.
        """
        if not isinstance(blocks, torch.Tensor) or blocks.ndim != 2:
            raise UserError(
                f"blocks are of type {type(blocks).__name__}; expected int64 token ids (blocks, T): outliers.load_text"
            )
        if not isinstance(every, int) or every < 1:
            raise UserError(f"every is {shown(every)}; expected a number of steps, at least 1")
        self.trainer, self.blocks, self.every = trainer, checked_ids(blocks, "blocks"), every
        self.alpha, self.attention = check_threshold("alpha", alpha), attention
        output = trainer.args.output_dir
        self.name = name or str(output)
        self.rows = StepRows(Path(folder or Path(output, "outliers")), self.name)
        self.text = {
            "text": said_of_text(blocks),
            "tokens_hash": tokens_hash(self.blocks),
            "protocol": "given-blocks",
            "block": blocks.shape[1],
            "blocks": len(blocks),
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **_others
    ) -> None:
        """Measure the model that nothing was trained of, so that what cannot be measured is refused before a step."""
        if state.is_world_process_zero and not state.global_step:
            self._measure(state.global_step, control, model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **_others
    ) -> None:
        """Measure every so many steps, and after the last one."""
        last = control.should_training_stop
        if state.is_world_process_zero and (last or state.global_step % self.every == 0):
            self._measure(state.global_step, control, model)

    def _measure(self, step: int, control: TrainerControl, model: torch.nn.Module) -> None:
        start = time.perf_counter()
        try:
            found = watch(model, self.blocks, self.alpha, self.attention)
        except BrokenModel as error:
            raise BrokenModel(f"step {step}: {error}") from None
        common = {**self._fields(step, model), "wall_seconds": round(time.perf_counter() - start, 3)}
        self.rows.add(step, [common | row for row in tidy([found])])
        told = {name: value for name, value in found.items() if name.partition(".")[0] in REPORTED}
        log_beside(self.trainer.log, control, {f"{PREFIX}{name}": value for name, value in told.items()})

    def _fields(self, step: int, model: torch.nn.Module) -> dict:
        """What the rows of a step have in common, as `EmergenceRows` has them."""
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        return {
            "experiment": EmergenceRows.experiment,
            "model": self.name,
            "checkpoint": f"{STEP}{step}",
            "weights_hash": weights_hash(model),
            "architecture": model.config.model_type,
            "parameters": model.num_parameters(),
            "dtype": str(model.dtype).removeprefix("torch."),
            **self.text,
            **environment(model.device),
            "alpha": self.alpha,
        }


class StepRows:
    """The rows of a training in a folder, step by step.

    They are written as a whole at each step, and read again only where somebody else wrote them, so that a step costs
    the same however many there were.
    """

    def __init__(self, folder: Path, model: str):
        self.folder, self.model, self.path = folder, model, folder / "rows.jsonl"
        self._state: tuple | None = None  # of the file as it was written last
        self._content = ""

    def add(self, step: int, rows: list[dict]) -> None:
        """Write the rows of a step; those of it and of later ones, which another training left, are moved aside.

        Raises:
            UserError: they cannot be written, or another run has the folder.
        """
        for row in rows:
            check_row(row)
        if self._state is None or state_of(self.path) != self._state:
            self._read(step)
        self._content += _lines(rows)
        with locked(self.folder):
            write_whole(self.path, self._content)
            self._state = state_of(self.path)

    def _read(self, step: int) -> None:
        with RowFile(self.folder) as row_file:
            left = [row for row in row_file.rows if self._is_ahead(row, step)]
            self._content = _lines([row for row in row_file.rows if not self._is_ahead(row, step)])
        if left:
            aside = self.path.with_name(f"{self.path.name}.left")
            before = aside.read_text(encoding="utf-8") if aside.exists() else ""
            write_whole(aside, before + _lines(left))

    def _is_ahead(self, row: dict, step: int) -> bool:
        """Whether a row is of this training's model, and of a step that it has not finished."""
        found = re.fullmatch(rf"{STEP}(\d+)", row.get("checkpoint", ""))
        return row.get("model") == self.model and found is not None and int(found[1]) >= step


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
