"""Decode steps that a CUDA graph can hold: the tokens of ordinary greedy decoding, and no read of the host."""

import warnings

import pytest
import torch

from outliers import quantize
from outliers.metrics.graphs import DecodeSteps, captured_steps, next_ids
from outliers.metrics.latency import latency
from tests.metrics.test_latency import generated
from tests.small_models import make_model

HAS_GPU = torch.cuda.is_available()
TOKENS = 8


def decoded(model, prompts: torch.Tensor) -> torch.Tensor:
    """Tokens of a second generation with the same memory."""
    steps = DecodeSteps(model, len(prompts), prompts.shape[1] + TOKENS)
    for _ in range(2):
        steps.cache.reset()
        ids = [next_ids(model, prompts, steps.cache)]
        for _ in range(TOKENS):
            ids.append(steps.after(ids[-1]))
    return torch.cat(ids, 1)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("case", ["gpt2", "opt", "llama", "bloom"])
@torch.inference_mode()
def test_steps_choose_the_tokens_of_generate(case, int8, blocks):
    model = make_model(case).eval()
    model = quantize(model, "llm.int8", keep="int8") if int8 else model
    assert decoded(model, blocks).equal(generated(model, blocks, 1 + TOKENS))


def test_on_a_cpu_nothing_is_captured():
    assert captured_steps(make_model("gpt2"), 1, 8) is None


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: CUDA graphs are captured there")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("case", ["gpt2", "opt", "llama"])
def test_replays_choose_the_tokens_of_steps(case, int8, blocks):
    model = make_model(case).eval().to("cuda")
    model = quantize(model, "llm.int8", keep="int8") if int8 else model
    blocks = blocks.to("cuda")
    with torch.inference_mode():
        want = decoded(model, blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latency(model, blocks, TOKENS, 2).ids.equal(want.cpu())


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: CUDA graphs are captured there")
@pytest.mark.parametrize("case", ["gpt_neo", "mpt", "gemma2"])
def test_a_model_that_no_graph_holds_decodes_without_one(case, blocks):
    model = make_model(case).eval().to("cuda")
    with pytest.warns(match=f"'{model.config.model_type}' decodes without a CUDA graph"):
        timings = latency(model, blocks.to("cuda"), TOKENS, 1)
    assert timings.ids.equal(generated(model, blocks.to("cuda"), 1 + TOKENS).cpu())
