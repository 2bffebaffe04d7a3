"""The pieces of an experiment that an engine runs."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A piece of an experiment.

    what: what to call it in messages, beside its subject. function: called with a `Bench`, the subject and the
    arguments; it, they and what it returns travel between machines. steps: how far it moves the bar. number: of those
    that belong together, such as parts of a text.
    """

    what: str
    function: Callable
    subject: Any
    arguments: tuple
    steps: int
    number: int = 0

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"{self.subject.name}, {self.what}"
