"""How fast the int8 layers of other libraries are beside ours, and models on them.

    pip install "outliers[peers,rivals,torchao]"
    python benchmarks/rivals.py                         # one linear layer, of seven shapes
    python benchmarks/rivals.py --model smollm2-135m

Each rival has a process of its own, in which it, our vector-wise layer and our LLM.int8() are timed in turn, several
rounds. A turn of a layer, with three outlier features, is one call that is not timed, in which the threads of the
library before come to rest, and the fastest of the next two. A turn of a model is the generation of tokens after a
prompt, after one that is not timed. Kept are the smallest times, for machines that others use as well, and how many
times as long as ours the rival takes by those; of a model also the size of its saved state, and its perplexity on some
blocks of the sample text. A rival that is not installed is left out. `--rival` measures one alone; the rows of others,
that were kept before, stay as they are.
"""

import io
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from kept import keep, kept_rows, parser
from rival_layers import OURS, RIVALS, Rival
from torch import nn

from outliers import load_model, load_tokenizer, perplexity
from outliers.metrics.latency.measure import latency, timed
from outliers.metrics.linear_layer.measure import layer_and_inputs
from outliers.quantization.peers import with_layers
from outliers.subjects.provenance import environment
from outliers.text.blocks import load_text

SHAPES = {  # tokens, features, outputs
    " × ".join(map(str, shape)): shape
    for shape in (
        (512, 768, 768),
        (512, 768, 3072),
        (512, 4096, 4096),
        (2048, 1024, 4096),
        (2048, 4096, 4096),
        (16, 4096, 4096),
        (1, 4096, 4096),
    )
}
CPU, ROUNDS, CALLS, PAUSE = torch.device("cpu"), 5, 2, 0.005  # seconds
PROMPT, TOKENS, BLOCKS, GENERATIONS = 512, 8, 2, 3
OF_LAYERS = tuple(SHAPES)
OF_MODELS = ("prefill", "a token")
RATIOS = "{{ratios[{0}][vector-wise]:.2f}} / {{ratios[{0}][LLM.int8()]:.2f}}"
WHAT = {"rival": "{rival} {version}", "computes": "{computes}", "dtype": "{dtype}"}


def columns(times: tuple[str, ...], model: str | None) -> dict[str, str]:
    """The columns of a table, as `keep` takes them."""
    beside = {time: RATIOS.format(time) for time in times}
    if not model:
        return WHAT | beside
    spent = {f"{time}, ms": f"{{milliseconds[{time}][rival]:.0f}}" for time in times}
    return WHAT | spent | beside | {"saved, MB": "{megabytes:.0f}", "perplexity": "{perplexity:.2f}"}


@torch.inference_mode()
def layers_in_turn(layers: dict[str, Callable], x: torch.Tensor, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each, round by round."""
    times, start = {way: [] for way in layers}, time.perf_counter()
    while time.perf_counter() < start + seconds or min(map(len, times.values())) < ROUNDS:
        for way, layer in layers.items():
            time.sleep(PAUSE)
            layer(x)
            times[way].append(min(timed(partial(layer, x), CPU)[0] for _ in range(CALLS)))
    return times


def compared(times: dict[str, dict[str, list[float]]]) -> dict:
    """What a row says of times, by what is timed and by way, round by round."""
    least = {what: {way: min(values) for way, values in ways.items()} for what, ways in times.items()}
    ratios = {what: {own: ways["rival"] / ways[own] for own in OURS} for what, ways in least.items()}
    return {"milliseconds": least, "ratios": ratios}


def with_ours(rival: Rival) -> dict[str, Rival]:
    """The ways that are timed in turn."""
    return {"rival": rival} | OURS


def of_layers(name: str, dtype: torch.dtype, seconds: float) -> dict:
    """What a row says of layers, measured in this process."""
    times = {}
    for label, shape in SHAPES.items():
        exact, x = (one.to(dtype) for one in layer_and_inputs(*shape, CPU))
        layers = {way: one.layer(exact) for way, one in with_ours(RIVALS[name]).items()}
        if RIVALS[name].compiled:
            layers["rival"] = torch.compile(layers["rival"])
        times[label] = layers_in_turn(layers, x, seconds)
    return compared(times)


def of_model(name: str, dtype: torch.dtype, model: str) -> dict:
    """What a row says of a model, measured in this process."""
    exact, blocks = load_model(model, name_of(dtype)), load_text("sample", load_tokenizer(model), PROMPT, BLOCKS)
    models = {way: with_layers(exact, one.layer) for way, one in with_ours((OURS | RIVALS)[name]).items()}
    times = {what: {way: [] for way in models} for what in OF_MODELS}
    for _ in range(GENERATIONS):
        for way, one in models.items():
            found = latency(one, blocks[:1], TOKENS, repeats=1)
            times["prefill"][way] += found.prefills
            times["a token"][way].append(statistics.median(found.per_token))
    made = models["rival"]
    return compared(times) | {"megabytes": saved(made) / 1e6, "perplexity": perplexity(made, blocks)}


def saved(model: nn.Module) -> int:
    """Bytes of its state in a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def name_of(dtype: torch.dtype) -> str:
    """A dtype as options have it."""
    return str(dtype).removeprefix("torch.")


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Measure each rival in a process of its own, and keep the table."""
    options = parser(__doc__)
    options.add_argument("--rival", choices=RIVALS, help="to measure alone")
    options.add_argument("--model", help="a model to run on the layers")
    options.add_argument("--seconds", type=float, default=2.0, help="how long a layer is timed at least")
    arguments = options.parse_args()
    file, model = "_".join(["rivals", *filter(None, [arguments.model])]), arguments.model
    everyone = {name: one for name, one in (OURS | RIVALS).items() if one.in_models} if model else RIVALS
    rows = {(row["rival"], row["dtype"]): row for row in kept_rows(file, arguments.out)}
    for name, rival in everyone.items():
        if arguments.rival not in (None, name):
            continue
        if not (found := installed(rival.package)):
            print(f"{name}: {rival.package} is not installed")
            continue
        about = {"rival": name, "version": found, "computes": rival.computes, "alike": rival.alike}
        for dtype in rival.dtypes[:1] if model else rival.dtypes:
            measured = (of_model, (name, dtype, model)) if model else (of_layers, (name, dtype, arguments.seconds))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                numbers = pool.apply(*measured)
            kind = name_of(dtype)
            rows[name, kind] = about | {"dtype": kind, "code": environment("cpu")["code"]} | numbers
            ordered = sorted(rows.values(), key=lambda row: list(everyone).index(row["rival"]))
            keep(file, ordered, columns(OF_MODELS if model else OF_LAYERS, model), arguments.out)


if __name__ == "__main__":
    main()
