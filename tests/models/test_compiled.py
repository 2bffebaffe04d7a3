"""Compiled passes in a process: threads, processes, caches, and calls that somebody watches."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from outlier_kernels import dispatch, reference
from outlier_kernels.cpu import codes, compiled
from outlier_kernels.formats import Quantizer
from torch.fx.experimental.proxy_tensor import make_fx

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> str:
    """What a program of its own prints."""
    places = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": places} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def layer(scheme: str = "int8 column absmax") -> reference.Quantized:
    return reference.quantize(torch.randn(5, 16), Quantizer.read(scheme))


AT_ONCE = """
    import threading
    from concurrent.futures import ThreadPoolExecutor
    import torch
    from outlier_kernels import dispatch, reference
    from outlier_kernels.formats import Quantizer

    torch.manual_seed(0)
    x, weight = torch.randn(300, 700) * 3, torch.randn(900, 700)
    quantizers = Quantizer("int8", "column"), Quantizer("int8", "column", False)
    given = [(reference.quantize(weight, one), reference.Exact(weight, one)) for one in quantizers]
    layers = [(one, exact) for one, exact in given] + [(dispatch.prepare(given[0][0]), None)]
    barrier = threading.Barrier(8)

    def work(_number):
        barrier.wait()
        return [
            dispatch.linear(x, one, None, Quantizer("int8", "row"), threshold, exact=exact)
            for _ in range(5) for one, exact in layers for threshold in (None, 9.0)
        ]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(work, range(8))
    print(len(others), all(all(map(torch.equal, first, other)) for other in others))
"""


@pytest.mark.nightly("kernels/outlier_kernels/cpu/")
@pytest.mark.parametrize("threads", ["1", "4"])
def test_eight_threads_at_once(threads):
    """Also the first time, when all of them find nothing compiled in their process."""
    assert python(AT_ONCE, OMP_NUM_THREADS=threads).split() == ["7", "True"]


def test_without_openmp_one_thread_does_the_work(monkeypatch, lacking, tmp_path):
    (tmp_path / "lib").mkdir()
    for library in (None, b"no library", Path(sys.modules["_ctypes"].__file__).read_bytes()):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
            if library:
                (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(library)
            assert compiled._openmp.__wrapped__() is None
    lacking("outlier_kernels.cpu.compiled._openmp")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    matrix = torch.randn(96, 2048)  # work for several threads
    low, high = codes.extremes(matrix)
    assert torch.equal(low, matrix.amin(0))
    assert torch.equal(high, matrix.amax(0))


@pytest.mark.nightly("kernels/outlier_kernels/cpu/")
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes(way, tmp_path):
    """Torch's own operators need to be on one thread in a fork of a process that used several."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(f"""
    import multiprocessing
    import torch
    from outlier_kernels import dispatch, reference
    from outlier_kernels.formats import ROWS

    def work(threads):
        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(0)
        return dispatch.linear(torch.randn(200, 600), reference.quantize(torch.randn(700, 600), ROWS), threshold=4.0)

    def child(queue):
        queue.put(work({1 if way == "fork" else None}).double().sum().item())

    if __name__ == "__main__":
        expected = work(None).double().sum().item()
        queue = multiprocessing.get_context("{way}").Queue()
        process = multiprocessing.get_context("{way}").Process(target=child, args=(queue,))
        process.start()
        print(queue.get(timeout=120) == expected)
        process.join(60)
        print(process.exitcode)
    """)
    )
    said = python(
        f"import runpy; runpy.run_path({str(tmp_path / 'program.py')!r}, run_name='__main__')", OMP_NUM_THREADS="2"
    )
    assert said.split() == ["True", "0"]


@pytest.fixture
def package(tmp_path):
    """A copy of the kernels, of which nothing is compiled."""
    ignore = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT / "kernels" / "outlier_kernels", tmp_path / "outlier_kernels", ignore=ignore)


@pytest.mark.nightly("kernels/outlier_kernels/cpu/")
def test_a_number_of_another_file_is_compiled_anew(package):
    """Numba compiles again where the file of the passes changed; the rounds of Philox these take from another one."""
    program = """
    import torch
    from outlier_kernels import reference_products
    from outlier_kernels.cpu import products
    matrices = torch.linspace(-1, 1, 400).view(1, 20, 20)
    codes = products.quantize_rows(matrices, seed=3)[0]
    print(torch.equal(codes, reference_products.quantize_rows(matrices, seed=3).codes), codes.double().std().item())
    """
    first = python(program, PYTHONPATH=str(package.parent)).split()
    other = package / "reference_products.py"
    other.write_text(other.read_text().replace(", 10, 0xFFFFFFFF", ", 2, 0xFFFFFFFF"))
    second = python(program, PYTHONPATH=str(package.parent)).split()
    assert (first[0], second[0]) == ("True", "True")
    assert first[1] != second[1], "with fewer rounds other values are rounded up"


@pytest.mark.nightly("kernels/outlier_kernels/cpu/")
def test_a_cache_that_cannot_be_written(package, tmp_path):
    """Neither beside the code nor where the user's caches are: there it compiles in each process."""
    (package / "cpu" / "__pycache__").touch()  # files in the places of the folders
    (tmp_path / "home").touch()
    homes = {name: str(tmp_path / "home") for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    program = """
    import torch
    from outlier_kernels.cpu import codes, compiled
    print(compiled.__file__)
    matrix = torch.randn(5, 7)
    assert torch.equal(codes.extremes(matrix)[0], matrix.amin(0))
    """
    assert python(program, PYTHONPATH=str(tmp_path), **homes).strip() == str(package / "cpu" / "compiled.py")
    assert (tmp_path / "home").stat().st_size == 0


def test_tensors_without_memory_of_the_cpu():
    with pytest.raises(ValueError, match="a pass reads and writes memory of the CPU, and meta"):
        codes.extremes(torch.empty(3, 4, device="meta"))
    assert codes.outlier_features(torch.empty(0, 4), 6.0).tolist() == []


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("prepared", [False, True])
def test_calls_that_somebody_watches(prepared):
    """A trace holds the layer as one operator, which computes what the layer did, also of other inputs."""
    weight, x, other = layer(), torch.randn(3, 16), torch.randn(3, 16)
    weight = dispatch.prepare(weight) if prepared else weight
    call = lambda hidden_states: dispatch.linear(hidden_states, weight, threshold=1.0)  # noqa: E731
    expected = call(other)
    assert torch.equal(make_fx(call)(x)(other), expected)
    if not prepared:  # whose opaque layout no such trace can hold
        assert torch.equal(torch.jit.trace(call, (x,))(other), expected)
    assert torch.equal(torch.func.vmap(call)(torch.stack([x, other]))[1], expected)
    assert torch.equal(torch.func.functionalize(call)(other), expected)
    with torch.inference_mode():
        assert torch.equal(call(other.clone()), expected)


@pytest.mark.parametrize("prepared", [False, True])
def test_defaults_of_the_caller(prepared):
    """What new tensors are where nobody says it must not reach the passes, which read and write addresses."""
    weight, x = layer(), torch.randn(300, 16).bfloat16()
    weight = dispatch.prepare(weight) if prepared else weight
    expected = [dispatch.linear(x, weight, threshold=threshold) for threshold in (None, 1.0)]
    before = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                found = [dispatch.linear(x, weight, threshold=threshold) for threshold in (None, 1.0)]
        finally:
            torch.set_default_dtype(before)
        assert all(map(torch.equal, found, expected))
