"""The commands, one file each: the experiment, its cells, its view, and the help text."""

from collections.abc import Callable
from typing import NamedTuple

from outliers.config.experiment import Experiment


class Command(NamedTuple):
    """A command.

    purpose: what it measures or prints, in one line without a full stop. help: Markdown: its task in a sentence, what
    it prints and writes, and examples. runs: a class of experiments, whose fields are the options; or a function, whose
    parameters are the options. An experiment with the field `models` takes several models as arguments, and another
    experiment before them; one with the field `model` takes one model; of a class
    with neither, the argument names an experiment.

    default: the experiment that runs if neither one nor models are given. instead: function of the given fields that
    returns fields to override in that experiment. redraws: whether it can draw the rows in a folder that something else
    wrote. example: an argument for messages. completed: function that adds to an experiment what its table needs.
    """

    purpose: str
    help: str
    runs: type[Experiment] | Callable[..., None]
    default: str | None = None
    instead: Callable[[dict], dict] = lambda fields: {}
    redraws: bool = False
    example: str = "pocket/gpt2-1.7m"
    completed: Callable[..., Experiment] = lambda experiment: experiment
