"""The Triton kernels against the reference: interpreted where there is no GPU, and compiled for GPUs that are not here.

Compilation needs Triton without its interpreter, so this file is also a program, which compiles every kernel that a
layer launches and prints what came out.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from hypothesis import assume, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from outlier_kernels import reference, reference_losses, reference_products, reference_states, states  # noqa: E402
from outlier_kernels.formats import FORMATS, Quantizer, granularities  # noqa: E402
from outlier_kernels.reference import Exact, Quantized  # noqa: E402
from outlier_kernels.triton import (  # noqa: E402
    attention,
    few,
    formats,
    grouped,
    layer,
    losses,
    outlier_features,
    product,
    quantization,
    tiles,
)
from outlier_kernels.triton import states as triton_states  # noqa: E402
from outlier_kernels.triton.outlier_features import find_outliers  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from tests.conftest import pairwise  # noqa: E402
from tests.kernels.test_kernels import int8  # noqa: E402
from tests.kernels.test_passes import matrices  # noqa: E402
from tests.kernels.test_products import laid_out, places  # noqa: E402
from tests.tracing.test_states import LIMITS, assert_same_residuals, assert_same_states, random  # noqa: E402

# numpy, which interprets the kernels, warns of divisions by zero and casts of NaN whose results are not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
POISONS = [torch.nan, torch.inf, -torch.inf]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Shared memory that one program may use, bytes, by capabilities to compile for. 8.6 and 8.9 have less than 8.0, and run
# its tiles.
SHARED_MEMORY = {(8, 0): 101_376, (9, 0): 232_448}
REGISTERS = 65_536  # of a multiprocessor, which a program may use


def to_device(quantized: Quantized) -> Quantized:
    return Quantized(*(None if part is None else part.to(DEVICE) for part in quantized))


def run(x, weight, bias=None, **scheme) -> torch.Tensor:
    return layer.linear(x.to(DEVICE), to_device(weight), None if bias is None else bias.to(DEVICE), **scheme).cpu()


def assert_same_output(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for one rounding of the output, and for the order of float32 sums."""
    assert got.dtype == want.dtype
    # The interpreter cuts to bfloat16 where a GPU rounds.
    rounding = torch.finfo(want.dtype).eps if want.dtype != torch.float32 else 0
    largest = want[want.isfinite()].abs().max().item()
    torch.testing.assert_close(got, want, rtol=rounding, atol=1e-5 * largest)


def assert_same_codes(got: Quantized, want: Quantized) -> None:
    """Bit for bit; NaN has no code."""
    for part, wanted in zip(got[1:], want[1:], strict=True):
        assert (part is None) == (wanted is None)
    finite = want.scale.isfinite() & (want.scale if want.zero_point is None else want.zero_point).isfinite()
    usable = finite.expand(len(want.codes), 1)[:, 0]
    assert torch.equal(got.codes.cpu()[usable], want.codes[usable])
    for part, wanted in zip(got[1:], want[1:], strict=True):
        if wanted is not None:
            rows = usable[: len(wanted)]
            torch.testing.assert_close(part.cpu()[rows], wanted[rows], rtol=0, atol=0)
    torch.testing.assert_close(got.scale.cpu(), want.scale, rtol=0, atol=0, equal_nan=True)


def fused(_builder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """x · y + z, rounded once, which the interpreter's own rounds twice."""
    product = x.data.astype("float64") * y.data.astype("float64")
    return TensorHandle((product + z.data).astype("float32"), z.dtype.scalar)


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Interpret the kernels where there is no GPU.

    TRITON_INTERPRET=1 does so only if it was set before Triton was imported, which other tests may have done.
    """
    every = SimpleNamespace(__globals__={"language": triton.language, "core": triton.language.core})
    replace_language = triton.runtime.interpreter._patch_lang
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            # once a kernel, and not in each function that it calls, which takes half of the time
            patch.setattr(triton.runtime.interpreter, "_patch_lang", lambda _function: replace_language(every))
            patch.setattr(InterpretedFunction, "__call__", lambda self, *args, **named: self.rewrite()(*args, **named))
            of_triton = (triton.language.standard, triton.language.random)
            of_layers = (quantization, outlier_features, product, few, formats, grouped)
            modules = (*of_triton, *of_layers, triton_states, attention, losses)
            functions = [value for module in modules for value in vars(module).values()]
            known = {each.fn: InterpretedFunction(each.fn) for each in functions if isinstance(each, JITFunction)}
            for function in known.values():
                function.rewrite()  # while a kernel runs it is too late: Triton's language is replaced then
            patch.setattr(InterpreterBuilder, "create_fma", fused)
            patch.setattr(quantization, "FUSES", True)
            patch.setattr(JITFunction, "run", lambda self, *args, **options: known[self.fn].run(*args, **options))
            patch.setattr(JITFunction, "__call__", lambda self, *args, **options: known[self.fn](*args, **options))
        yield


# Whether absmax, whether each row has a scale, and the seed of rounding by chance.
CODES = [(symmetric, per_row, None) for symmetric in (True, False) for per_row in (True, False)] + [(True, True, 3)]


def assert_codes(matrix: torch.Tensor, symmetric: bool, per_row: bool, seed: int | None) -> None:
    """Of a matrix, the reference's bit for bit."""
    if seed is None:
        quantizer = int8(symmetric, per_row)
        assert_same_codes(quantization.quantize(matrix.to(DEVICE), quantizer), reference.quantize(matrix, quantizer))
    else:
        want = reference_products.quantize_rows(matrix, seed=seed)
        assert_same_codes(quantization.quantize_rows(matrix.to(DEVICE), seed=seed), want)


@given(matrix=matrices(3, 6).map(torch.Tensor.resolve_neg), scheme=st.sampled_from(CODES))
@example(matrix=random(2, 4100), scheme=CODES[0])  # more than a block
@settings(deadline=None, max_examples=250)
def test_codes_are_those_of_the_reference(matrix, scheme):
    subnormal = (matrix != 0) & (matrix.abs() < torch.finfo(torch.float32).tiny)
    assume(HAS_GPU or matrix.dtype != torch.bfloat16 or not subnormal.any())  # which the interpreter reads as zeros
    assert_codes(matrix, *scheme)


def test_a_zero_point_at_a_tie_is_rounded_by_itself():
    assert_codes(torch.tensor([[-0.5, 253.5], [-0.5, 1.0]]), *CODES[2])


def test_the_largest_sum_is_exact(constants):
    if not HAS_GPU:  # the interpreter takes a fraction of the time for few steps over many features
        constants("outlier_kernels.triton.few", LEAST_DEPTH=4096)
    codes = torch.full((1, reference.LARGEST_K), 127, dtype=torch.int8)
    weight = Quantized(codes, torch.ones(1, 1))
    got = run(torch.full(codes.shape, 127.0), weight)
    assert got.item() == float(torch.tensor(reference.LARGEST_K * 127**2, dtype=torch.float32))


@pytest.mark.parametrize("tile", sorted(set(itertools.chain(*tiles.TILES.values()))))
def test_every_tile(tile, constants):
    constants("outlier_kernels.triton.tiles", choose=lambda *_: tile)
    x, weight = random(140, 150), reference.quantize(random(70, 150), int8(False))
    scheme = {"activations": int8(False), "threshold": 3.0}
    assert_same_output(run(x, weight, **scheme), reference.linear(x, weight, **scheme))


def test_tiles_are_as_large_as_a_device_has_work_for():
    sizes = [(1, 33, 48), (1, 512, 4096), (1, 8192, 4096)]
    chosen = [tiles.choose(*size, True, torch.device("cpu")) for size in sizes]
    assert chosen == list(tiles.TILES[(8, 0), True][::-1])


def of_seeds(few: int) -> pytest.MarkDecorator:
    """Cases by the seeds up to 200, of which `make test` takes a few."""
    every = [range(few), pytest.param(range(few, 200), marks=pytest.mark.nightly("kernels/outlier_kernels/"))]
    return pytest.mark.parametrize("seeds", every, ids=[str(few), "200"])


def picker(seed: int) -> Callable:
    """What picks one of several choices, by torch's seed."""
    torch.manual_seed(seed)
    return lambda *choices: choices[int(torch.randint(len(choices), ()))]


def of_any_strides(pick: Callable, rows: int, features: int) -> torch.Tensor:
    return pick(torch.randn(rows, features), torch.randn(features, rows).T, torch.randn(rows, 2 * features)[:, ::2])


def layer_of_seed(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, dict]:
    """Hidden states, an exact weight, a bias and a scheme: of any shape, strides and dtype, with numbers that are
    none."""
    pick = picker(seed)
    tokens, features, outputs = (int(torch.randint(1, most, ())) for most in (70, 200, 50))
    x, weight = of_any_strides(pick, tokens, features), of_any_strides(pick, outputs, features)
    x *= 10.0 ** pick(-30, -3, 0, 0, 0, 3)
    threshold = pick(None, 2.0, 1e-6, 1e6)
    if pick(True, False):
        x[pick(*range(tokens)), pick(*range(features))] = pick(torch.nan, torch.inf, -torch.inf, 0.0, threshold or 0.0)
    symmetric, per_row = pick(True, False), pick(True, False)
    scheme = {"activations": int8(symmetric, per_row), "threshold": threshold}
    return x.to(pick(*DTYPES)), weight, pick(None, torch.randn(outputs)), scheme


@of_seeds(30)
def test_any_layer_is_that_of_the_reference(seeds):
    """Outlier features, codes and scales bit for bit; outputs where codes are kept and where the exact weight is, bit
    for bit where all is exact up to the scales. No number stays so in its row alone; strides of codes are any."""
    for seed in seeds:
        x, exact, bias, scheme = layer_of_seed(seed)
        quantizer, threshold = scheme["activations"], scheme["threshold"]
        flags, rest, given = None, x, x.to(DEVICE)
        if threshold is not None:
            hits = x.float().abs() >= threshold
            outliers = find_outliers(given, threshold, True)
            assert outliers.places[: outliers.count.item()].tolist() == hits.any(0).nonzero()[:, 0].tolist(), seed
            flags, rest = outliers.flags.clone(), x[:, ~hits.any(0)]
        made = quantization.quantize(given, quantizer, flags)
        if rest.numel():
            codes = made.codes if flags is None else made.codes[:, flags == 0]
            assert_same_codes(made._replace(codes=codes), reference.quantize(rest, quantizer))
        if threshold is not None and hits[:, x.isnan().any(0)].any():
            x = x[~x.isnan().any(1)]  # an outlier feature with NaN in another token is one to these kernels alone
        finite = x.isfinite().all(1)
        if not quantizer.per_row and not finite.all():
            continue
        weight = reference.quantize(exact, quantizer)
        longer = torch.cat([weight.codes, weight.codes], 1)
        laid = picker(seed)(weight.codes, weight.codes.T.contiguous().T, longer[:, x.shape[1] :])
        for kept in (None, Exact(exact, quantizer)):
            want = reference.linear(x, weight, bias, **scheme, exact=kept)[finite]
            on_gpu = kept and Exact(exact.to(DEVICE), quantizer)
            got = run(x, weight._replace(codes=laid), bias, **scheme, exact=on_gpu)
            assert not got[~finite].isfinite().any(), seed
            if len(want):
                assert_same_output(got[finite], want)
                assert torch.equal(got[finite], want) or x.dtype != torch.float32 or threshold is not None, seed


def matrix_of_seed(seed: int) -> tuple[torch.Tensor, Quantizer]:
    """A matrix of any shape, strides, dtype and size, with numbers that are none, and a format."""
    pick = picker(seed)
    name = pick(*(name for name, format in FORMATS.items() if formats.rounding_of(format)))
    quantizer = Quantizer(name, pick(*granularities(name, pick("activations", "weights"))))
    rows, features = pick(1, 2, 17, 40), pick(1, 2, 5, 40) * quantizer.group if quantizer.group else pick(1, 50, 2050)
    x = of_any_strides(pick, rows, features) * 10.0 ** pick(-40, -30, -6, 0, 0, 3, 30)
    if pick(True, False):
        x[pick(*range(rows))] = pick(0.0, -0.0, 7.0, 1e-44)
    if pick(True, False):
        x[pick(*range(rows)), pick(*range(features))] = pick(torch.nan, torch.inf, -torch.inf, 1e4)
    sizes = x[x.isfinite() & (x != 0)].abs()
    dtypes = DTYPES if not len(sizes) or sizes.min() > 1e-30 else [torch.float16, torch.float32]
    return x.to(pick(*dtypes)), quantizer


@of_seeds(25)
def test_any_format_is_that_of_the_reference(seeds):
    """Scales and codes bit for bit, signed zeros too; NaN has no code."""
    for seed in seeds:
        x, quantizer = matrix_of_seed(seed)
        got, want = formats.quantize(x.to(DEVICE), quantizer), reference.quantize(x, quantizer)
        assert (got.codes.dtype, got.scale.shape) == (want.codes.dtype, want.scale.shape)
        of_groups = want.scale.isfinite().repeat_interleave(x.shape[1] // want.scale.shape[1], 1) & x.isfinite()
        codes, wanted = (one.codes.cpu()[of_groups.expand_as(x)] for one in (got, want))
        assert torch.equal(codes, wanted), (seed, quantizer)
        assert torch.equal(torch.signbit(codes), torch.signbit(wanted)), (seed, quantizer)
        torch.testing.assert_close(got.scale.cpu(), want.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["fp8-e4m3 row", "mxfp4 block", "int4 group-16", "bfp6 group-8"])
def test_layers_of_formats_are_those_of_the_reference(name):
    activations, x = Quantizer(*name.split()), random(40, 64)
    weight = reference.quantize(random(7, 64), activations)
    x[3, 9] = 30.0
    for threshold in (None, 6.0):
        given = random(7), activations, threshold
        got = formats.linear(x.to(DEVICE), to_device(weight), given[0].to(DEVICE), *given[1:], None).cpu()
        torch.testing.assert_close(got, reference.linear(x, weight, *given), rtol=1e-5 * HAS_GPU, atol=1e-5 * HAS_GPU)


@pytest.mark.parametrize("threshold", [None, 1001.0])
def test_zero_points_that_outgrow_int32(threshold):
    x, weights = 1000 + random(5, 64), 1000 + random(7, 64)
    weight = reference.quantize(weights, int8(False, True))
    assert weight.zero_point.abs().max() ** 2 > 2**31
    want = reference.linear(x, weight, activations=int8(False), threshold=threshold)
    assert_same_output(run(x, weight, activations=int8(False), threshold=threshold), want)


def test_sums_that_could_overflow_are_not_served():
    for features in (reference.LARGEST_K, reference.LARGEST_K + 1):
        weight = Quantized(torch.zeros(1, features, dtype=torch.int8), torch.ones(1, 1))
        assert layer.serves(weight, int8(), torch.float32) == (features == reference.LARGEST_K)


BATCHES = [(1, 1, 1), (130, 20, 18), (2, 3, 19, 40, 21), (3, 4, 17, 66), (2, 1, 2, 6, 5, 4)]


def on_device(*given: torch.Tensor | int | None) -> list[torch.Tensor | int | None]:
    return [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given]


# Layout, share of outliers, share of exact columns, and seed.
PARTS = [("heads", 0.0, 0.0, None), ("columns", 0.0, 0.3, 5), ("heads", 0.3, 0.0, None), ("rows", 1.0, 1.0, None)]


@pairwise("shape parts dtype", BATCHES, PARTS, DTYPES)
def test_products_are_those_of_the_reference(shape, parts, dtype):
    torch.manual_seed(0)
    layout, share, of_columns, seed = parts
    *leading, m, k, n = shape
    left, right = laid_out(*leading, m, k)[layout].to(dtype), laid_out(*leading, n, k)[layout].to(dtype)
    given = left, right, places(share, *leading, k), places(of_columns, *leading, n), seed
    found, wanted = product.product(*on_device(*given)).cpu(), reference_products.product(*given)
    assert_same_output(found, wanted)
    if dtype == torch.float32 and not share and not of_columns:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("sizes", "features", "outputs", "dtype"),
    [([1], 33, 5, torch.float32), ([0, 70, 3, 0, 64, 1], 48, 20, torch.float32), ([5, 0, 9], 64, 16, torch.bfloat16)],
)
def test_one_launch_multiplies_the_rows_of_all_experts(sizes, features, outputs, dtype):
    """Some of which have no row, or more than a tile."""
    experts, rows = len(sizes), random(sum(sizes), features).to(dtype)
    made = [reference.quantize(random(outputs, features), int8()) for _ in sizes]
    weight = Quantized(*(torch.stack([getattr(one, name) for one in made]) for name in ("codes", "scale")))
    given = rows, torch.tensor(sizes).cumsum(0), weight, random(experts, outputs)
    assert grouped.serves(rows, weight)
    found = grouped.grouped_linear(*on_device(*given[:2]), to_device(weight), *on_device(given[3])).cpu()
    assert_same_output(found, reference.grouped_linear(*given))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_products_do_not_hide_nan_and_inf(poison):
    left, right = random(2, 4, 40), random(2, 3, 40)
    left[1, 2, 5] = poison
    found = product.product(*on_device(left, right)).cpu()
    assert not torch.isfinite(found[1, 2]).any()
    assert torch.isfinite(found[0]).all()


def whole_product(folder: str) -> dict:
    """What a sweep, an int8 model and a trace find, on whichever path OUTLIERS_KERNELS asks for."""
    import outliers
    from outliers.commands.sweep import Sweep, sweep

    name, ids = "pocket/gpt2-0.1m", torch.arange(2 * 16).view(2, 16) * 7
    asked = Sweep(models=[name], block=16, blocks=1, schemes=["absmax", "zeropoint-vector", "llm.int8", "fp8-e4m3"])
    rows, model = sweep(asked, folder), outliers.load_model(name)
    trained = outliers.train_int8(outliers.load_model(name), attention=True, decomposition=0.02)
    loss = trained(ids, labels=ids).loss
    loss.backward()
    return {
        "kernels": {row["scheme"]: row["kernels"] for row in rows},
        "perplexity": [row["value"] for row in rows],
        "int8 model": outliers.perplexity(outliers.quantize(model, "llm.int8", keep="int8"), ids),
        "loss": [loss.item(), *(one.grad.norm().item() for one in trained.parameters())],
        "trace": {
            name: one.tolist()
            for name, one in outliers.trace(model, ids, alpha=2.0, attention=False).statistics.items()
        },
        "sinks": outliers.trace(model, ids).statistics["attention.sinks"].tolist(),
        "hits": sorted(outliers.trace(model, ids, alpha=2.0, attention=False).sketch.items()),
    }


@pytest.mark.nightly("kernels/outlier_kernels/", "outliers/quantization/", "outliers/tracing/")
def test_the_whole_product_in_triton_is_that_of_a_cpu(tmp_path):
    """In a process that interprets the kernels from the start, as a user has it without a GPU."""
    program = (
        "import json, sys; from tests.kernels.test_triton import whole_product; "
        "print(json.dumps(whole_product(sys.argv[1])))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OUTLIERS_KERNELS": "triton"}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "triton"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found, wanted = json.loads(done.stdout.splitlines()[-1]), whole_product(str(tmp_path / "cpu"))
    paths = found.pop("kernels"), wanted.pop("kernels")
    assert [set(one.values()) for one in paths] == [{"triton"}, {"cpu", "reference"}]
    assert found.pop("sinks") == wanted.pop("sinks"), "of other states, for attention is summed in another order"
    assert list(map(tuple, found.pop("hits"))) == wanted.pop("hits")
    states = found.pop("trace"), wanted.pop("trace")
    for name, value in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-4), name
    assert states[0].keys() == states[1].keys()
    for name in states[1]:
        torch.testing.assert_close(*(torch.tensor(one[name]) for one in states), rtol=1e-12, atol=1e-12)


@of_seeds(12)
def test_any_attention_is_that_of_the_reference(seeds):
    """Of any shape, strides and dtype, with as many keys' heads or fewer, whose scores are of any size; NaN stays."""
    for pick in map(picker, seeds):
        heads, shared, length, features = pick(1, 3), pick(1, 2), pick(1, 2, 63, 64, 65, 130), pick(1, 8, 40, 64)
        dtype, size = pick(*DTYPES), pick(0.0, 1.0, 5.0)
        query = size * torch.randn(1, length, heads * shared, features).transpose(1, 2).to(dtype)
        key = (size * torch.randn(1, length, heads, 2 * features))[..., ::2].transpose(1, 2).to(dtype)
        if pick(True, False, False):
            key[0, 0, pick(*range(length)), 0] = torch.nan
        found = attention.attention_sums(*on_device(query, key), features**-0.5).cpu()
        want = reference_states.attention_sums(query, key, features**-0.5)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@of_seeds(12)
def test_any_losses_are_those_of_the_reference(seeds):
    """Of any shape, strides and dtype, in two parts of the vocabulary; what is not finite stays so."""
    for pick in map(picker, seeds):
        predictions, tokens = pick(1, 3, 20), pick(2, 50, 2048, 2500)
        x = pick(torch.randn(predictions, tokens), torch.randn(tokens, predictions).T) * pick(0.0, 1.0, 30.0, 1000.0)
        if pick(True, False, False):
            x[pick(*range(predictions)), pick(*range(tokens))] = pick(*POISONS)
        x, targets = x.to(pick(*DTYPES)), torch.randint(tokens, (predictions, 1))
        found = []
        for path, device in ((losses, DEVICE), (reference_losses, "cpu")):
            sums = [torch.full((predictions, 1), first, dtype=torch.float64).to(device) for first in (-torch.inf, 0)]
            for start, part in ((0, x[:, : tokens // 2]), (tokens // 2, x[:, tokens // 2 :])):
                path.add(part.to(device), start, targets.to(device), *sums)
            found.append([one.cpu() for one in sums])
        assert torch.equal(torch.isfinite(found[0][0]), torch.isfinite(found[1][0]))
        torch.testing.assert_close(*(one[0].nan_to_num() for one in found), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*(one[1] for one in found), rtol=0, atol=0, equal_nan=True)


def state_of_seed(seed: int) -> torch.Tensor:
    """A hidden state of any shape, strides, dtype and size, of nothing but hits or one value, with one large entry."""
    pick = picker(seed)
    tokens, features = pick(1, 7, 33, 40), pick(1, 40, 129, 140)
    x = of_any_strides(pick, tokens, features) * 10.0 ** pick(-3, 0, 0, 1, 2)
    if pick(True, False):
        x = x * 0 + pick(0.0, 7.0, 150.0)
    if pick(True, False):
        x[pick(*range(tokens)), pick(*range(features))] = pick(1e4, 500.0, -3e4)
    return x.to(pick(*DTYPES)).to(DEVICE)


@of_seeds(3)
def test_any_states_are_those_of_the_reference(seeds):
    """Of two sequences; the largest magnitudes so far, or which were hits, are kept."""
    for seed in seeds:
        x = state_of_seed(seed)
        kept, largest = ("magnitudes", "hits", "nothing")[seed % 3], x.float().abs().max().item()
        assert_same_states(triton_states, [x, x.flip(0)], kept, largest)
        assert_same_residuals(triton_states, [x, x.flip(0)], kept.replace("hits", "nothing"))


@pytest.mark.parametrize("bad", POISONS)
def test_states_that_are_not_finite(bad):
    """The first one is named when the report is read, and nothing waits before."""
    x = random(20, 140)
    x[19, 133], x[3, 135] = bad, torch.nan
    found, ids = states.Found(), torch.arange(20, device=DEVICE)
    statistics, residual = (states.empty(table, 140, DEVICE) for table in (states.STATISTICS, states.RESIDUAL))
    for place, state in (("before", random(20, 140)), ("here", x), ("later", x[:, 5:])):
        of_role, of_stream = (
            states.State(state.to(DEVICE), ids, table, None, found, place) for table in (statistics, residual)
        )
        triton_states.add(of_role, 6.0)
        triton_states.add_residual(of_stream, LIMITS, torch.zeros_like(ids))
    with pytest.raises(states.NotFinite) as raised:
        found.read()
    assert (raised.value.label, raised.value.feature) == ("here", 133)


def test_hits_of_more_states_than_a_report_has_room_for(constants):
    """A full report is read in between."""
    constants("outlier_kernels.triton.states", MOST=2, LEAST_ROOM=1)
    found, sizes = states.Found(), (3, 3, 40, 3, 40)
    given = [5 * random(2, features) for features in sizes]
    for place, x in enumerate(given):
        ids, statistics = torch.arange(2, device=DEVICE), states.empty(states.STATISTICS, x.shape[1], DEVICE)
        triton_states.add(states.State(x.to(DEVICE), ids, statistics, None, found, place), 1.0)
    found.read()
    for (place, hits), x in zip(found.hits, given, strict=True):
        features = (x.abs() >= 1).nonzero()[:, 1].tolist()
        wanted = np.array(list(zip(features, x[x.abs() >= 1].tolist(), strict=True)), states.HIT)
        assert given[place] is x
        assert np.array_equal(np.sort(hits), np.sort(wanted))
    assert found.waiting == sum(len(hits) for _, hits in found.hits)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter is too slow for layers of this size")
@pairwise(
    "shape dtype symmetric threshold",
    [(1, 4096, 4096), (100, 768, 3072), (300, 5140, 1000), (2048, 4096, 11008)],
    DTYPES,
    [True, False],
    [None, 6.0],
)
def test_real_layers_on_a_gpu(shape, dtype, symmetric, threshold):
    tokens, features, outputs = shape
    x, bias = random(tokens, features).to(dtype), random(outputs)
    x[:, ::500] *= 10
    weight = reference.quantize(random(outputs, features) * 0.02, int8(symmetric, True))
    want = reference.linear(x, weight, bias, activations=int8(symmetric), threshold=threshold)
    assert_same_output(run(x, weight, bias, activations=int8(symmetric), threshold=threshold), want)


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """What became of every kernel in every tile, from a process that has Triton's compiler and not its interpreter."""
    if not (TOOLS / "ptxas").exists():
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.nightly("kernels/outlier_kernels/triton/")
def test_compiled_kernels(compiled):
    """Products take int8 tensor-core instructions; all fit into shared memory, spill no registers, and round products
    before they are added to."""
    made = [kernel for kernel in compiled if kernel["name"].startswith("multiply_")]
    assert len(made) >= 2 * sum(map(len, tiles.TILES.values()))
    assert not [kernel for kernel in made if not kernel["int8"]]
    assert not [kernel for kernel in compiled if kernel["fuses"]]
    assert {tuple(kernel["capability"]) for kernel in compiled} == set(SHARED_MEMORY)
    assert not [kernel for kernel in compiled if kernel["shared"] > SHARED_MEMORY[tuple(kernel["capability"])]]
    if not (TOOLS / "cuobjdump").exists():
        pytest.skip("this Triton came without cuobjdump, which counts registers that are spilled")
    assert not [kernel for kernel in compiled if kernel["stack"]]
    assert not [kernel for kernel in compiled if not 0 < kernel["registers"] <= REGISTERS]


# Of layers: input, activations, tokens, features, threshold, and whether the exact weight is at hand.
LAYERS_OF_FEW = [
    (torch.float16, int8(), 1, 4096, 6.0),
    (torch.bfloat16, int8(False), 32, 5140, 6.0),
    (torch.float32, int8(False, False), 16, 4096, 6.0),
    (torch.float32, int8(), 32, 5140, None),
]
LIGHT_LAYERS = [(torch.float16, int8(), 4096, 5140, 6.0), (torch.bfloat16, int8(), 4096, 4096, None)]
HEAVY_LAYERS = [(torch.bfloat16, int8(False), 4096, 5140, 6.0), (torch.float32, int8(False, False), 4096, 4096, 6.0)]
# Of products that train, for the tiles of light and heavy ones: the dtypes; leading dimensions, inner dimension and
# columns; and how many outliers, or none and a seed. Queries with keys, and probabilities with values.
LIGHT_PRODUCTS = [(torch.float16, torch.float16, (2, 3), 64, 512, 2, None)]
HEAVY_PRODUCTS = [
    (torch.bfloat16, torch.float32, (), 5140, 4096, 103, None),
    (torch.float32, torch.float32, (2, 3), 512, 128, 0, 2**40),
]
# Of states: dtype, features, and whether what is kept is of the same dtype, or bool, or nothing.
STATES = [(torch.float16, 4096, True), (torch.bfloat16, 5140, torch.bool), (torch.float32, 5140, None)]


def compile_launch(kernel: JITFunction, arguments: tuple, named: dict, capability: tuple[int, int]) -> tuple:
    """Compile as a launch would: what came out, and whether multiplications and additions become one."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend = make_backend(target)
    given = create_function_from_signature(kernel.signature, kernel.params, backend)(*arguments, **named)
    options, *source = kernel._pack_args(backend, given[2], *given)
    binary = triton.compile(ASTSource(kernel, *source), target=target, options=vars(options))
    return binary, options.enable_fp_fusion


def found_in(kernel: JITFunction, binary: object, fuses: bool, capability: tuple[int, int]) -> dict:
    """What is asserted of a kernel that was compiled for a capability."""
    registers, of_stack = usage(binary.asm["cubin"])
    return {
        "name": kernel.__name__,
        "capability": capability,
        "int8": bool(re.search(r"(wgmma\.mma_async|mma\.sync)\S*\.s8\.s8", binary.asm["ptx"])),
        "fuses": fuses,
        "shared": binary.metadata.shared,
        "stack": of_stack,
        "registers": registers * 32 * binary.metadata.num_warps,
    }


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of local memory, which is where registers are spilled to; 0 if unknown."""
    if not (TOOLS / "cuobjdump").exists():
        return 0, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    return int(re.search(r"REG:(\d+)", found).group(1)), int(re.search(r"STACK:(\d+)", found).group(1))


def launch_all(capability: tuple[int, int]) -> None:
    """Launch all that there is, on tensors without memory: layers and products in every tile, and states."""

    def layer_of(dtype, quantizer, tokens, features, threshold):
        x, exact = (torch.empty(rows, features, dtype=dtype, device="meta") for rows in (tokens, 4096))
        weight, bias = quantization.quantize(exact, quantizer), torch.empty(4096, dtype=dtype, device="meta")
        layer.linear(x, weight, bias, quantizer, threshold)
        if threshold is not None and tokens > tiles.FEW and dtype == torch.float32:
            layer.linear(x, weight, bias, quantizer, threshold, Exact(exact, quantizer))

    for one in LAYERS_OF_FEW:
        layer_of(*one)
    for light, layers, products in ((True, LIGHT_LAYERS, LIGHT_PRODUCTS), (False, HEAVY_LAYERS, HEAVY_PRODUCTS)):
        for tile in tiles.TILES.get((capability, light), tiles.TILES[(8, 0), light]):
            tiles.choose = lambda *_, tile=tile: tile
            for one in layers:
                layer_of(*one)
            for one, other, leading, k, n, count, seed in products:
                left = torch.empty(*leading, 4096, k, dtype=one, device="meta")
                right = torch.empty(*leading, k, n, dtype=other, device="meta").mT
                outliers = torch.empty(*leading, count, dtype=torch.int64, device="meta") if count else None
                product.product(left, right, outliers, None, seed)
            for dtype in (torch.float16, torch.bfloat16) if light else (torch.float32,):
                stacked = quantization.quantize_rows(torch.empty(64, 4096, 5140, dtype=dtype, device="meta"))
                rows, ends = torch.empty(4096, 5140, dtype=dtype, device="meta"), torch.empty(64, device="meta").long()
                grouped.grouped_linear(rows, ends, stacked, torch.empty(64, 4096, dtype=dtype, device="meta"))
    quantization.quantize(torch.empty(64, 40000, dtype=torch.bfloat16, device="meta"), int8())
    for name, dtype in zip(("fp8-e4m3 row", "nvfp4 block", "bfp6 group-16"), DTYPES, strict=True):
        formats.quantize(torch.empty(512, 4096, dtype=dtype, device="meta"), Quantizer(*name.split()))
    for dtype, features in zip(DTYPES, (64, 80, 128), strict=True):
        query, key = (torch.empty(1, heads, 512, features, dtype=dtype, device="meta") for heads in (8, 4))
        attention.attention_sums(query, key, 0.125)
        logits, target = torch.empty(512, 4096, dtype=dtype, device="meta"), torch.empty(512, 1, device="meta")
        losses.add(logits, 4096, target.long(), target.double(), target.double())
    for dtype, features, kept in STATES:
        x = torch.empty(512, features, dtype=dtype, device="meta")
        ids = torch.empty(512, dtype=torch.int64, device="meta")
        kept = kept and torch.empty_like(x, dtype=dtype if kept is True else kept)
        found = states.Found()
        of_role, of_stream = (
            states.State(x, ids, states.empty(table, features, x.device), kept, found)
            for table in (states.STATISTICS, states.RESIDUAL)
        )
        triton_states.add(of_role, 6.0)
        if kept is None or kept.dtype != torch.bool:
            triton_states.add_residual(of_stream, LIMITS, ids)


LAUNCHES: dict[str, tuple] = {}  # by what makes them differ: kernel, arguments, options, capability


def compile_named(launch: str) -> str:
    kernel, *_, capability = LAUNCHES[launch]
    return json.dumps(found_in(kernel, *compile_launch(*LAUNCHES[launch]), capability) | {"launch": launch})


def kind_of(value: object) -> object:
    """What tells arguments apart, of a tensor its dtype."""
    return tuple(map(kind_of, value)) if isinstance(value, tuple) else getattr(value, "dtype", value)


def compile_all() -> None:
    """Compile all that is launched for each capability, on all processors, and print what came out."""
    for capability in SHARED_MEMORY:
        JITFunction.run = lambda kernel, *args, grid, warmup, of=capability, **named: LAUNCHES.setdefault(
            str((kernel.__name__, kind_of(args), named, of)), (kernel, args, named, of)
        )
        launch_all(capability)
    with get_context("fork").Pool() as pool:  # so that torch and Triton are imported once
        for line in pool.imap_unordered(compile_named, LAUNCHES):
            print(line)


if __name__ == "__main__":
    compile_all()
