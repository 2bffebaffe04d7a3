"""Try a tiny random model of every type of language model that transformers has, and write docs/types.md.

    python scripts/every_type.py [FAMILY | FAMILY/TYPE | largest] …

A family is causal, masked, encoder-decoder or image-text; `largest` measures the anatomy of the largest types. Without
arguments all types are tried whose result is of other code. Each result is kept in docs/types.json at once, with the
code and its commit, and the page is made of this file; so a run that was ended goes on where it stopped.
"""

import copy
import json
import math
import multiprocessing
import re
import resource
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.models.auto import modeling_auto
from transformers.utils import logging

import outliers
from outliers.errors import UserError, reason_of
from outliers.models import anatomy
from outliers.models.anatomy import layers_of, part_config, projections
from outliers.models.anatomy.examples import IGNORED, Block, Examples
from outliers.models.skeleton import skeleton
from outliers.models.stream import stream_model
from outliers.quantization.linear import QuantizedLinear
from outliers.show.axes import count_label
from outliers.subjects.provenance import code_hash, environment, processor
from outliers.tracing.trace import traces

PAGE = Path(__file__).parent.parent / "docs" / "types.md"
RESULTS = PAGE.with_suffix(".json")  # by family and type: why a check fails, by its name; "" where transformers runs it
REFUSED = "refused: "  # begins a reason that is a line for users
SECONDS = 300  # of one check at most
PROCESSES = multiprocessing.get_context("fork")
RUN, FIRST = "run", ("found", "loss")  # without which nothing else is tried
STREAM, ATTENTION = "stream", "attention"
BY_NAME = {
    STREAM: "works resident",
    ATTENTION: "works without probabilities",
}  # of checks that a kind of model cannot pass
LARGEST = 20  # types whose anatomy is measured
LAYERS, WIDTH, VOCABULARY = 4, 64, 512
# Fields of configurations by what they become; a type has some of them.
FIELDS = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size src_vocab_size tgt_vocab_size"),
    (
        WIDTH,
        "hidden_size n_embd d_model n_embed dim emb_dim word_embed_proj_dim embedding_size embedding_dim lru_width "
        "conv_dim text_hidden_size out_hidden_size adapter_in_dim adapter_input_size",
    ),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers"),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "linear_num_value_heads index_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads encoder_layers num_experts_per_tok num_experts_per_token moe_k moe_topk "
        "mamba_expand linear_num_key_heads",
    ),
    (
        16,
        "head_dim rotary_dim sliding_window qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_head mamba_d_state "
        "state_size linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input d_head mamba_headdim "
        "index_head_dim index_topk attention_window block_size",
    ),
    (96, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size block_ff_dim d_ff dim_ff"),
    (
        48,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size expert_ffn_hidden_size",
    ),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num mamba_n_heads"),
    (
        1,
        "n_group num_expert_group topk_group first_k_dense_replace mamba_n_groups n_groups bos_token_id "
        "num_kv_shared_layers",
    ),
    (32, "q_lora_rank kv_lora_rank qk_head_dim attention_head_dim"),
    (128, "mamba_d_ssm attention_hidden_size"),
    (256, "max_position_embeddings n_positions"),
)
SMALL = {name: size for size, names in FIELDS for name in names.split()} | {"pad_token_id": 0, "eos_token_id": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}  # of half a small head
OWN = {  # of a type: what its default configuration lacks, or asks for
    **{
        f"{kind}_text": {"rope_parameters": SECTIONS}
        for kind in ("cosmos3_edge", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")
    },
    "glm4v_moe_text": {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 48]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "esmc": {"num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},  # its eager attention repeats no keys
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}


def made_small(fields: dict, sizes: Mapping[int, int] | None = None) -> dict:
    """Return the fields of a configuration with small values.

    sizes: replacements of the usual small values, such as {64: 96}.
    """
    sizes = sizes or {}
    resized = {name: sizes.get(size, size) for name, size in SMALL.items()}
    layers, width = sizes.get(LAYERS, LAYERS), sizes.get(WIDTH, WIDTH)
    own = OWN.get(fields["model_type"], {})
    depth = next((fields[name] for name in fields if SMALL.get(name) == LAYERS and "layer" in name), None)
    fields = {name: value for name, value in fields.items() if name != "per_layer_config"}
    small = dict(fields)
    for name, value in fields.items():
        size = resized.get(name.removesuffix("_per_layer"))
        if isinstance(value, dict):
            small[name] = made_small(value, sizes) if "model_type" in value else value
        elif isinstance(value, list) and value and len(value) == depth:
            small[name] = [size] * layers if size else [*dict.fromkeys(value), *value][:layers]
        elif name in resized:
            small[name] = size
    if fields.get("kv_lora_rank"):
        small["num_key_value_heads"] = small["num_attention_heads"]  # all heads have keys of one latent state
    if {"num_heads", "expand", "head_dim"} <= fields.keys():
        small["num_heads"] = fields["expand"] * width // small["head_dim"]
    return small | own


def largest() -> list[str]:
    """Return the causal types whose default models have the most parameters, each size once, the largest one first."""
    types: dict[int, str] = {}
    for kind in FAMILIES["causal"].kinds:
        with suppress(Exception):  # of any kind, for the defaults of some types are none that they take
            model = skeleton(part_config(AutoConfig.for_model(kind)))
            types.setdefault(sum(parameter.numel() for parameter in model.parameters()), kind)
    return [types[size] for size in sorted(types, reverse=True)]


def measured(kind: str) -> dict[str, float]:
    """Return the size of a type's default model, and what its anatomy costs without a cache: seconds of a processor,
    and GB of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        anatomy.found.CACHE = Path(folder)
        start = time.process_time()
        model = outliers.anatomy(kind)
        seconds = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"parameters": model.parameters, "layers": model.layers, "seconds": seconds, "gigabytes": memory / 1e9}


def measure_largest() -> Iterator[tuple[str, dict[str, float]]]:
    """Measure each of the largest types in a process of its own."""
    count = 0
    for kind in largest():
        with PROCESSES.Pool(1) as pool, suppress(UserError):
            yield kind, pool.apply(measured, (kind,))
            count += 1
        if count == LARGEST:
            return


class Family(NamedTuple):
    """Types of models, and the class of transformers that makes them.

    decodes: whether positions attend to those before them alone; None for a model of which this is not said.
    """

    made_by: type
    kinds: Collection[str]
    decodes: bool | None = None


FAMILIES = {
    "causal": Family(AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, True),
    "masked": Family(AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, False),
    "encoder-decoder": Family(AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "image-text": Family(AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}


def tiny(kind: str, family: str = "causal", sizes: Mapping[int, int] | None = None) -> PreTrainedModel:
    """Return a tiny random model of a type, float32; raise whatever transformers raises. sizes: see `made_small`."""
    made_by, _, decodes = FAMILIES[family]
    default = AutoConfig.for_model(kind)
    config = type(default).from_dict(made_small(default.to_dict(), sizes))
    if decodes is not None and hasattr(config, "is_decoder"):
        config.is_decoder = decodes
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    torch.manual_seed(0)
    model = made_by.from_config(config).eval().float().requires_grad_(False)
    computed = {*(model._keys_to_ignore_on_save or ())}  # such as positions, which no checkpoint holds
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and name not in computed:
            nn.init.normal_(parameter, std=0.08)
        elif "norm" in name.lower():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def text_of(family: str) -> torch.Tensor | Examples:
    """Return two blocks of random tokens; of masked models every fourth one is predicted, of an encoder-decoder
    others."""
    generator = torch.Generator().manual_seed(1)
    ids, others = (torch.randint(5, VOCABULARY, (2, 32), generator=generator) for _ in range(2))
    if family == "masked":
        return Examples(ids, torch.where(torch.arange(32) % 4 == 0, others, IGNORED))
    return Examples(ids, others[:, :16]) if family == "encoder-decoder" else ids


def loss_of(model: PreTrainedModel, block: Block) -> float:
    """Return the loss of a block by transformers' own forward."""
    if isinstance(block, torch.Tensor):
        logits, labels = model(input_ids=block[None], use_cache=False).logits[0, :-1], block[1:]
    else:  # an encoder-decoder makes the inputs of its decoder of the labels
        labels, read = block.labels, {"labels": block.labels[None]}
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            read = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels[None])}
        logits = model(input_ids=block.ids[None], **read).logits[0]
    return float(nn.functional.cross_entropy(logits.double(), labels, ignore_index=IGNORED))


def checks(
    model: PreTrainedModel, text: torch.Tensor | Examples, expected: float
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield the name of each check of a model, and a function that returns whether it passes."""

    def loss(of: PreTrainedModel) -> float:
        return math.log(outliers.perplexity(of, text))

    def same_in_float64() -> bool:
        """Of losses above 8, rounding in float32 alone is more than the limit."""
        exact = copy.deepcopy(model).double()
        return abs(loss(exact) - sum(loss_of(exact, block) for block in text) / len(text)) < 1e-6

    def planted() -> bool:
        other = outliers.plant(model, [3], 64.0)
        found = False
        for trace in traces(other, text, attention=False):
            roles = [role for role in trace.roles if role.startswith(("attn_in", "ffn_in")) and "+" not in role]
            found |= any(3 in list(trace.outlier_features(roles=[role])["feature"]) for role in roles)
        return abs(loss(other) - expected) < 1e-4 and found

    def quantized(scheme: str) -> bool:
        other = outliers.quantize(model, scheme)
        every = all(isinstance(one.module, QuantizedLinear) for one in projections(other))
        return every and abs(loss(other) - expected) > 1e-9

    def ablated(method: str) -> bool:
        attends = any(one.role == "attn_in" for one in projections(model))
        ablation = outliers.variant(f"{method}(3,5)" if attends else f"{method}(3,5@ffn_in)")
        if method == "mean":
            ablation = ablation.knowing(*traces(model, text, attention=False))
        (ablated,) = outliers.perplexities(model, text, [ablation])
        return math.isfinite(ablated) and abs(math.log(ablated) - expected) > 1e-9

    def damaged() -> bool:
        damages = outliers.damage(model, text, "absmax", by=("error", "layer"), progress=False)
        places = {(one.layer, one.role) for one in projections(model)}
        alone = damages.layers["perplexity_only"]
        of_layers = len({*alone}) == len(alone) == len({layer for layer, _ in places})
        return of_layers and places == {*damages.errors[["layer", "role"]].itertuples(index=False, name=None)}

    def streamed() -> bool:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return abs(loss(stream_model(folder)) - loss(model)) < 1e-6

    yield "found", lambda: bool(layers_of(model))
    yield "loss", lambda: abs(loss(model) - expected) < 1e-6 or same_in_float64()
    yield "trace", lambda: all(one.roles for one in traces(model, text, attention=False))
    yield ATTENTION, lambda: all(one.roles for one in traces(model, text))
    yield "plant", planted
    for scheme in ("absmax", "w4a4", "llm.int8"):
        yield scheme, lambda scheme=scheme: quantized(scheme)
    for method in ("zero", "mean", "shuffle"):
        yield method, lambda method=method: ablated(method)
    yield "damage", damaged
    yield STREAM, streamed


def tried(kind: str, family: str = "causal") -> Iterator[tuple[str, str]]:
    """Yield each check with "" if it passes, or the reason; the first one is whether transformers runs the type."""
    text = text_of(family)
    try:
        model = tiny(kind, family)
        if family == "encoder-decoder" and not model.config.is_encoder_decoder:
            raise ValueError("it has no decoder that reads an encoder, and is image-text or audio-text")
        expected = sum(loss_of(model, block) for block in text) / len(text)
    except Exception as error:
        yield RUN, reason_of(error, 300)
        return
    yield RUN, ""
    if family == "image-text":  # the part that reads text is loaded alone
        try:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = outliers.load_model(folder)
        except Exception as error:
            yield "found", why_not(error)
            return
    for name, check in checks(model, text, expected):
        try:
            why = "" if check() else "differs"
        except Exception as error:
            why = why_not(error)
        yield name, why
        if name in FIRST and why:
            return


def why_not(error: Exception) -> str:
    """Return the reason of a refusal, or what Python says of a mistake."""
    return f"{REFUSED}{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def tried_apart(kind: str, family: str) -> dict[str, str]:
    """Return the results of `tried` in a process of its own, which is ended if it hangs."""
    reader, writer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_send, args=(kind, family, writer))
    process.start()
    writer.close()
    found: dict[str, str] = {}
    try:
        while reader.poll(SECONDS):
            name, why = reader.recv()
            found[name] = why
        found["time"] = f"a check takes longer than {SECONDS} s"
    except EOFError:  # it has sent all, or was ended by the system
        process.join()
        if process.exitcode:
            found["memory"] = f"the process ends with {process.exitcode}"
    process.kill()
    process.join()
    return {name: short(why) for name, why in found.items() if why or name == RUN}


def _send(kind: str, family: str, writer: Connection) -> None:
    for result in tried(kind, family):
        writer.send(result)


def outcome(result: dict[str, str]) -> str:
    """Return the result of a type in a word or two."""
    wrong = {name for name, why in result.items() if why}
    if result.get(RUN, "no") != "":
        return "not tried"
    if wrong & {*FIRST}:
        return "refused"
    without = ", ".join(name for name in result if name in wrong and not is_refused_by_name(name, result))
    if without:
        return f"works without {without}"
    return next((words for name, words in BY_NAME.items() if name in wrong), "works")


def is_refused_by_name(name: str, result: dict[str, str]) -> bool:
    """Return whether a check is refused because of what the model is: its layers read what earlier ones have made
    beside the residual stream, or it has no probability for each pair of positions."""
    return name in BY_NAME and re.match(f"{REFUSED}(the attention of )?layer ", result[name]) is not None


def row(kind: str, result: dict[str, str]) -> str:
    """Return the row of a type: its result, and the reasons for what does not work."""
    words = outcome(result)
    reasons = (why.removeprefix(REFUSED) for why in result.values() if why)
    why = "; ".join(dict.fromkeys(reasons))
    return f"| `{kind}` | {words} | {why} |"


def short(why: str) -> str:
    """Return the first words of a reason, for a cell of a table."""
    why = re.sub(f"'{tempfile.gettempdir()}[^']*'", "the checkpoint", why)
    return textwrap.shorten(why, 140, placeholder=" …").replace("|", "/")


def section(family: str, results: dict[str, dict[str, str]], commits: Counter) -> list[str]:
    """Return the lines of a family's section. commits: how many types were tried with the code of each commit."""
    counts = Counter(map(outcome, results.values()))
    run = len(results) - counts["not tried"]
    by_name = {words: counts[words] for words in BY_NAME.values()}
    whole = counts["works"] + sum(by_name.values())
    share = f"{100 * whole / max(1, run):.1f} %"
    return [
        f"## {family.capitalize()} models",
        "",
        f"Of {run} types that transformers runs, {run - counts['refused']} have its loss here, and {whole} pass every "
        f"check ({share}). Streaming is refused by name for {by_name[BY_NAME[STREAM]]} of these, and the probabilities "
        f"of attention within windows or groups of positions for {by_name[BY_NAME[ATTENTION]]}. "
        f"The other {counts['not tried']} have default configurations that transformers cannot build or run so small. "
        f"The code was that of {' and '.join(f'{commit} for {count}' for commit, count in commits.most_common())}.",
        "",
        "| type | result | why not |",
        "|---|---|---|",
        *(row(kind, results[kind]) for kind in sorted(results)),
        "",
    ]


def page(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page of the families of which every type was tried."""
    whole = [name for name, family in FAMILIES.items() if {*family.kinds} <= {*results.get(name, ())}]
    return "\n".join(
        [
            "# Types of models",
            "",
            "After this page you know which types of language models work, and why others do not. Of each type that "
            f"transformers {transformers_version} has, a tiny random model was made and tried: its loss, a trace with "
            "and without attention, a planted feature, three schemes, three ablations, damage by layer and role, and "
            "streaming. Of image-text models it is the part that reads text.",
            "",
            "`python scripts/every_type.py` writes this page; `python -m outliers.anatomy TYPE` shows what was found.",
            "",
            *(
                line
                for family in whole
                for line in section(family, results[family], Counter(commits_of(family, results)))
            ),
            *(table_of_costs(**results["largest"]) if "largest" in results else ()),
        ]
    )


def commits_of(family: str, results: dict[str, dict[str, dict]]) -> list[str]:
    """Return the commit of the code with which each type of a family was tried."""
    known = results["code"].get(family, {})
    return [f"`{known[one]['commit']}`" if one in known else "earlier commits" for one in results[family]]


def table_of_costs(of: dict[str, dict[str, float]], processor: str) -> list[str]:
    rows = [
        f"| `{kind}` | {count_label(one['parameters'])} | {one['layers']} | {one['seconds']:.1f} | "
        f"{one['gigabytes']:.2f} |"
        for kind, one in sorted(of.items(), key=lambda row: -row[1]["parameters"])
    ]
    return [
        "## The largest types",
        "",
        f"The anatomy of the default configurations of the {len(rows)} largest causal types, found without weights and "
        f"without a cache: seconds of one core of {processor}, and the largest memory of the whole process, of which "
        "torch and transformers take half a GB.",
        "",
        "| type | parameters | layers | seconds | GB |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def kept() -> dict[str, dict]:
    """Return the results of all families and the largest types, and for each type the code and its commit."""
    return {"code": {}} | (json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {})


def keep(name: str, values: dict) -> None:
    """Update the results of a family, or of the largest types, as those of the code of now."""
    results = kept()
    results[name] = results.get(name, {}) | values
    code = {part: environment("cpu")[part] for part in ("code", "commit")}
    results["code"][name] = results["code"].get(name, {}) | dict.fromkeys(values, code)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(names: list[str]) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in names or (*FAMILIES, "largest"):
        family, _, kind = name.partition("/")
        if family == "largest":
            costs: dict[str, dict[str, float]] = {}
            for one, cost in measure_largest():
                costs[one] = cost
                print(one, cost, flush=True)
                keep(family, {"processor": processor(), "of": costs})
            continue
        before = {} if names else kept()["code"].get(family, {})
        others = (one for one in FAMILIES[family].kinds if before.get(one, {}).get("code") != code_hash())
        for one in [kind] if kind else others:
            result = tried_apart(one, family)
            print(
                family, row(one, result), f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s", flush=True
            )
            keep(family, {one: result})
    PAGE.write_text(page(kept()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
