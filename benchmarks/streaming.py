"""What streaming costs: an OPT-6.7B-shaped checkpoint that is traced and swept without ever being in memory.

    python benchmarks/streaming.py

Writes the checkpoint once (random weights, planted outliers, float16, 13 GB in shards of two layers; `--layers` makes
it smaller), reads its files once for comparison, then traces 4 blocks of 512 tokens and sweeps three schemes over them,
in bfloat16 and in float32. Kept: seconds in all, of computing, and of reading the files alone; gigabytes that were
read; the peak of resident memory, which is of a process that did nothing else; and how large the weights are, which a
resident model would hold at once.
"""

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from kept import keep, parser
from safetensors.torch import save_file

from outliers.models.weight_files import INDEX

BLOCKS, TOKENS = 4, 512
SCHEMES = ("fp32", "absmax-vector", "llm.int8")
PLANTED, FACTOR = (100, 2000, 4000), 20.0
SHAPE = {
    "hidden_size": 4096,
    "ffn_dim": 16384,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 4096,
    "num_hidden_layers": 32,
}
LAYERS_A_SHARD = 2


def write_checkpoint(folder: Path, layers: int) -> None:
    """An OPT of that many layers, shard by shard."""
    from transformers import OPTConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = OPTConfig(**SHAPE | {"num_hidden_layers": layers})
    width, wide = config.hidden_size, config.ffn_dim
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape)).half()

    def layer(number: int) -> dict[str, torch.Tensor]:
        prefix, tensors = f"model.decoder.layers.{number}.", {}
        shapes = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
        shapes |= {"fc1": (wide, width), "fc2": (width, wide)}
        for name, shape in shapes.items():
            tensors |= {f"{prefix}{name}.weight": random(*shape), f"{prefix}{name}.bias": random(shape[0])}
        readers = {"self_attn_layer_norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
        for norm, projections in (readers | {"final_layer_norm": ("fc1",)}).items():
            weight = torch.ones(width, dtype=torch.float16)
            weight[list(PLANTED)] = FACTOR
            tensors |= {f"{prefix}{norm}.weight": weight, f"{prefix}{norm}.bias": torch.zeros_like(weight)}
            for projection in projections:
                tensors[f"{prefix}{projection}.weight"][:, PLANTED] /= FACTOR
        return tensors

    rest = {
        "model.decoder.embed_tokens.weight": random(config.vocab_size, width),
        "model.decoder.embed_positions.weight": random(config.max_position_embeddings + 2, width),
        "model.decoder.final_layer_norm.weight": torch.ones(width, dtype=torch.float16),
        "model.decoder.final_layer_norm.bias": torch.zeros(width, dtype=torch.float16),
    }
    listed = {}

    def write(shard: dict[str, torch.Tensor], name: str) -> None:
        save_file(shard, folder / name, {"format": "pt"})
        listed.update(dict.fromkeys(shard, name))

    write(rest, "model-00.safetensors")
    for first in range(0, layers, LAYERS_A_SHARD):
        shard = {}
        for number in range(first, min(first + LAYERS_A_SHARD, layers)):
            shard |= layer(number)
        write(shard, f"model-{1 + first // LAYERS_A_SHARD:02d}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    config.save_pretrained(folder)  # last: a folder with it is whole


def forget(folder: Path) -> None:
    """Let the system drop the files from its cache, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(folder: Path) -> float:
    """Seconds to read all files once, from the disk."""
    forget(folder)
    start, buffer = time.perf_counter(), bytearray(16 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


@contextmanager
def computing():
    """Seconds that layers spend on hidden states, hooks included."""
    from outliers.models.stream import Once

    spent, original = [0.0], Once.forward

    def timed(self, *inputs, **keywords):
        start = time.perf_counter()
        output = original(self, *inputs, **keywords)
        spent[0] += time.perf_counter() - start
        return output

    Once.forward = timed
    try:
        yield spent
    finally:
        Once.forward = original


def trace(folder: Path, dtype: str) -> dict:
    """Trace the checkpoint."""
    from outliers.models.stream import stream_model
    from outliers.tracing.trace import trace as trace_blocks

    return _measured(folder, dtype, stream_model, lambda model, blocks: _check(trace_blocks(model, blocks)))


def sweep(folder: Path, dtype: str) -> dict:
    """Measure perplexity under three schemes, with each layer read once."""
    from outliers.metrics.perplexity import perplexities
    from outliers.models.stream import stream_model
    from outliers.quantization.schemes import get_scheme
    from outliers.variants.quantized import Quantized

    variants = [Quantized(get_scheme(name)) for name in SCHEMES]
    return _measured(folder, dtype, stream_model, lambda model, blocks: perplexities(model, blocks, variants))


def size_of_weights(folder: Path, dtype: str) -> float:
    """Gigabytes of all weights in a dtype."""
    from outliers.models.load import DTYPES, load_config
    from outliers.runs.forecast import shape_of

    return shape_of(load_config(str(folder))).weights * DTYPES[dtype].itemsize / 1e9


def _check(found) -> list[int]:
    return sorted(found.outlier_features()["feature"].tolist())


def _measured(folder: Path, dtype: str, load: Callable, run: Callable) -> dict:
    forget(folder)
    start = time.perf_counter()
    model = load(str(folder), dtype)
    blocks = torch.randint(4, model.config.vocab_size, (BLOCKS, TOKENS), generator=torch.Generator().manual_seed(0))
    with computing() as spent:
        result = run(model, blocks)
    return {
        "result": result,
        "seconds": time.perf_counter() - start,
        "computing": spent[0],
        "read_GB": model.stream.bytes_read / 1e9,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


MEASUREMENTS = {"trace": trace, f"sweep of {', '.join(SCHEMES)}": sweep}
COLUMNS = {
    "": "{what}",
    "seconds": "{seconds:.0f}",
    "of which computing": "{computing:.0f}",
    "reading the files alone, s": "{reading:.0f}",
    "GB read": "{read_GB:.1f}",
    "weights, GB": "{weights_GB:.1f}",
    "peak of resident memory, GB": "{peak_GB:.1f}",
}


def main() -> None:
    """Write the checkpoint if need be, measure, and keep the table."""
    options = parser(__doc__)
    options.add_argument("--work", type=Path, default=Path("build/streaming"), help="where the checkpoint is")
    options.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the checkpoint")
    arguments = options.parse_args()
    folder = arguments.work / f"opt-{arguments.layers}-layers"
    rows = []
    # Each in a process of its own: a peak of memory is of all that a process ever did.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        if not (folder / "config.json").exists():
            pool.apply(write_checkpoint, (folder, arguments.layers))
        reading = pool.apply(read_files, (folder,))
        for name, measure in MEASUREMENTS.items():
            for dtype in ("bfloat16", "float32"):
                weights = {"reading": reading, "weights_GB": pool.apply(size_of_weights, (folder, dtype))}
                rows.append({"what": f"{name}, {dtype}", **pool.apply(measure, (folder, dtype)), **weights})
                print(rows[-1], flush=True)
    keep("streaming", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
