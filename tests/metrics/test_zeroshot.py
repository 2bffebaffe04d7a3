"""Zero-shot accuracy against likelihoods computed without the harness; the local tasks against the harness's own."""

import copy
import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

import numpy
import pytest
import torch
import yaml

from outliers import UserError, load_model, load_tokenizer, quantize, run
from outliers.commands.zeroshot import ZeroShot
from outliers.metrics import zeroshot as module
from outliers.metrics.records import ZeroShotMetric as Metric
from outliers.metrics.zeroshot import FOLDER, STANDARD_ERRORS, _task, documents_hash, load_tasks, zeroshot
from outliers.views.zeroshot import mean_chance
from tests.conftest import C4, needs_harness

LOCAL = ["lambada-local", "piqa-local"]
SENTENCES = [
    "The river runs past the old mill and under the stone",
    "She closed the door, looked at the letter again and put it in her\n\n",
    "In the morning the children walked to school, and in the evening they walked",
    "Most of the people in the village had never seen the",
    "He said that he would not go to the",
    "If you want to learn more about this, you can read the",
]
QUESTIONS = [
    ("How do I keep bread fresh?", "Put it in a paper bag.", "Put it in a bucket of water and leave it in the sun."),
    ("open a jar", "Turn the lid.", "Turn the jar over and hit the floor with it until the lid, or the floor, breaks."),
    ("dry shoes", "Fill them with newspaper, and wait.", "Fill them with soup."),
    ("clean a window", "Wipe it with a wet cloth – then with a dry one.", "Wipe it with butter."),
    ("boil an egg", "Heat it in water for eight minutes.", "Heat it."),
    ("sharpen a pencil", "Use a spoon.", "Use a knife, and cut away from your hand."),
]


@pytest.fixture(scope="module")
def small():
    """A trained model with its tokenizer."""
    return load_model("pocket/gpt2-1.7m"), load_tokenizer("pocket/gpt2-1.7m")


@pytest.fixture(scope="module")
def data(tmp_path_factory, small) -> Path:
    """Made-up files; every other last word is the one that the model expects, so that some are right."""
    folder = tmp_path_factory.mktemp("data")
    words = [expected_word(*small, context) if number % 2 else " umbrellas" for number, context in enumerate(SENTENCES)]
    write_data(folder, list(map(str.__add__, SENTENCES, words)), QUESTIONS, [0, 1, 0, 0, 1, 1])
    return folder


def write_data(folder: Path, texts: list[str], questions: list[tuple], labels: list[int]) -> None:
    rows = [dict(zip(("goal", "sol1", "sol2"), question, strict=True)) for question in questions]
    (folder / "lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "piqa_valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "piqa_valid_labels.lst").write_text("".join(f"{label}\n" for label in labels))


@torch.no_grad()
def expected_word(model, tokenizer, context: str) -> str:
    """The likeliest next token that is a word of its own."""
    logits = model(torch.tensor([tokenizer(context).input_ids])).logits[0, -1]
    return next(
        word
        for token in logits.argsort(descending=True)
        if (word := tokenizer.decode(token)).startswith(" ") and word[1:].isalpha()
    )


@torch.no_grad()
def likelihood(model, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether each of its tokens is the likeliest; spaces belong to it."""
    stripped = context.rstrip()
    whole, length = tokenizer(context + continuation).input_ids, len(tokenizer(stripped).input_ids)
    predicted = len(whole) - length
    window = torch.tensor(whole[-(model.config.n_positions + 1) :])
    logits = model(window[None, :-1], use_cache=False).logits[0, -predicted:].float().log_softmax(-1)
    targets = window[-predicted:]
    return logits.gather(1, targets[:, None]).sum().item(), bool((logits.argmax(-1) == targets).all())


def direct(model, tokenizer, folder: Path, limit: int | None = None) -> dict[tuple[str, str], float]:
    """Accuracies and perplexity of both tasks from the files, without the harness."""
    rows = [json.loads(line) for line in (folder / "lambada_test.jsonl").open()][:limit]
    splits = [row["text"].rpartition(" ") for row in rows]
    words = [likelihood(model, tokenizer, context, " " + word) for context, _, word in splits]
    labels = [int(line) for line in (folder / "piqa_valid_labels.lst").open()]
    right, right_normalized = [], []
    for line, label in list(zip((folder / "piqa_valid.jsonl").open(), labels, strict=True))[:limit]:
        row = json.loads(line)
        solutions = [row["sol1"], row["sol2"]]
        prompt = f"Question: {row['goal']}\nAnswer:"
        found = [likelihood(model, tokenizer, prompt, f" {solution}")[0] for solution in solutions]
        right.append(numpy.argmax(found) == label)
        right_normalized.append(numpy.argmax(numpy.divide(found, [len(solution) for solution in solutions])) == label)
    return {
        ("lambada-local", "acc"): statistics.fmean(greedy for _, greedy in words),
        ("lambada-local", "perplexity"): math.exp(-statistics.fmean(value for value, _ in words)),
        ("piqa-local", "acc"): statistics.fmean(map(float, right)),
        ("piqa-local", "acc_norm"): statistics.fmean(map(float, right_normalized)),
    }


def by_metric(results: list[dict]) -> dict[tuple[str, str], float]:
    return {(result["task"], result["metric"]): result["value"] for result in results}


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for (task, metric), value in expected.items():
        tolerance = 1e-4 if metric == "perplexity" else 1e-12
        assert found[task, metric] == pytest.approx(value, rel=tolerance), (task, metric)


@needs_harness
@pytest.mark.parametrize(
    ("dtype", "scheme"), [(torch.float32, "fp32"), (torch.float32, "llm.int8"), (torch.bfloat16, "fp32")]
)
def test_equals_likelihoods_computed_directly(small, data, dtype, scheme):
    model, tokenizer = small
    model = quantize(copy.deepcopy(model).to(dtype), scheme)
    expected = direct(model, tokenizer, data)
    assert 0 < expected["lambada-local", "acc"] < 1
    assert expected["piqa-local", "acc"] != expected["piqa-local", "acc_norm"]
    assert_same(by_metric(zeroshot(model, tokenizer, LOCAL, data)), expected)


@needs_harness
def test_leaves_model_and_tokenizer_as_they_are(small, data):
    model, tokenizer = small
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = zeroshot(model, tokenizer, LOCAL, data)
    training = copy.deepcopy(model).train()
    training.lm_head.eval()
    modes = [module.training for module in training.modules()]
    for same in (model, training):
        assert zeroshot(same, tokenizer, LOCAL, data) == first
    assert [module.training for module in training.modules()] == modes
    assert tokenizer.pad_token is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@needs_harness
def test_is_quiet_and_takes_so_many_examples(small, data, capfd):
    results = zeroshot(*small, ["piqa-local"], data, limit=4)
    assert capfd.readouterr() == ("", "")
    found = [(result["metric"], result["examples"], result["task_version"]) for result in results]
    assert found == [("acc", 4, 1.0), ("acc_norm", 4, 1.0)]
    share = results[0]["value"]
    assert results[0]["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 3))
    assert zeroshot(*small, ["piqa-local"], data, limit=1)[0]["standard_error"] is None


def test_standard_error_of_perplexity_against_resampling():
    generator = numpy.random.default_rng(0)
    values = generator.normal(-3, 1, 400)
    samples = numpy.exp(-generator.choice(values, (4000, 400)).mean(1))
    assert STANDARD_ERRORS["perplexity"](values.tolist()) == pytest.approx(samples.std(), rel=0.05)


class Loader(yaml.SafeLoader):
    """Reads functions as their names."""


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


@needs_harness
@pytest.mark.parametrize(("ours", "theirs"), [("lambada-local", "lambada/lambada_openai"), ("piqa-local", "piqa/piqa")])
def test_local_tasks_are_those_of_the_harness(ours, theirs):
    """In all but their name, where the data are from, and the search for texts seen in training, which is not used."""
    package = Path(importlib.util.find_spec("lm_eval").origin).parent
    mine, harness = (
        yaml.load(path.read_text(), Loader) for path in (FOLDER / f"{ours}.yaml", package / "tasks" / f"{theirs}.yaml")
    )
    differ = {field for field in mine | harness if mine.get(field) != harness.get(field)}
    source = {"custom_dataset", "dataset_path", "dataset_name", "training_split"}
    assert differ - source <= {"task", "tag", "should_decontaminate", "doc_to_decontamination_query"}
    assert differ >= {"task", "custom_dataset"}


LAMBADA, PIQA = ("lambada-local", "lambada_test.jsonl"), ("piqa-local", "piqa_valid.jsonl")


@needs_harness
@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        (*LAMBADA, None, "lambada_test.jsonl' does not exist"),
        (*PIQA, None, "piqa_valid.jsonl' does not exist"),
        ("piqa-local", "piqa_valid_labels.lst", b"0\n1\n", "has to hold a line 0 or 1 for each of the 6 rows"),
        (*PIQA, b'{"goal": "x", "sol1": "y"}\n', "row 1 of .* with strings goal, sol1, sol2: 'sol2' is missing"),
        ("piqa-local", "piqa_valid_labels.lst", b"0\n\xff\n", "line 2 of .*labels.lst' .*byte 1 is not UTF-8"),
    ],
)
def test_spoilt_data(tmp_path, task, name, content, message):
    write_data(tmp_path, ["a b"], QUESTIONS, [0] * 6)
    load_tasks([task], tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tasks([task], tmp_path)


@needs_harness
def test_the_examples_that_come_along_are_the_first_of_the_tasks():
    for task in load_tasks(LOCAL):
        assert len(list(task.eval_docs)) == 200
        if C4.exists():
            assert documents_hash(task) == documents_hash(load_tasks([task.task_name], C4.parent)[0], 200)


@needs_harness
def test_tasks_of_the_harness(monkeypatch):
    """An unknown one, and one whose data cannot be reached: at once, and in one line.

    Of the harness's tasks one folder alone, as all take seconds to read.
    """
    from huggingface_hub import HfApi
    from lm_eval.tasks import TaskManager

    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / "hellaswag"
    manager = TaskManager(include_path=folder, include_defaults=False)
    monkeypatch.setattr(module, "_tasks_of_the_harness", lambda: manager)

    def unreachable(*_arguments, timeout, **_keywords):
        assert timeout <= 5
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    for name, near in (("hellaswagg", "hellaswag"), ("piqa-locale", "piqa-local")):
        with pytest.raises(UserError, match=rf"unknown task '{name}'; did you mean {near}[? ]"):
            load_tasks([name])
    unreachable_data = r"cannot load the data of task 'hellaswag', 'Rowan/hellaswag' on the hub \(ConnectionError\)"
    with pytest.raises(UserError, match=unreachable_data):
        load_tasks(["hellaswag"])


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(UserError, match=r"zero-shot tasks need 'lm_eval.*'; pip install 'outliers\[zeroshot\]'"):
        load_tasks(LOCAL)


@needs_harness
def test_nan_is_no_accuracy(small, data):
    model = copy.deepcopy(small[0])
    model.transformer.ln_f.bias.data[0] = torch.nan
    with pytest.raises(UserError, match="NaN or inf in the log-likelihoods of task 'piqa-local', example 0"):
        zeroshot(model, small[1], ["piqa-local"], data)


@needs_harness
def test_solution_longer_than_the_context(small, tmp_path):
    write_data(tmp_path, ["a b"], [("count", "one, two, three " * 100, "no")], [0])
    with pytest.raises(UserError, match="empty or longer than the model's context of 256 tokens"):
        zeroshot(*small, ["piqa-local"], tmp_path)


@needs_harness
def test_rows_of_tasks(data, tmp_path):
    given = {"schemes": ["llm.int8", "fp32"], "tasks": LOCAL, "limit": 4, "alpha": 4, "dtype": "bfloat16"}
    rows = run(ZeroShot(models=["pocket/gpt2-0.1m"], data=str(data), **given), tmp_path)
    assert len(rows) == 2 * len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2 * 2 * 2
    row = next(row for row in rows if row["scheme"] == "llm.int8" and row["metric"] == "zeroshot.acc_norm")
    expected = {"task": "piqa-local", "limit": 4, "examples": 4, "unit": "1", "alpha": 4, "dtype": "bfloat16"}
    assert row.items() >= expected.items()
    assert {"standard_error", "weights_hash", "parameters", "lm_eval", "kernels", "wall_seconds"} <= row.keys()
    assert all("alpha" not in row for row in rows if row["scheme"] == "fp32")
    unknown = row | {"metric": "zeroshot.acc", "task": "other"}
    assert (mean_chance(rows), mean_chance([*rows, unknown])) == (0.25, None)


@needs_harness
def test_documents_that_changed_are_measured(tmp_path):
    metric, hashes = Metric(task="lambada-local", data=str(tmp_path)), []
    for words in (["some words"] * 6, ["other words"] * 6, ["some words"] * 6):
        write_data(tmp_path, words, QUESTIONS, [0] * 6)
        task = _task(metric)
        assert _task(metric) is task, "it is loaded once"
        assert documents_hash(task) == documents_hash(task, 6) != documents_hash(task, 5)
        hashes.append(documents_hash(task))
    assert hashes[0] == hashes[2] != hashes[1]
