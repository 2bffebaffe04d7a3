"""What a GPU is given to do and when the host waits for it: launches of kernels, other operators, and reads.

Counted in Triton's interpreter on a CPU, where launch-bound work would cost what it launches.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from outlier_kernels import dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

import outliers
from outliers.metrics.graphs import DecodeSteps
from outliers.models.anatomy.trust import check_found
from outliers.models.decoder import run_decoder
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import get_scheme
from tests.conftest import CONFIGS
from tests.kernels.test_triton import interpreter  # noqa: F401
from tests.small_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts the interpreter's launches"),
]
COPIES = ("to", "contiguous", "reshape")  # or views
NOTHING = ("is_set_to", "promote_types", "_unsafe_view")  # what the host does alone
READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Counts(NamedTuple):
    """Kernels of Triton's, other operators that are no views, and reads of the host."""

    kernels: int
    operators: int
    reads: int

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Counter(TorchDispatchMode):
    """Counts operators as they come to a device: a mask as an index is read by the host, too."""

    def __init__(self):
        super().__init__()
        self.kernels = self.operators = self.reads = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put_") and any(one is not None and one.dtype == torch.bool for one in args[1])
        self.reads += name in READS or masks
        result = operator(*args, **(kwargs or {}))
        copies = name in COPIES and result.data_ptr() != args[0].data_ptr()
        self.operators += copies or not (operator.is_view or name in READS + NOTHING)
        return result


@contextmanager
def counting(counter: Counter):
    launch = GridExecutor.__call__

    def counted(self, *args, **named):
        counter.kernels += 1
        with _disable_current_modes():
            return launch(self, *args, **named)

    def reading(read: Callable) -> Callable:
        def counted_read(tensor):
            counter.reads += 1
            with _disable_current_modes():
                return read(tensor)

        return counted_read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", counted)
        for name in ("tolist", "cpu"):
            patch.setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
        patch.setattr(dispatch, "_is_watched", lambda _tensor: False)  # by who does not change what runs
        with counter:
            yield


def count(run: Callable, before: int = 1) -> Counts:
    """What a call does after some other ones."""
    for _ in range(before):
        run()
    counter = Counter()
    with counting(counter):
        run()
    return Counts(counter.kernels, counter.operators, counter.reads)


def of_a_block(run: Callable[[torch.Tensor], object]) -> Counts:
    """What one more block of text costs."""
    blocks = torch.arange(2 * 8).view(2, 8) % 97
    one = count(lambda: run(blocks[:1]))
    return count(lambda: run(blocks), before=0) - one


def assert_at_most(found: Counts, kernels: int, operators: int, reads: int) -> None:
    assert all(one <= most for one, most in zip(found, (kernels, operators, reads), strict=True)), found


@pytest.fixture(autouse=True)
def in_triton(monkeypatch):
    monkeypatch.setenv("OUTLIERS_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def hidden_states(tokens: int) -> torch.Tensor:
    x = torch.randn(tokens, 48)
    x[0, 5] = 20
    return x


@pytest.mark.parametrize(("tokens", "most"), [(16, (1, 1, 0)), (64, (3, 1, 0))])
@torch.no_grad()
def test_an_int8_layer(tokens, most):
    layer, x = Int8Linear(torch.nn.Linear(48, 32), get_scheme("llm.int8")), hidden_states(tokens)
    assert_at_most(count(lambda: layer(x)), *most)


LAYERS = {
    "absmax": (3, 1, 0),
    "zeropoint": (3, 1, 0),
    "absmax-vector": (2, 1, 0),
    "llm.int8": (4, 1, 0),
    "llm.int8-zeropoint": (4, 1, 0),
    "fp8-e4m3": (2, 6, 0),
    "absmax+hadamard": (3, 4, 0),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_of_an_evaluation(name):
    """Whose exact weight is kept."""
    layer, x = QuantizedLinear(torch.nn.Linear(48, 32), get_scheme(name), None), hidden_states(40)
    assert_at_most(count(lambda: layer(x)), *LAYERS[name])


@pytest.mark.parametrize("case", ["gpt2", "opt", "llama"])
@torch.inference_mode()
def test_a_decode_step_of_an_int8_model_reads_nothing(case):
    """As the CUDA graph has to, which holds it; each layer is one kernel."""
    model = outliers.quantize(make_model(case).eval(), "llm.int8", keep="int8")
    steps, layers = DecodeSteps(model, 2, 8), sum(isinstance(one, Int8Linear) for one in model.modules())
    found = count(steps.decode)
    assert (found.kernels, found.reads) == (layers, 0)


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
@torch.inference_mode()
def test_all_experts_of_a_layer_are_one_launch_for_each_of_their_projections(case):
    """Beside one that makes codes, and nothing is read; each by itself, as where one is watched, computes the same."""
    model, ids = outliers.quantize(make_model(case), "absmax-vector", keep="int8"), torch.arange(8)[None]
    expected, found = model(ids, use_cache=False).logits, count(lambda: model(ids, use_cache=False))
    watched = [layer.mlp.experts.get_submodule("1.down_proj") for layer in model.model.layers]
    for one in watched:
        one.register_forward_hook(lambda *_: None)
    each = count(lambda: torch.testing.assert_close(model(ids, use_cache=False).logits, expected), before=0)
    assert found.kernels == sum(4 + 2 * 2 for _ in watched)
    assert found.reads <= each.reads - len(watched)


def beside(model: torch.nn.Module, observe: Callable[[torch.nn.Module, torch.Tensor], object]) -> Counts:
    """What a block costs beside its pass through the decoder."""
    check_found(model)  # once for all, which passes a few tokens
    with torch.inference_mode():
        plain = of_a_block(lambda blocks: list(run_decoder(model, blocks)))
    return of_a_block(lambda blocks: observe(model, blocks)) - plain


@pytest.mark.nightly("kernels/outlier_kernels/", "outliers/metrics/", "outliers/models/", "outliers/tracing/")
def test_a_block_of_an_evaluation_and_a_trace(monkeypatch):
    """Of a model with two layers, which have four hidden states and the residual stream each, and what two more cost:
    less than four kernels and operators a state."""
    model, trace = make_model("gpt2"), partial(outliers.trace, alpha=3.0)
    assert_at_most(beside(model, outliers.perplexity), 1, 6, 1)  # its head has token ids, which the stack ignores
    two_layers = beside(model, trace)
    assert_at_most(two_layers, 18, 48, 2)
    monkeypatch.setitem(CONFIGS["gpt2"][1], "n_layer", 4)
    assert_at_most(beside(make_model("gpt2"), trace) - two_layers, 18, 18, 0)
