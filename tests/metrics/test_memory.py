"""Memory from configurations: against published sizes, real models, torch's own profiler, and the paper's Table 3."""

import copy
import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.quantizers.base import HfQuantizer

from outliers import UserError, quantize, run
from outliers.commands.memory import Memory
from outliers.config.files import make_experiment, read_experiment
from outliers.metrics.memory import GIB, Footprint, Storages, fits, measure_footprint, measure_pass, prompt
from outliers.models.load import find_config
from outliers.models.names import known_configs
from outliers.paper.artefacts import ARTEFACTS
from outliers.views.memory import largest, memory_section
from tests.conftest import CONFIGS, slow_but
from tests.subjects.test_families import VISION as PICTURES
from tests.subjects.test_vision import BEFORE
from tests.typed import call

PARAMETERS = {  # by the model cards, but for OPT's and GPT-2's: as their published weights count
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-1b1": 1_065_314_304,
    "bigscience/bloom-1b7": 1_722_408_960,
    "bigscience/bloom-3b": 3_002_557_440,
    "bigscience/bloom-7b1": 7_069_016_064,
    "bigscience/bloom": 176_247_271_424,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-3b": 2_851_598_336,
    "google-t5/t5-11b": 11_307_321_344,
}
ABOUT = {  # by their names; BERT's and ViT's by their papers
    "google-bert/bert-base-uncased": 110e6,
    "google-bert/bert-large-uncased": 340e6,
    "google/vit-base-patch16-224": 86e6,
    "google/vit-large-patch16-224": 307e6,
    "facebook/opt-66b": 66e9,
    "facebook/opt-175b": 175e9,
    "KoboldAI/fairseq-dense-125M": 125e6,
    "KoboldAI/fairseq-dense-355M": 355e6,
    "KoboldAI/fairseq-dense-1.3B": 1.3e9,
    "KoboldAI/fairseq-dense-2.7B": 2.7e9,
    "KoboldAI/fairseq-dense-6.7B": 6.7e9,
    "KoboldAI/fairseq-dense-13B": 13e9,
}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 100}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VIT = {**BERT, "image_size": 16, "patch_size": 4}
SMALL = {**CONFIGS, "t5": ("t5", T5), "bert": ("bert", BERT), "vit": ("vit", VIT)}
KINDS = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}


def small_config(case: str):
    """One of the small architectures of all tests, or a small T5, BERT or ViT."""
    model_type, fields = SMALL[case]
    return AutoConfig.for_model(model_type, **{"vocab_size": 100, "pad_token_id": None, **fields})


def small_model(case: str, dtype: torch.dtype):
    """A real model on the CPU."""
    return KINDS.get(case, AutoModelForCausalLM).from_config(small_config(case), dtype=dtype).eval()


def nbytes(model) -> int:
    """Bytes of all tensors that a real model holds."""
    return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


@pytest.mark.parametrize("case", [*slow_but(CONFIGS), *KINDS])
def test_weights_are_the_bytes_of_real_models(case):
    model = small_model(case, torch.bfloat16)
    found = measure_footprint(model.config, 16)
    assert found.weights(16) == nbytes(model)
    assert found.weights(8) == nbytes(quantize(model, "llm.int8", keep="int8"))
    assert found.parameters == model.num_parameters()


@pytest.mark.parametrize("kind", PICTURES)
def test_places_of_a_picture(kind):
    found = measure_footprint(copy.deepcopy(PICTURES[kind]), 2)
    model = AutoModelForImageClassification.from_config(copy.deepcopy(PICTURES[kind]), dtype=torch.bfloat16)
    assert (found.weights(16), found.context) == (nbytes(model), len(BEFORE[kind]) + 4 * 4)


def test_what_transformers_keeps_in_float32(tmp_path):
    small_model("t5", torch.float32).save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16)
    found = measure_footprint(model.config, 16)
    assert found.loaded[16] == nbytes(model) == found.weights(16) + 2 * 4 * 32 * 64
    assert "wo" in HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    assert found.loaded[8] - found.weights(8) == 4 * (3 * 32 * 64 - 4 * 32)
    others = measure_footprint(small_config("bert"), 16)
    assert others.loaded == {bits: others.weights(bits) for bits in (16, 8)}


@pytest.mark.parametrize("case", SMALL)
def test_cache_follows_the_formula(case):
    config = small_config(case)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = 1 if case == "falcon" else heads  # multi-query attention
    features = getattr(config, "head_dim", None) or 8
    # keys and values, layers, heads, features of a head, context, batch, bytes
    size = 2 * 2 * heads * features * 24 * 3 * 2
    windows = getattr(config, "layer_types", None) or []
    size += 8 * windows.count("sliding_attention")  # each counts the tokens that it has seen
    size = 0 if case in ("bert", "vit") else size
    assert measure_footprint(config, 24, batch=3).cache == size


def test_context_is_at_most_the_models_own():
    longest, longer = (measure_footprint(small_config("gpt2"), context) for context in (64, 10**6))
    assert longer == longest
    assert longer.context == 64
    assert measure_footprint(small_config("bloom"), 65).context == 65


def test_peak_of_a_toy():
    def toy(x):
        a = torch.mm(x, weight)  # 256 bytes come
        b = a.relu()  # 256: 512
        del a  # 256
        c = torch.mm(b, weight.T)  # 128: 384
        d = torch.cat([b, b.view(16, 4).reshape(4, 16)], 1)  # 512, and no copy: 896
        del b, d  # 128
        return c.add_(1), torch.empty(100, dtype=torch.uint8, device=c.device)  # 228

    for device in ("meta", "cpu"):
        x, weight = torch.zeros(4, 8, device=device), torch.zeros(8, 16, device=device)
        with torch.inference_mode(), Storages() as storages:
            c, e = toy(x)
        assert storages.peak() == 896
        assert storages.peak(without=[c.T]) == 896 - 128
        assert storages.size([c, c[:1], e]) == 128 + 100
        del e
        assert sum(size for _, size in storages.changes) == 128


@pytest.mark.parametrize("case", SMALL)
def test_peak_is_what_the_profiler_sees_of_a_real_model(case):
    """In float32, which CPU kernels take as it is; within 1 %, because they also make a few scalars, but for Falcon,
    whose attention is not fused and makes copies inside of its kernels."""
    model = small_model(case, torch.float32)
    model.config._experts_implementation = "batched_mm"  # the usual one has no float32 on the meta device
    with torch.device("meta"):
        shapes = type(model)(model.config).eval()
    inputs = prompt(shapes, 64, 4)
    cache, activations = measure_pass(shapes, inputs)
    with torch.inference_mode(), Storages() as storages:
        output = shapes(**inputs)
    assert output.logits.shape[1] == {"t5": 32, "bert": 64, "vit": 2}.get(case, 1)
    assert storages.peak() == pytest.approx(profiled_peak(model), rel=0.1 if case == "falcon" else 0.01)
    if cache:
        assert max(activations, cache) < storages.peak() <= activations + cache
    else:
        assert activations == storages.peak()


@torch.inference_mode()
def profiled_peak(model) -> int:
    """The most bytes alive at once in a pass by torch's profiler, which watches the allocator."""
    inputs = prompt(model, 64, 4)
    model(**inputs)  # what only a first call sets up
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = model(**inputs)
    assert hasattr(output, "past_key_values") == model.can_generate()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def test_what_is_neither_a_language_model_nor_one_of_pictures():
    with pytest.raises(UserError, match="unknown architecture 'clap': transformers makes no"):
        measure_footprint(AutoConfig.for_model("clap"), 16)


def of_gib(embeddings, layers, rest, cache=0, decoder_layers=None, activations=0) -> Footprint:
    """A footprint from GiB."""
    sizes = [int(size * GIB) for size in layers]
    of_layers = {16: sizes, 8: [size // 2 for size in sizes]}
    embeddings, rest, cache, activations = (int(size * GIB) for size in (embeddings, rest, cache, activations))
    return Footprint(1, embeddings, of_layers, rest, cache, decoder_layers or len(layers), activations, 16, {})


@pytest.mark.parametrize(
    ("footprint", "gpus", "gigabytes", "headroom", "expected"),
    [
        (of_gib(1, [6, 6], 1), 1, 14, 0, True),
        (of_gib(1, [6, 6], 1), 1, 14, 0.1, False),
        (of_gib(1, [6, 6], 1, activations=0.1), 1, 14, 0, False),
        (of_gib(1, [6, 6], 1, cache=0.1), 1, 14, 0, False),
        (of_gib(1, [6, 6, 6], 1), 2, 10, 0, False),  # a layer is not divided, though 20 GiB are 20 GiB
        (of_gib(1, [6, 6, 6], 1), 3, 10, 0, True),
        (of_gib(3, [6, 6], 3), 2, 9, 0, True),  # embeddings on the first GPU, the rest on the last
        (of_gib(3, [6, 6], 3), 2, 8.9, 0, False),
        (of_gib(0, [4, 4, 4, 4], 0, cache=4, decoder_layers=2), 1, 20, 0, True),
        (of_gib(0, [4, 4, 4, 4], 0, cache=4.1, decoder_layers=2), 2, 12, 0, False),  # all of it on the second GPU
        (of_gib(0, [4, 4, 4, 4], 0, cache=4, decoder_layers=4), 2, 10, 0, True),
        (of_gib(5, [1], 0), 9, 4, 0, False),
        (of_gib(1, [1], 1), 4, 1, 2, False),
    ],
)
def test_layers_go_to_gpus_in_order(footprint, gpus, gigabytes, headroom, expected):
    assert fits(footprint, 16, gpus, gigabytes, headroom) is expected


def test_8_bits_take_half_the_room():
    assert fits(of_gib(0, [8, 8], 0), 8, 1, 8, 0)
    assert not fits(of_gib(0, [8, 8], 0), 16, 1, 8, 0)


of_table_3 = pytest.mark.nightly("outliers/metrics/memory.py", "outliers/models/skeleton.py", "experiments/paper/")


@pytest.fixture(scope="module")
def table3_rows(tmp_path_factory) -> list[dict]:
    """The rows of the paper's Table 3 over its own models, and over two that are not in its list."""
    more = ["facebook/opt-2.7b", "bigscience/bloom-3b"]
    fields = read_experiment("paper/table3")
    spec = make_experiment(fields.replaced({"models": fields.values["candidates"] + more}), Memory)
    return run(spec, tmp_path_factory.mktemp("table3"))


@of_table_3
def test_table_3_comes_out_as_published(table3_rows):
    table3 = ARTEFACTS["table3"]
    names = {"GPT-2 1.3B": "GPT-2 XL 1.5B"}
    assert table3.ours(table3_rows) == {key: names.get(name, name) for key, name in table3.published.values.items()}


@of_table_3
def test_largest_of_all_is_named_beside_the_papers(table3_rows, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table = largest(table3_rows).set_index("gigabytes")
    assert table.loc[12, "16-bit, any"] == "BLOOM-3B"
    assert table[["16-bit, any", "8-bit, any"]].count().sum() == 1
    assert table.loc[80, "owner"] == "Enterprise"
    assert "GPT-2 XL 1.5B (BLOOM-3B)" in memory_section(table3_rows).text


def test_window_of_headroom():
    """At a context of 256 tokens, the edges that `Memory` names: GPT-J in 16 bits on 12 GB, BLOOM on 8 × 24 GB."""
    gptj, bloom = (measure_footprint(find_config(name), 256) for name in ("EleutherAI/gpt-j-6b", "bigscience/bloom"))
    assert fits(gptj, 16, 1, 12, headroom=0.56)
    assert not fits(gptj, 16, 1, 12, headroom=0.57)
    assert fits(bloom, 8, 8, 24, headroom=0.92)
    assert not fits(bloom, 8, 8, 24, headroom=0.93)


def test_experiment_of_all_known_models():
    spec = make_experiment(read_experiment("paper/table3"), Memory)
    assert spec.models == list(known_configs())
    assert read_experiment("pocket/table3").values == read_experiment("paper/table3").values


def test_candidates_are_among_the_models(tmp_path):
    with pytest.raises(UserError, match=r"unknown candidate 'pocket/gpt2-1m'; did you mean pocket/gpt2-0.1m"):
        run(Memory(models=["pocket/gpt2-0.1m"], candidates=["pocket/gpt2-1m"]), tmp_path)


def test_command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["openai-community/gpt2", "facebook/opt-125m", "--gpu", "0.78", "--gpu", "2x0.7", "--gpu", "0.6"]
    code, out, err = call(monkeypatch, capsys, *arguments, "--context", "2048", "--headroom", "0.5", command="memory")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "1x GPU 0.78 GB GPT-2 124M / OPT-125M none" in lines
    assert "2x GPU 0.7 GB GPT-2 124M / OPT-125M GPT-2 124M / OPT-125M" in lines
    assert "1x GPU 0.6 GB none none" in lines
    assert "2048 (GPT-2 124M 1024) tokens of context" in " ".join(out.split())
    assert (tmp_path / "results" / "memory" / "rows.jsonl").exists()
