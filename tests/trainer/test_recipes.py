"""Training runs: recipes, what they change of GPT-2, what updates weights, and stopping at any moment."""

import copy
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outliers.commands.training import Training
from outliers.config.recipe import Recipe
from outliers.errors import BrokenModel, UserError
from outliers.models.pocket.ladder import CONTEXT, LADDER, VOCABULARY
from outliers.trainer import loop
from outliers.trainer.architectures import CLIPPED_BELOW, NORMALIZED, ChangedAttention, rotated
from outliers.trainer.optimizers import OPTIMIZERS, optimizer_of
from outliers.trainer.start import initial_model

TINY = {"start": "gpt2-0.1m", "batch": 2}


@pytest.fixture(autouse=True)
def _not_compiled():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def saved_often(constants):
    """Log each second step and save each fourth."""
    constants("outliers.trainer.loop", SAVED_EVERY=4, LOGGED_EVERY=2)


def blocks_for(recipe: Recipe) -> np.ndarray:
    """Random ids as a training takes them."""
    shape = recipe.steps * recipe.batch, 32
    return np.random.default_rng(0).integers(0, VOCABULARY, shape).astype(np.uint16)


def logged(entries: list[dict]) -> list[tuple]:
    """What of a log is the same whenever it is made."""
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in entries if "loss" in entry]


# What is trained.


def test_a_recipe_has_the_rate_and_the_batch_of_its_rung():
    assert (Recipe().learning_rate, Recipe().batch) == LADDER["gpt2-1.7m"][4:6]
    own = Recipe(start="gpt2-0.5m", learning_rate=1.0)
    assert (own.learning_rate, own.batch) == (1.0, 16)
    assert Recipe(start="smollm2-135m").batch == 8
    assert initial_model(Recipe(**TINY), 0).config.n_positions == CONTEXT
    spec = Training(recipe={"start": "gpt2-0.5m", "steps": 7}, runs={"as it is": None, "fast": {"steps": 3}})
    assert [(run.start, run.steps) for run in spec.runs.values()] == [("gpt2-0.5m", 7), ("gpt2-0.5m", 3)]


# Changes of GPT-2.


def test_softmax_plus_one_is_a_softmax_with_a_score_of_zero_beside():
    scores = torch.randn(3, 4, 5, dtype=torch.float64).float() * 10
    beside = functional.softmax(torch.cat([scores, torch.zeros(3, 4, 1)], -1).double(), -1)[..., :-1]
    found = NORMALIZED["softmax-plus-one"]
    torch.testing.assert_close(found(scores).double(), beside, rtol=1e-5, atol=1e-7)
    assert (found(torch.full((1, 1, 2), -1e4)) == 0).all(), "a head may attend to nothing"


def test_clipped_softmax_stretches_and_clips():
    scores = torch.randn(2, 100).mul(3)
    exact, below = functional.softmax(scores.double(), -1), CLIPPED_BELOW / 100
    expected = (exact * (1 - below) + below).clip(0, 1)
    found = NORMALIZED["clipped-softmax"](scores)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert (found == 0).any()


def test_positions_rotate_as_in_transformers():
    states = torch.randn(2, 3, 7, 8)
    halves = torch.cat([states[..., ::2], states[..., 1::2]], -1)  # transformers pairs the halves
    angles = torch.outer(torch.arange(7.0), 10_000 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)[None]
    theirs, _ = apply_rotary_pos_emb(halves, halves, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated(states), torch.stack(theirs.chunk(2, -1), -1).flatten(-2))


def test_the_changed_attention_without_a_change_is_that_of_transformers():
    ids = torch.randint(0, VOCABULARY, (2, 20))
    model = initial_model(Recipe(**TINY), 0).eval()
    own = model(ids).logits
    for block in model.transformer.h:
        block.attn.__class__ = ChangedAttention
        block.attn.normalize, block.attn.rotary, block.attn.gate = NORMALIZED["softmax"], False, None
    torch.testing.assert_close(model(ids).logits, own)


@pytest.mark.parametrize(
    "change",
    [
        *({"attention": name} for name in list(NORMALIZED)[1:]),
        *({"gated": True}, {"positions": "rotary"}, {"norm": "rmsnorm"}),
        {"attention": "clipped-softmax", "gated": True, "positions": "rotary", "norm": "rmsnorm"},
    ],
    ids=str,
)
def test_a_changed_model_is_another_one_that_sees_no_future(change):
    ids = torch.randint(0, VOCABULARY, (1, 20))
    plain, changed = (initial_model(Recipe(**TINY, **fields), 0).eval() for fields in ({}, change))
    later = ids.clone()
    later[0, 10:] = 7
    assert not torch.allclose(changed(ids).logits, plain(ids).logits)
    torch.testing.assert_close(changed(ids).logits[:, :10], changed(later).logits[:, :10])
    changed(ids, labels=ids).loss.backward()
    still = {name for name, p in changed.named_parameters() if p.grad is None}
    assert still == ({"transformer.wpe.weight"} if change.get("positions") == "rotary" else set())


def test_gates_close_heads():
    ids = torch.randint(0, VOCABULARY, (1, 20))
    model = initial_model(Recipe(**TINY, gated=True), 0).eval()
    outputs = []
    for block in model.transformer.h:
        block.attn.c_proj.register_forward_pre_hook(lambda _module, inputs: outputs.append(inputs[0]))
        block.attn.gate.bias.data[1] = -torch.inf
    model(ids)
    for states in outputs:
        first, second = states.unflatten(-1, (2, -1)).unbind(-2)
        assert first.any() and not second.any()


def test_other_architectures_are_not_changed():
    with pytest.raises(UserError, match="expected a gpt2"):
        initial_model(Recipe(start="opt-1.7m", attention="clipped-softmax"), 0)


# What updates the weights.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_all_and_goes_on(name):
    def stepped(model, optimizer, steps):
        torch.manual_seed(1)
        for _ in range(steps):
            ids = torch.randint(0, VOCABULARY, (2, 16))
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    recipe = Recipe(**TINY)
    model, before = initial_model(recipe, 0), initial_model(recipe, 0).state_dict()
    optimizer = optimizer_of(name, model, 1e-3, 0.1)
    stepped(model, optimizer, 2)
    assert not [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    again = initial_model(recipe, 0)
    again.load_state_dict(model.state_dict())
    other = optimizer_of(name, again, 1.0, 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(model, optimizer, 2), stepped(again, other, 2)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_matrices_and_embeddings_alone_decay():
    model = initial_model(Recipe(**TINY), 0)
    groups = optimizer_of("muon", model, 1e-3, 0.25).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        name: 0.25 if p.ndim == 2 else 0.0 for name, p in model.named_parameters()
    }
    assert {len(p.shape) for p in groups[0]["params"]} == {2}
    assert id(model.transformer.wte.weight) not in map(id, groups[0]["params"]), "Muon has no embeddings"


# Stopping and going on.

KILLED = """
import sys
from pathlib import Path
import torch
from outliers.config.recipe import Recipe
from outliers.trainer import loop
from outliers.trainer.start import initial_model
from tests.trainer.test_recipes import blocks_for
loop.SAVED_EVERY, loop.LOGGED_EVERY = 4, 2
recipe = Recipe(start="gpt2-0.1m", batch=2, steps=40, int8=["ffn", "linear"], stochastic=True, optimizer="muon")
with torch.compiler.set_stance("force_eager"):
    loop.train(initial_model(recipe, 0), recipe, blocks_for(recipe), Path(sys.argv[1]))
"""


@pytest.mark.nightly("outliers/trainer/")
def test_a_killed_training_goes_on_with_the_same_losses(tmp_path, saved_often):
    folder, run = tmp_path / "killed", [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for steps in (4, 12):  # each from where the last one was killed
        with subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL) as process:
            while not (folder / f"checkpoint-{steps}").exists():
                assert process.poll() is None
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)  # most likely while it writes
    recipe = Recipe(**TINY, steps=40, int8=["ffn", "linear"], stochastic=True, optimizer="muon")
    moves: list[int] = []
    model, whole = (initial_model(recipe, 0) for _ in range(2))
    goes_on = loop.train(model, recipe, blocks_for(recipe), folder, progress=moves.append)
    at_once = loop.train(whole, recipe, blocks_for(recipe), tmp_path / "whole")
    assert moves[0] >= 4 and sum(moves) == 40
    assert logged(goes_on) == logged(at_once) and len(logged(goes_on)) == 20
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_is_seen_is_logged_once(tmp_path, saved_often):
    recipe = Recipe(**TINY, steps=8, int8=["ffn", "linear"])

    def seen(_model, step):
        if step == 6 and not (tmp_path / "again").exists():
            (tmp_path / "again").touch()
            raise KeyboardInterrupt
        return {"seen": step}

    def train():
        return loop.train(
            initial_model(recipe, 0), recipe, blocks_for(recipe), tmp_path / "run", seen, steps=(2, 4, 6, 8)
        )

    with pytest.raises(KeyboardInterrupt):
        train()
    log = train()
    assert [entry["seen"] for entry in log if "seen" in entry] == [2, 4, 6, 8]
    assert [entry["step"] for entry in log if "loss" in entry] == [2, 4, 6, 8], "beside its losses"


def test_a_checkpoint_that_is_not_whole_is_no_checkpoint(tmp_path):
    for step, content in ((4, "{}"), (8, '{"log_hist'), (12, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if content:
            (tmp_path / f"checkpoint-{step}" / loop.STATE).write_text(content)
    assert loop.last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


# Numbers that are none.


BREAKS = {
    r"the loss is nan, first in the output of 'transformer\.h\.1\.mlp\.c_fc'": lambda layers: (
        layers[1].mlp.c_fc.weight.data[3, 5].fill_(torch.inf)
    ),
    r"NaN or inf in the gradients, first in 'transformer\.h\.0\.attn\.c_proj\.weight'": lambda layers: layers[
        0
    ].attn.c_proj.weight.register_hook(lambda gradient: gradient * torch.nan),
}


@pytest.mark.parametrize("said", BREAKS)
def test_a_number_that_is_none_is_named_and_stops(said, tmp_path, monkeypatch, saved_often):
    moves, own = itertools.count(), loop._MeasuringCallback.on_step_end

    def breaking(self, *given, model, **others):
        own(self, *given, model=model, **others)
        if next(moves) == 5:
            BREAKS[said](model.transformer.h)

    monkeypatch.setattr(loop._MeasuringCallback, "on_step_end", breaking)
    recipe = Recipe(**TINY, steps=20)
    with pytest.raises(BrokenModel, match=f"step 7: {said}.*; the last good checkpoint is '.*checkpoint-4'"):
        loop.train(initial_model(recipe, 0), recipe, blocks_for(recipe), tmp_path)
    assert Path(loop.last_checkpoint(tmp_path)).name == "checkpoint-4"
