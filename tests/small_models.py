"""Small random models of every architecture, their tokens and weights."""

import json
import shutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from outlier_kernels.cpu import has_int8_units
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from outliers import SCHEMES, Scheme, Trace, Transform, load_text, load_tokenizer, run
from outliers.commands.trace import Tracing
from outliers.metrics.attention import attention_results
from outliers.metrics.records import Top1
from outliers.models.anatomy.stack_views import stack_view
from outliers.models.names import POCKET
from outliers.models.variant import AS_IT_IS
from outliers.models.weight_files import WEIGHTS
from outliers.runs.loaded import measure_loaded
from outliers.variants.ablated import Ablated, Intervention
from tests.conftest import CONFIGS, VARIANTS

needs_int8_units = pytest.mark.skipif(
    not has_int8_units(), reason="needs int8 units (AVX-512 VNNI); without them other code runs"
)


def make_model(case: str, vocabulary: int = 100):
    """A random model with weights large enough that its layers matter."""
    model_type, fields = (CONFIGS | VARIANTS)[case]
    torch.manual_seed(0)
    ids = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **ids, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def records_of(cells) -> list[dict]:
    """The values of cells of a model in memory."""
    cells = list(cells)
    return measure_loaded(cells[0].subject, cells)


def top1_softmax(model, blocks, interventions=None, variant=AS_IT_IS) -> list[float]:
    """The mean top-1 softmax probability under each intervention, in one layer at a time."""
    ablations = [
        change if isinstance(change, Ablated) else Ablated(change) for change in interventions or [Intervention(())]
    ]
    results = attention_results(model, blocks, [(ablated, [Top1().computation]) for ablated in ablations], variant)
    return [by_view[stack_view(model, None).name][1] for (by_view,) in results]


def names_of(experiment) -> list[str]:
    """The names of the schemes of an experiment."""
    return [getattr(scheme, "name", scheme) for scheme in experiment.schemes]


def make_tokenizer(size: int = 100):
    """A tokenizer of as many tokens: parts of words with and without a blank, delimiters, and the end of a text."""
    words = [" the", "The", ",", "\n", " a", "ing", "7", "'s", " (", "é"]
    words += [f"{' ' * (number % 2)}w{number}" for number in range(size - len(words) - 1)]
    vocabulary = {word: number for number, word in enumerate([*words, "</s>"])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "</s>"))
    fast.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")


def broken_weights(folder: Path) -> str:
    """A pocket model whose file of weights is empty, so that nothing can load it."""
    shutil.copytree(POCKET / "gpt2-0.1m", folder)
    (folder / WEIGHTS).write_bytes(b"")
    return str(folder)


def meanwhile(change: Callable[[], object]) -> Scheme:
    """A scheme of one's own that does something whenever it is fitted to a weight, which it leaves as it is."""

    def fit(weight: torch.Tensor) -> torch.Tensor:
        change()
        return weight.new_tensor(1.0)

    same = Transform(fit, lambda x, _one: x, lambda weight, _one: weight, name="meanwhile")
    return replace(SCHEMES["absmax"], name="mine", remedies=[same])


def sample_blocks(model: str, block: int, blocks: int) -> torch.Tensor:
    """The first blocks of the embedded text by the tokenizer of a model."""
    return load_text("sample", load_tokenizer(model), block, blocks)


@contextmanager
def inputs_of(modules: dict[Hashable, torch.nn.Module]) -> Iterator[dict[Hashable, list[torch.Tensor]]]:
    """What modules read meanwhile, each by its name, as plain hooks of torch see it."""
    seen: dict[Hashable, list] = {name: [] for name in modules}
    with ExitStack() as stack:
        for name, module in modules.items():
            hook = lambda _module, inputs, name=name: seen[name].append(inputs[0].detach())  # noqa: E731
            stack.enter_context(module.register_forward_pre_hook(hook))
        yield seen


LENGTHS = (24, 7, 2)  # of sequences


def padded(blocks: torch.Tensor, side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The first tokens of blocks (3, 24) as sequences (T,), and as a tokenizer pads them: ids and mask (3, 24)."""
    sequences = [ids[:length] for ids, length in zip(blocks, LENGTHS, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=99, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(one) for one in sequences], batch_first=True, padding_side=side
    )
    return sequences, ids, mask


def alter_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of the model in a folder, which is returned."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def alter_config(folder: Path, **fields) -> Path:
    """Give the configuration of the model in a folder, which is returned, other fields."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def trace_model(spec: Tracing, out: Path | None = None, force: bool = False) -> tuple[Trace, list[dict]]:
    """The trace of a model, as a run keeps it, and its rows."""
    rows = run(spec, out, force)
    return Trace.load((Path(out) if out else spec.folder) / "trace"), rows
