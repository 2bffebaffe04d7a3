"""Resumable training with the Trainer of transformers and a fixed order of the text."""

import json
import math
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from outliers.config.recipe import Recipe
from outliers.errors import BrokenModel
from outliers.models.anatomy import family_of
from outliers.models.anatomy.examples import Example, Examples
from outliers.models.pocket.ladder import WARMUP
from outliers.models.skeleton import quiet
from outliers.trainer.optimizers import optimizer_of

SAVED_EVERY, LOGGED_EVERY = 100, 20  # steps; the second divides the first, so that no mean loss spans a checkpoint
CHECKPOINTS = 2  # kept checkpoints, so that one is complete while the next is written
STATE = "trainer_state.json"  # the file of a checkpoint that is written last


def learning_rate(step: int, peak: float, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to zero."""
    return peak * min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def train(
    model: PreTrainedModel,
    recipe: Recipe,
    blocks: np.ndarray | Examples,
    folder: Path,
    measure: Callable[[PreTrainedModel, int], dict] = lambda model, step: {},
    steps: Collection[int] = (),
    progress: Callable[[int], object] = lambda steps: None,
) -> list[dict]:
    """Train a model in place: gradients clipped at 1.0, bfloat16 autocast if the recipe says so, weight decay on
    matrices and embeddings only.

    A checkpoint is written every 100 steps. A run that was stopped at any moment resumes from the last complete one,
    with the same losses as an uninterrupted run.

    Args:
        model: the model that `outliers.trainer.start.initial_model` returns.
        recipe: the recipe that the model was made by.
        blocks: token ids for next-token prediction, integers (steps · batch, T), or examples (steps · batch) with
            labels; in the order in which they are read.
        folder: of this run alone, for checkpoints.
        measure: function of the model and the number of a step that returns what to log after it.
        steps: the numbers of steps after which `measure` is called.
        progress: called with the number of steps since the last call, first with those of a resumed run.

    Returns:
        The log, in order: entries with `step` and the mean `loss` of the last 20 steps, or the values of `measure`.

    Raises:
        BrokenModel: a loss or a gradient is NaN or inf; the last checkpoint stays.
    """
    optimizer = optimizer_of(recipe.optimizer, model, recipe.learning_rate, recipe.weight_decay)
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, 1.0, recipe.steps))
    arguments = TrainingArguments(
        folder,
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        save_steps=SAVED_EVERY,
        save_total_limit=CHECKPOINTS,
        logging_steps=LOGGED_EVERY,
        logging_nan_inf_filter=False,
        report_to=[],
        use_cpu=model.device.type == "cpu",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    batch = partial(_batch, name=model.main_input_name)
    trainer = _Trainer(model, arguments, train_dataset=blocks, data_collator=batch, optimizers=(optimizer, schedule))
    trainer.autocast = recipe.autocast
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_MeasuringCallback(trainer.log, measure, steps, progress))
    checkpoint = last_checkpoint(folder)
    try:
        with quiet():  # the Trainer shows a bar for each file that it writes
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except BrokenModel as error:
        kept = last_checkpoint(folder)
        remains = f"the last good checkpoint is '{kept}'" if kept else "no checkpoint was written yet"
        raise BrokenModel(f"{error}; {remains}") from None
    return trainer.state.log_history


def _batch(blocks: list[np.ndarray | Example], name: str) -> dict:
    """Collate blocks (T,), or examples, under the name of the model's input."""
    if isinstance(blocks[0], Example):
        inputs, labels = map(torch.stack, zip(*blocks, strict=True))
        return {name: inputs, "labels": labels}
    return {name: torch.from_numpy(np.stack(blocks).astype(np.int64))}


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint in the folder of a run, and delete incomplete ones after it."""
    by_step = {int(path.name.rpartition("-")[2]): path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    for _, path in sorted(by_step.items(), reverse=True):
        try:
            json.loads((path / STATE).read_bytes())
            return path
        except (OSError, ValueError):
            shutil.rmtree(path)
    return None


def log_extra(log: Callable[[dict], None], control: TrainerControl, values: dict) -> None:
    """Log values in a callback of a Trainer, whose `log` would otherwise reset `control.should_log`, so that the
    Trainer would not log the step itself."""
    should_log = control.should_log
    log(values)
    control.should_log = should_log


class _Trainer(Trainer):
    """A Trainer that compiles the loss as a whole, and stops if it is not finite."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        torch.compiler.reset()  # else torch.compile gives up after several models in one process
        self.compiled = torch.compile(self._loss)

    def _loss(self, **inputs) -> torch.Tensor:
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.autocast):
            outputs = self.model(**inputs, **family_of(self.model.config).keywords)
        if "labels" in inputs:
            return outputs.loss
        following = inputs["input_ids"][:, 1:].flatten()
        return functional.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), following)

    def compute_loss(self, _model, inputs: dict, **_others) -> torch.Tensor:
        return self.compiled(**inputs)

    def training_step(self, model, inputs: dict, *others) -> torch.Tensor:
        loss = super().training_step(model, inputs, *others)
        check_step(self.state.global_step + 1, self.model, loss, lambda: self._loss(**self._prepare_inputs(inputs)))
        return loss


class _MeasuringCallback(TrainerCallback):
    """A callback that logs measurements of the model after some steps, before the checkpoint of the step is written."""

    def __init__(self, log: Callable, measure: Callable, steps: Collection[int], progress: Callable):
        self.log, self.measure, self.steps, self.progress = log, measure, steps, progress

    def on_train_begin(self, _arguments, state, _control, **_others) -> None:
        self.progress(state.global_step)

    def on_step_end(self, _arguments, state, control, model: PreTrainedModel, **_others) -> None:
        self.progress(1)
        if state.global_step in self.steps:
            log_extra(self.log, control, self.measure(model, state.global_step))


def check_step(step: int, model: nn.Module, loss: torch.Tensor, run: Callable[[], object]) -> None:
    """Raise BrokenModel unless the loss of a step and its gradients are finite.

    step: number of the step, counted from 1. run: runs the model once more, to find the cause of a loss that is not
    finite.
    """
    if not torch.isfinite(loss):
        where = _first_broken_output(model, run)
        raise BrokenModel(f"step {step}: the loss is {loss.item()}, {where}")
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not torch.isfinite(nn.utils.get_total_norm(gradients.values())):
        broken = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        place = f"first in '{broken[-1]}'" if broken else "whose norm is too large for a number"
        raise BrokenModel(f"step {step}: NaN or inf in the gradients, {place}, of {len(broken)} that have some")


@torch.no_grad()
def _first_broken_output(model: nn.Module, run: Callable[[], object]) -> str:
    """Run the model again and describe the first module whose output is not finite."""
    broken = []

    def look(name: str, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not broken and isinstance(tensor, torch.Tensor) and not torch.isfinite(tensor).all():
            broken.append(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
            stack.callback(hook.remove)
        run()
    return f"first in the output of '{broken[0]}'" if broken and broken[0] else "while all outputs of layers are finite"
