"""Commands as a user types them, run in this process."""

import runpy
import sys

SMALL = ["--model", "pocket/gpt2-0.1m", "--block", "64", "--blocks", "2", "--scheme", "fp32", "--scheme", "absmax"]


def type_words(monkeypatch, *words) -> None:
    """Let these be the arguments of this process, its name the first."""
    monkeypatch.setattr(sys, "argv", list(map(str, words)))


def call(monkeypatch, capsys, *arguments, command="sweep") -> tuple[int, str, str]:
    """Exit code, output and errors of `python -m outliers.sweep …`, or another command, run in this process."""
    type_words(monkeypatch, command, *arguments)
    monkeypatch.delitem(sys.modules, f"outliers.{command}", raising=False)  # of which runpy would warn
    code = 0
    try:
        runpy.run_module(f"outliers.{command}", run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


def refused(monkeypatch, capsys, *arguments, command="sweep") -> str:
    """The line that answers a mistake, which is all that is printed."""
    code, out, err = call(monkeypatch, capsys, *arguments, command=command)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.removeprefix("error: ")
