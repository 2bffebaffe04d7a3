"""The short tasks of docs/tasks.md: the lines that the page shows are run, on a pocket model and on SmolLM2."""

import ast
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


def tokens(found: pd.DataFrame, names: dict) -> None:
    assert not found.empty


def errors(found: pd.DataFrame, names: dict) -> None:
    layers = names["model"].config.num_hidden_layers
    assert sorted(found["layer"].unique()) == list(range(layers))
    assert (found["error"] > 0).all()


def near_exact(found: float, names: dict) -> None:
    assert 0 < abs(found / outliers.perplexity(names["model"], names["blocks"]) - 1) < 0.5


def watch(_found: None, names: dict) -> None:
    """It looks at every hundredth step alone, and what trains is the same with it, dropout too."""
    looked = []
    text = outliers.load_text("sample", outliers.load_tokenizer(SMALL), block=16, blocks=100)
    names |= {"blocks": text[:2], "print": lambda *said: looked.append(said)}
    weights = [trained(text, callbacks) for callbacks in ([], [names["Watch"]()])]
    ((table,),) = looked
    assert isinstance(table, pd.DataFrame)
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def trained(text: torch.Tensor, callbacks: list) -> list[torch.Tensor]:
    """The weights of a small model after 101 steps with dropout."""
    model = outliers.load_model(SMALL).requires_grad_()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    settings = {"max_steps": 101, "per_device_train_batch_size": 1, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments("training", use_cpu=True, disable_tqdm=True, **settings)
    rows = [{"input_ids": block, "labels": block} for block in text]
    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    return [parameter.detach() for parameter in model.parameters()]


def compared(found: pd.DataFrame, names: dict) -> None:
    outlying = names["trace"].outlier_features()["feature"]
    assert set(outlying) <= set(found["feature"])


def matrix(found: torch.Tensor, names: dict) -> None:
    tracked = outliers.trace(names["model"], names["blocks"], roles=["ffn_out"], attention=False)
    layer = int(re.search(r"layer=(\d+)", names["lines"])[1])
    torch.testing.assert_close(found.double().sum(0), tracked.statistics["ffn_out.sum"][layer], rtol=1e-6, atol=1e-6)
    assert found.shape == (names["blocks"].numel(), tracked.statistics["ffn_out.sum"].shape[1])


def less_than_all(found: float, names: dict) -> None:
    model, blocks = names["model"], names["blocks"]
    assert found != outliers.perplexity(outliers.quantize(model, "absmax"), blocks)
    assert found != outliers.perplexity(model, blocks)


def of_strings(found: float, names: dict) -> None:
    assert len(names["sequences"]) == 2
    assert len({len(ids) for ids in names["sequences"]}) == 2
    batches = [ids[None] for ids in names["sequences"]]
    losses = [names["model"](ids, labels=ids).loss.double().item() * (ids.shape[1] - 1) for ids in batches]
    mean = sum(losses) / sum(ids.shape[1] - 1 for ids in batches)
    assert found == pytest.approx(torch.tensor(mean).exp().item(), rel=1e-4)


def data_frame(found: pd.DataFrame, names: dict) -> None:
    blocks = outliers.load_text("sample", names["tokenizer"], block=64, blocks=2)
    exact = found.set_index("scheme").loc["fp32", "value"]
    assert exact == pytest.approx(outliers.perplexity(names["model"], blocks), rel=1e-9)
    assert list(found["scheme"]) == ["fp32", "absmax"]


def own_axes(_found: object, names: dict) -> None:
    assert names["right"].has_data()
    assert not names["left"].has_data()


def unpadded(found: float, names: dict) -> None:
    assert (names["batch"]["attention_mask"] == 0).any()
    of_strings(found, names | {"sequences": outliers.load_text(names["texts"], names["tokenizer"], block=None)})


# Task to what must be true of the value of its last line and of the names that are there then.
TASKS: dict[str, Callable] = {
    "tokens of a feature": tokens,
    "error by projection": errors,
    "a scheme of your own": near_exact,
    "a callback for a `Trainer`": watch,
    "two models compared": compared,
    "hidden-state matrix": matrix,
    "modules skipped": less_than_all,
    "your own strings": of_strings,
    "a data frame of results": data_frame,
    "your own axes": own_axes,
    "masked batches": unpadded,
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
    names = names | {"lines": fitting(LINES[task])}
    *before, last = ast.parse(names["lines"]).body
    exec(compile(ast.Module(before, []), "page", "exec"), names)
    if isinstance(last, ast.Expr):
        found = eval(compile(ast.Expression(last.value), "page", "eval"), names)
    else:
        found = exec(compile(ast.Module([last], []), "page", "exec"), names)
    TASKS[task](found, names)
