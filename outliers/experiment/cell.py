"""The pieces of an experiment, and what a process that measures them keeps between two."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from transformers import PreTrainedModel

from outliers.errors import BrokenModel, UserError
from outliers.experiment.job import Job, load
from outliers.models.stream import is_streamed
from outliers.models.weight_files import check_unchanged
from outliers.specification.kinds import Settings
from outliers.terminal.progress import Progress


class Cell(NamedTuple):
    """A piece of an experiment.

    what: what to call it in messages, beside its model. function: called with a `Bench`, the job and the arguments; it,
    they and what it returns travel between machines. steps: how far it moves the bar.
    """

    what: str
    function: Callable
    job: Job
    arguments: tuple
    steps: int

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"{self.job.name}, {self.what}"


@contextmanager
def named(model: str, *schemes: str) -> Iterator[None]:
    """Let what is wrong with a model say which one it is, and under which scheme."""
    try:
        yield
    except BrokenModel as error:
        under = f" under {' or '.join(schemes)}" if schemes else ""
        raise BrokenModel(f"'{model}'{under}: {error}") from None


def said(part: slice) -> str:
    """A part of a text."""
    return f"blocks {part.start} to {part.stop - 1}"


def size(part: slice) -> int:
    """How many blocks a part of a text has."""
    return part.stop - part.start


class Bench:
    """What a process that measures cells keeps between them: the last model that it loaded, and a bar to move."""

    def __init__(self, bar: Progress):
        self.bar = bar
        self._key, self._loaded, self._like = None, None, None

    def load(self, job: Job, settings: Settings, like: dict | None = None) -> tuple[PreTrainedModel, dict]:
        """The model of a job, in the form that it was left in, and the fields that all its rows have in common.

        Of a streamed model they do not say which weights it has, see `weights`.

        Raises:
            UserError: as `outliers.experiment.job.load`; or its weights are not those of the fields `like`, because
                they changed after another process read them.
        """
        self._like = like
        key = job.model, job.revision, settings.model_dump_json()
        if key != self._key:
            self._key = self._loaded = None  # never two at once
            self._loaded = load(job, settings)
            self._key = key
        if not is_streamed(self._loaded[0]):
            self.check_weights()
        return self._loaded

    def weights(self) -> dict:
        """Which weights the last model has, as a field of its rows; what of a streamed one was not read yet is read."""
        model, fields = self._loaded
        return {"weights_hash": model.stream.weights_hash() if is_streamed(model) else fields["weights_hash"]}

    def check_weights(self) -> None:
        """Raise UserError if the last model's weights are not those that it was to have; of a streamed one this is
        known when its layers were read."""
        if self._like and "weights_hash" in self._like:
            check_same_weights([self._like, self._like | self.weights()])

    def check_unchanged(self) -> None:
        """Raise UserError if the files of the last model changed since they were read."""
        if self._key:
            check_unchanged(*self._key[:2])

    def leave(self, model: PreTrainedModel) -> None:
        """Keep the last model in another form, such as under a scheme whose codes the next one shares."""
        self._loaded = model, self._loaded[1]


def check_same_weights(fields: list[dict]) -> None:
    """Raise UserError if measurements of a model, which several processes may have made, are of different weights."""
    if len({of_one["weights_hash"] for of_one in fields}) > 1:
        model = fields[0]["model"]
        raise UserError(f"the weights of '{model}' changed while they were measured; run again once they are whole")
