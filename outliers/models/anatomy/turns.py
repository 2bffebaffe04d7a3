"""Layers that run several times in a pass with the same weights, as ALBERT's do."""

from collections.abc import Iterable
from threading import get_ident

from torch import nn


class Calls(dict[int, int]):
    """The number of the next call in each thread; as a pre-forward hook of a model it starts again with each pass."""

    independent = True

    def __call__(self, _module: nn.Module, _inputs: tuple[object, ...]) -> None:
        self.pop(get_ident(), None)


class Turns(nn.Module):
    """A replacement for a module that is called several times in a pass: one module for each call."""

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        self.calls = Calls()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self, *arguments: object, **keywords: object) -> object:
        thread = get_ident()
        turn = self.calls.get(thread, 0)
        self.calls[thread] = (turn + 1) % len(self._modules)
        return self.get_submodule(str(turn))(*arguments, **keywords)
