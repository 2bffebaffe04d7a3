"""The short tasks of docs/tasks.md: the lines that the page shows are run, on a pocket model and on SmolLM2."""

import ast
import math
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import Trainer, TrainingArguments

import outliers
from tests.conftest import needs_smollm2

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Short tasks")[2].partition("\n## ")[0]
SETUP = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL)[1]
CELLS = re.findall(r"^\| (.+?) \| (`.+`) \|$", SECTION, re.MULTILINE)
LINES = {task: "\n".join(re.findall(r"`([^`]+)`", cell)) for task, cell in CELLS}
SMALL = "pocket/gpt2-0.1m"
# What fits SmolLM2 alone, and what fits the pocket model.
POCKET = {"smollm2-135m": "pocket/gpt2-1.7m", "247": "17", "layer=11": "layer=2", "*.down_proj": "*.mlp.c_proj"}


def a_table(found: pd.DataFrame, names: dict) -> None:
    assert not found.empty


def a_perplexity(found: float, names: dict) -> None:
    assert 1 < found < math.inf


def looks_at_every_hundredth_step_alone(_found: None, names: dict) -> None:
    looked = []
    names["print"] = lambda *said: looked.append(said)
    model = outliers.load_model(SMALL).requires_grad_()
    text = outliers.load_text("sample", outliers.load_tokenizer(SMALL), block=16, blocks=100)
    names["blocks"] = text[:2]
    settings = {"max_steps": 101, "per_device_train_batch_size": 1, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments("training", use_cpu=True, disable_tqdm=True, **settings)
    rows = [{"input_ids": block, "labels": block} for block in text]
    Trainer(model, arguments, train_dataset=rows, callbacks=[names["Watch"]()]).train()
    ((table,),) = looked
    assert isinstance(table, pd.DataFrame)


def a_row_of_each_token(found: torch.Tensor, names: dict) -> None:
    assert found.shape == (names["blocks"].numel(), names["trace"].statistics["ffn_out.sum"].shape[1])


def drawn_on_the_right_alone(_found: object, names: dict) -> None:
    assert names["right"].has_data()
    assert not names["left"].has_data()


# Task to what must be true of the value of its last line and of the names that are there then.
TASKS: dict[str, Callable] = {
    "tokens of a feature": a_table,
    "error by projection": a_table,
    "a scheme of your own": a_perplexity,
    "a callback for a `Trainer`": looks_at_every_hundredth_step_alone,
    "two models compared": a_table,
    "hidden-state matrix": a_row_of_each_token,
    "modules skipped": a_perplexity,
    "your own strings": a_perplexity,
    "a data frame of results": a_table,
    "your own axes": drawn_on_the_right_alone,
    "masked batches": a_perplexity,
}


ON_SMOLLM2 = pytest.param("smollm2", marks=[needs_smollm2, pytest.mark.nightly("docs/tasks.md")])


@pytest.fixture(scope="module", params=["pocket", ON_SMOLLM2])
def known(request) -> tuple[dict, Callable[[str], str]]:
    """The names that the page has at hand, and what makes its lines fit the model."""

    def fitting(lines: str) -> str:
        for one, other in POCKET.items() if request.param == "pocket" else ():
            lines = lines.replace(one, other)
        return lines

    names: dict = {"__name__": "page"}
    exec(fitting(SETUP), names)
    return names, fitting


def test_the_page_has_the_tasks():
    assert list(LINES) == list(TASKS)
    assert max(lines.count("\n") for lines in LINES.values()) <= 3


@pytest.mark.parametrize("task", TASKS)
def test_a_task_in_its_lines(known, task, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    names, fitting = known
    names = dict(names)
    *before, last = ast.parse(fitting(LINES[task])).body
    exec(compile(ast.Module(before, []), "page", "exec"), names)
    if isinstance(last, ast.Expr):
        found = eval(compile(ast.Expression(last.value), "page", "eval"), names)
    else:
        found = exec(compile(ast.Module([last], []), "page", "exec"), names)
    TASKS[task](found, names)
