"""Perplexity against transformers' own loss, and on a trained model."""

import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from outliers import UserError, ablate, load_text, perplexities, perplexity, quantize, trace, variant
from outliers.metrics.latency import latency
from outliers.metrics.layers import layer_by_layer
from outliers.metrics.places import place_choices, place_losses
from outliers.metrics.records import Agreement, Perplexity
from outliers.metrics.states import MEASUREMENT as STATES
from outliers.models.anatomy import decoder_layers
from outliers.models.anatomy.trust import check_found
from outliers.models.decoder import map_blocks
from outliers.models.hooks import independent
from outliers.models.load import load_model, load_tokenizer
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.quantization.convert import quantized_layers
from outliers.subjects.cell import Cell
from outliers.subjects.given import Given
from outliers.variants import draw
from tests.conftest import C4, FIVE, STORIES, needs_shared
from tests.small_models import make_model, padded, records_of, top1_softmax

METRICS = (Perplexity(), Agreement())


def own_loss(model, blocks) -> float:
    """Perplexity from the loss that transformers computes over all blocks at once."""
    with torch.no_grad():
        return math.exp(model(blocks, labels=blocks).loss.double())


@pytest.mark.parametrize("head_outputs", [7, 4096])
@pytest.mark.parametrize("case", [*FIVE, "gemma2", "granite"])
def test_equals_the_models_own_loss(case, blocks, constants, head_outputs):
    model = make_model(case)
    """Whatever lies between its last layer and its logits, and however the head is cut."""
    constants("outliers.models.head", HEAD_OUTPUTS=head_outputs)
    assert perplexity(model, blocks) == pytest.approx(own_loss(model, blocks), rel=1e-5)


@pytest.mark.parametrize("case", FIVE)
def test_a_variant_of_a_later_layer_is_the_same_from_its_kept_input(case, blocks):
    """The layers before it compute for the first such variant alone."""
    model, written = make_model(case), ("absmax+only=layers.1", "llm.int8+only=layers.1", "zeropoint+only=layers.1")
    given, variants = Given(model, blocks), list(map(variant, written))
    calls = []
    handle = decoder_layers(model)[0].register_forward_hook(independent(lambda *_: calls.append(0)))
    rows = records_of(Cell(given, one, metric) for one in variants for metric in (Perplexity(), Agreement()))
    handle.remove()
    assert len(calls) == 2 * len(blocks)  # of the unquantized model, and of the first variant
    assert [row["value"] for row in rows if row["metric"] == "perplexity"] == perplexities(model, blocks, variants)


def test_what_is_asked_of_a_variant_later_takes_no_second_pass(blocks, constants):
    """Of the draws that were measured before, whichever metric they were measured for, as long as there is room."""
    model = make_model("gpt2")
    metrics, passes = (Perplexity(), Perplexity(draws=2), Agreement(draws=2)), []

    def values() -> list[float]:
        passes.clear()
        handle = model.get_input_embeddings().register_forward_hook(independent(lambda *_: passes.append(0)))
        given = Given(model, blocks)
        rows = records_of(Cell(given, variant(one), metric) for one in ("absmax", "zero(3)") for metric in metrics)
        handle.remove()
        return [row["value"] for row in rows]

    kept = values()
    assert len(passes) == 3 * 2 * len(blocks)  # of two variants and of the unquantized model two draws each
    constants("outliers.metrics.states", MOST_KEPT=0)
    assert values() == kept
    assert len(passes) == 2 * 5 * len(blocks)


def test_variants_of_many_layers_start_from_the_nearest_one_before(blocks):
    model = load_model("pocket/opt-1.7m")
    variants = [variant(f"absmax+only=layers.{layer}") for layer in (3, 1, 5, 4, 3)]
    rows = records_of(Cell(Given(model, blocks), one, Perplexity()) for one in variants)
    assert [row["value"] for row in rows] == perplexities(model, blocks, variants)


def test_in_16_bits(blocks):
    model = make_model("gptj").bfloat16()
    assert perplexity(model, blocks) == pytest.approx(own_loss(model.float(), blocks), rel=0.05)


def test_a_padded_batch_equals_the_models_own_loss(case, blocks):
    """Of which labels of -100 are not counted, with padding on the right and a mask; and that of its sequences."""
    model, (sequences, ids, mask) = make_model(case), padded(blocks, "right")
    with torch.no_grad():
        loss = model(ids, attention_mask=mask, labels=ids.where(mask.bool(), -100)).loss
    found = perplexity(model, ids, mask)
    assert found == pytest.approx(math.exp(loss.double()), rel=1e-5)
    assert [found, perplexity(model, sequences)] == 2 * perplexities(model, ids, [AS_IT_IS], mask)


def test_extreme_logits(blocks):
    model = make_model("gpt2")
    with torch.no_grad():
        model.lm_head.weight.mul_(300)
    assert perplexity(model, blocks[:1, :4]) == pytest.approx(own_loss(model, blocks[:1, :4]), rel=1e-4)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("weight", "place"),
    [
        ("h.0.mlp.c_fc.weight", "first in the hidden states of layer 0, role ffn_out, feature 5"),
        ("h.1.mlp.c_proj.weight", "first in the hidden states of layer 1, role residual, feature 5"),
        ("ln_f.bias", "in the logits"),
    ],
)
def test_overflow_is_located(blocks, tmp_path, weight, place, dtype, streamed):
    """Of finite weights, in the last layer too."""
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.get_parameter(weight)[..., 5:] = 3e38
    model.save_pretrained(tmp_path)
    broken = (stream_model if streamed else load_model)(str(tmp_path), dtype)
    for name in ("fp32", "absmax"):
        with pytest.raises(UserError, match=f"NaN or inf {place}; expected finite"):
            perplexities(broken, blocks, [variant(name)])


# What looks at a model, each with a result that can be compared.
LOOKS = {
    "perplexity": perplexity,
    "top1_softmax": top1_softmax,
    "trace": lambda model, blocks: trace(model, blocks).statistics["ffn_in.sum"].flatten().tolist(),
    "ablate": lambda model, blocks: ablate(model, blocks[:1], [3])["perplexity"].tolist(),
    "latency": lambda model, blocks: latency(model, blocks, 3, 1).ids.tolist(),
}


def partly_in_training(model):
    """The model with some modules in training mode and others not, and their modes."""
    model.train().transformer.h[0].mlp.eval()
    model.lm_head.eval()
    return model, modes_of(model)


def modes_of(model) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_in_training_mode_is_looked_at_in_eval_mode(look, blocks):
    """Without dropout, and each module has its own mode afterwards."""
    look = LOOKS[look]
    expected = look(make_model("gpt2"), blocks)
    model, modes = partly_in_training(make_model("gpt2"))
    assert look(model, blocks) == expected
    assert modes_of(model) == modes
    for keep in ("exact", "int8"):
        assert look(quantize(model, "absmax", keep), blocks) == look(
            quantize(make_model("gpt2"), "absmax", keep), blocks
        )


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_modes_are_restored_on_every_exit(error, blocks):
    model, modes = partly_in_training(make_model("gpt2"))

    def stop(*_):
        raise error("stop")

    model.transformer.h[1].register_forward_hook(stop)
    with pytest.raises(error) as kept:
        perplexity(model, blocks)
    assert modes_of(model) == modes
    del kept  # until here with all that its traceback holds


def test_modes_are_restored_after_the_last_of_several_threads(blocks):
    expected = perplexity(make_model("gpt2"), blocks)
    model, modes = partly_in_training(make_model("gpt2"))
    one_is_through = threading.Event()

    def slowly():
        yield blocks[0]
        one_is_through.wait(60)
        yield from blocks[1:]

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(perplexity, model, slowly())
        assert perplexity(model, blocks) == expected
        one_is_through.set()
        assert slow.result() == expected
    assert modes_of(model) == modes


@needs_shared
def test_trained_model_on_c4():
    """Values of an independent float64 computation: 76.58 fp32, 76.79 absmax, 76.64 llm.int8.

    A rounding error that flips one code changes what all later layers round, so an 8-bit perplexity of this model has
    a spread: with embeddings changed by 1e-6 of their value it scatters by 0.06 (absmax) and 0.025 (llm.int8).
    """
    model, tokenizer = load_model(str(STORIES)), load_tokenizer(str(STORIES))
    blocks = load_text(str(C4), tokenizer, 256, 32)
    assert perplexity(model, blocks) == pytest.approx(76.58, abs=0.005)
    assert perplexity(quantize(model, "absmax"), blocks) == pytest.approx(76.79, abs=0.2)
    assert perplexity(quantize(model, "llm.int8"), blocks) == pytest.approx(76.64, abs=0.1)


def test_blocks_that_pass_at_once_are_those_that_pass_in_turn(blocks, constants):
    """Where nobody's hook looks at them one by one: results come in the order of the blocks, and errors too."""
    constants("outliers.models.decoder", SHORTEST=1)
    model, running, most = make_model("llama"), [], []

    def see(number: int, block: torch.Tensor) -> float:
        running.append(number)
        most.append(len(running))
        time.sleep(0.02 if number == 0 else 0)
        running.remove(number)
        return float(block.sum())

    def at_once() -> int:
        most.clear()
        assert list(map_blocks(model, see, blocks)) == [float(block.sum()) for block in blocks]
        return max(most)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert at_once() == 2
        with draw.drawn(model, 1):
            assert at_once() == 2
        with variant("zero(0@ffn_in/q)+massive(1@layers.0,value=0,above=100)+unattended(0)").on(model):
            assert at_once() == 2
        for count, expected in ((1, [2]), (2, [1, 1]), (3, [1, 1, 2])):
            several = blocks.repeat(2, 1)[:count]
            assert list(map_blocks(model, lambda *_: torch.get_num_threads(), several)) == expected
        handle = model.model.norm.register_forward_hook(lambda *_: None)
        assert at_once() == 1
        handle.remove()
        with pytest.raises(ZeroDivisionError):
            list(map_blocks(model, lambda number, _: 1 / (number - 1), blocks))
        assert torch.get_num_threads() == in_new_thread(torch.get_num_threads) == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_blocks_at_once_have_the_values_of_one_thread(case, blocks, constants):
    """Of whole passes and of exchanged layers, which take layers of the model out of their places."""
    constants("outliers.models.decoder", SHORTEST=1)
    model, several, absmax = make_model(case), blocks.repeat(4, 1), variant("absmax")
    variants = list(map(variant, ("absmax", "llm.int8+only=layers.1", "zero(1@q/up)", "shuffle(1,2)")))

    def values(threads: int) -> list:
        torch.set_num_threads(threads)
        by_layer = place_losses(model, several, absmax, place_choices(model, absmax, "layer"))
        rows = records_of(Cell(Given(model, several), one, metric) for one in variants for metric in METRICS)
        return [by_layer, layer_by_layer(model, several, absmax), [row["value"] for row in rows]]

    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert values(2) == values(1)
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("stream", "batch"), [(False, 2), (True, 1)])
def test_memory_is_forecast_for_both_blocks_at_once(stream, batch):
    subject = SimpleNamespace(experiment=SimpleNamespace(stream=stream, device="cpu"))
    assert STATES.memory_needs([Cell(subject, variant("absmax"), Perplexity())]).batch == batch


def test_operands_of_a_draw_go_with_it(blocks):
    model = quantize(make_model("gpt2"), "llm.int8")
    for _ in range(2):
        with draw.drawn(model, 1):
            perplexity(model, blocks)
            assert all(layer.drawn for layer in quantized_layers(model))
        assert not any(layer.drawn for layer in quantized_layers(model))


def in_new_thread(function):
    """What a function returns in a thread that begins now."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize(("most", "made"), [(2**28, 2), (0, 4)])
def test_exact_logits_are_made_twice_at_most(blocks, constants, calls_of, most, made):
    """Once for one variant that is compared with them, and once for all that follow, where there is room."""
    constants("outliers.metrics.states", MOST_KEPT=most)
    model = make_model("gpt2")
    check_found(model)  # once for all, which makes a few logits
    heads = calls_of("outliers.models.head.Head.logits")

    def values(*names: str) -> list[float]:
        subject = Given(model, blocks[:1])
        return [record["value"] for record in records_of(Cell(subject, variant(name), Agreement()) for name in names)]

    names = "absmax", "zero(3)", "llm.int8", "zero(5)"
    together = values(*names)
    assert len(heads) == made + len(names)
    assert together == [value for name in names for value in values(name)]
