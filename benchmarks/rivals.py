"""How fast the int8 layers of other libraries are beside ours, and models on them.

    pip install "outliers[peers,rivals,torchao]"
    python benchmarks/rivals.py                         # one linear layer, of seven shapes
    python benchmarks/rivals.py --model smollm2-135m

The rival, our vector-wise layer and our LLM.int8() have a process each, in which nothing else computes, and take turns,
several rounds; who has no turn is stopped, for the threads of many libraries stay awake for a while after a call. A
turn of a layer, with three outlier features, is the fastest of at least three calls, in 20 milliseconds at least, after
which caches and threads are warm. A turn of a model is the generation of tokens after a prompt, after one that is not
timed. Kept are the smallest times, for machines that others use as well, and how many times as long as ours the rival
takes by those; of a model also the size of its saved state, and its perplexity on some blocks of the sample text. A
rival that is not installed is left out. `--rival` measures one alone; the rows of others, that were kept before, stay
as they are.
"""

import io
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from kept import keep, kept_rows, parser
from rival_layers import OURS, RIVALS, Rival
from torch import nn

from outliers import load_model, load_tokenizer, perplexity
from outliers.metrics.latency import latency, timed
from outliers.metrics.linear_layer import layer_and_inputs
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
CPU, ROUNDS, CALLS, TURN = torch.device("cpu"), 5, 3, 0.02  # seconds of a turn, at least
HEAP = 31 << 20  # bytes; glibc then keeps what was freed, as in a process that has loaded a model
PROMPT, TOKENS, BLOCKS, GENERATIONS = 512, 8, 2, 6
OF_LAYERS = tuple(SHAPES)
OF_MODELS = ("prefill", "a token")
RATIOS = "{{ratios[{0}][vector-wise]:.2f}} / {{ratios[{0}][LLM.int8()]:.2f}}"
WHAT = {"rival": "{rival} {version}", "computes": "{computes}", "dtype": "{dtype}"}


def columns(times: tuple[str, ...], model: str | None) -> dict[str, str]:
    """Return the columns of a table, for `keep`."""
    beside = {time: RATIOS.format(time) for time in times}
    if not model:
        return WHAT | beside
    spent = {f"{time}, ms": f"{{milliseconds[{time}][rival]:.0f}}" for time in times}
    return WHAT | spent | beside | {"saved, MB": "{megabytes:.0f}", "perplexity": "{perplexity:.2f}"}


class Player:
    """A process that measures, and is stopped outside of its turns.

    make: a function of this module, which the process calls with the arguments; it returns the function that measures a
    thing.
    """

    def __init__(self, make: Callable[..., Callable], *arguments: object):
        spawning = multiprocessing.get_context("spawn")
        self.connection, there = spawning.Pipe()
        self.process = spawning.Process(target=_play, args=(there, make, arguments), daemon=True)
        self.process.start()
        there.close()  # so that a process that has failed is seen

    def turn(self, thing: str) -> object:
        """Return the measurement of a thing."""
        os.kill(self.process.pid, signal.SIGCONT)
        self.connection.send(thing)
        measured = self.connection.recv()
        os.kill(self.process.pid, signal.SIGSTOP)
        return measured

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _play(connection, make: Callable[..., Callable], arguments: tuple) -> None:
    torch.empty(HEAP, dtype=torch.uint8)
    with torch.inference_mode():
        measure = make(*arguments)
        while True:
            connection.send(measure(connection.recv()))


def in_turn(players: Mapping[str, Player], thing: str, seconds: float, rounds: int) -> dict[str, list]:
    """Return the measurements of a thing by each player, round by round, for a least number of rounds and seconds."""
    times, start = {way: [] for way in players}, time.perf_counter()
    while time.perf_counter() < start + seconds or min(map(len, times.values())) < rounds:
        for way, player in players.items():
            times[way].append(player.turn(thing))
    return times


@contextmanager
def playing(make: Callable[..., Callable], name: str, *arguments: object) -> Iterator[dict[str, Player]]:
    """Provide the players of a rival and of ours, and end them afterwards, because stopped ones would outlive an
    error."""
    players = {way: Player(make, name, way, *arguments) for way in with_ours(name)}
    try:
        yield players
    finally:
        for player in players.values():
            player.end()


def with_ours(name: str) -> dict[str, Rival]:
    """Return the layers that are timed in turn."""
    return {"rival": (OURS | RIVALS)[name]} | OURS


def of_layers(name: str, dtype: torch.dtype, seconds: float) -> dict:
    """Return the fields of a row on layers."""
    with playing(layer_timer, name, dtype) as players:
        return compared({label: in_turn(players, label, seconds, ROUNDS) for label in SHAPES})


def layer_timer(name: str, way: str, dtype: torch.dtype) -> Callable[[str], float]:
    """Return a function from the label of a shape to the milliseconds of a layer."""
    one, layers = with_ours(name)[way], {}

    def milliseconds(label: str) -> float:
        if label not in layers:
            layers.clear()
            exact, x = (part.to(dtype) for part in layer_and_inputs(*SHAPES[label], CPU))
            layer = one.layer(exact)
            layers[label] = partial(torch.compile(layer) if one.compiled else layer, x)
        times, start = [], time.perf_counter()
        while len(times) < CALLS or time.perf_counter() < start + TURN:
            times.append(timed(layers[label], CPU)[0])
        return min(times)

    return milliseconds


def of_model(name: str, dtype: torch.dtype, model: str) -> dict:
    """Return the fields of a row on a model."""
    with playing(model_timer, name, dtype, model) as players:
        facts, rounds = players["rival"].turn("facts"), in_turn(players, "times", 0, GENERATIONS)
    times = {what: {way: [found[what] for found in of_way] for way, of_way in rounds.items()} for what in OF_MODELS}
    return compared(times) | facts


def model_timer(name: str, way: str, dtype: torch.dtype, model: str) -> Callable[[str], dict[str, float]]:
    """Return a function from "times" to milliseconds by what is timed, and from "facts" to the other fields of a
    row."""
    exact, blocks = load_model(model, name_of(dtype)), load_text("sample", load_tokenizer(model), PROMPT, BLOCKS)
    changed = with_layers(exact, with_ours(name)[way].layer)

    def measured(thing: str) -> dict[str, float]:
        if thing == "facts":
            return {"megabytes": saved(changed) / 1e6, "perplexity": perplexity(changed, blocks)}
        found = latency(changed, blocks[:1], TOKENS, repeats=1)
        return {"prefill": min(found.prefills), "a token": statistics.median(found.per_token)}

    return measured


def compared(times: dict[str, dict[str, list[float]]]) -> dict:
    """Return the fields of a row from times by what is timed and by way, round by round."""
    least = {what: {way: min(values) for way, values in ways.items()} for what, ways in times.items()}
    ratios = {what: {own: ways["rival"] / ways[own] for own in OURS} for what, ways in least.items()}
    return {"milliseconds": least, "ratios": ratios}


def saved(model: nn.Module) -> int:
    """Return the bytes of a model's state in a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
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
            numbers = of_model(name, dtype, model) if model else of_layers(name, dtype, arguments.seconds)
            kind = name_of(dtype)
            rows[name, kind] = about | {"dtype": kind, "code": environment("cpu")["code"]} | numbers
            ordered = sorted(rows.values(), key=lambda row: list(everyone).index(row["rival"]))
            keep(file, ordered, columns(OF_MODELS if model else OF_LAYERS, model), arguments.out)


if __name__ == "__main__":
    main()
