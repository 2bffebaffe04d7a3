"""Try a tiny random model of every causal type that transformers has, and write docs/types.md.

    python scripts/every_type.py [TYPE …]

With types, their results are printed and nothing is written.
"""

import math
import multiprocessing
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import outliers
from outliers.errors import UserError
from outliers.models.anatomy import anatomy_of, projections
from outliers.models.stream import stream_model
from outliers.quantization.linear import QuantizedLinear

PAGE = Path(__file__).parent.parent / "docs" / "types.md"
SECONDS = 300  # of one check at most
PROCESSES = multiprocessing.get_context("fork")
RUN, FIRST = "run", ("found", "loss")  # without which nothing else is tried
LAYERS, WIDTH, VOCABULARY = 4, 64, 512
# Fields of configurations by what they become; a type has some of them.
FIELDS = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (
        WIDTH,
        "hidden_size n_embd d_model n_embed dim word_embed_proj_dim embedding_size embedding_dim lru_width conv_dim",
    ),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers"),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "linear_num_value_heads index_n_heads",
    ),
    (
        2,
        "num_key_value_heads encoder_layers num_experts_per_tok num_experts_per_token moe_k moe_topk "
        "mamba_expand linear_num_key_heads",
    ),
    (
        16,
        "head_dim sliding_window qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_head mamba_d_state state_size "
        "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input d_head mamba_headdim "
        "index_head_dim index_topk",
    ),
    (96, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size block_ff_dim"),
    (
        48,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size",
    ),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim mamba_n_heads"),
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
OWN = {  # of a type: what its default configuration lacks, or asks for
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}


def made_small(fields: dict) -> dict:
    """The fields of a configuration with small values."""
    own = OWN.get(fields["model_type"], {})
    depth = next((fields[name] for name in fields if SMALL.get(name) == LAYERS and "layer" in name), None)
    fields = {name: value for name, value in fields.items() if name != "per_layer_config"}
    small = dict(fields)
    for name, value in fields.items():
        size = SMALL.get(name.removesuffix("_per_layer"))
        if isinstance(value, dict):
            small[name] = made_small(value) if "model_type" in value else value
        elif isinstance(value, list) and value and len(value) == depth:
            small[name] = [size] * LAYERS if size else [*dict.fromkeys(value), *value][:LAYERS]
        elif name in SMALL:
            small[name] = size
    if fields.get("kv_lora_rank"):
        small["num_key_value_heads"] = 4  # all heads have keys of one latent state
    if {"num_heads", "expand", "head_dim"} <= fields.keys():
        small["num_heads"] = fields["expand"] * WIDTH // small["head_dim"]
    return small | own


def tiny(kind: str) -> PreTrainedModel:
    """A tiny random model of a type, float32; raises whatever transformers raises."""
    default = AutoConfig.for_model(kind)
    config = type(default).from_dict(made_small(default.to_dict()))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.08)
        elif "norm" in name.lower():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def checks(model: PreTrainedModel, ids: torch.Tensor, expected: float) -> Iterator[tuple[str, Callable[[], bool]]]:
    """What is tried of a model, each with a function that says whether it is as it should be."""

    def loss(of: PreTrainedModel) -> float:
        return math.log(outliers.perplexity(of, ids))

    def planted() -> bool:
        other = outliers.plant(model, [3], 64.0)
        trace = outliers.trace(other, ids, attention=False)
        roles = [role for role in trace.roles if role.startswith(("attn_in", "ffn_in")) and "+" not in role]
        found = any(3 in list(trace.outlier_features(roles=[role])["feature"]) for role in roles)
        return abs(loss(other) - expected) < 1e-4 and found

    def quantized(scheme: str) -> bool:
        other = outliers.quantize(model, scheme)
        every = all(isinstance(one.module, QuantizedLinear) for one in projections(other))
        return every and abs(loss(other) - expected) > 1e-9

    def ablated(method: str) -> bool:
        ablation = outliers.variant(f"{method}(3,5)")
        ablation = ablation.knowing(outliers.trace(model, ids, attention=False)) if method == "mean" else ablation
        (ablated,) = outliers.perplexities(model, ids, [ablation])
        return math.isfinite(ablated) and abs(math.log(ablated) - expected) > 1e-9

    def damaged() -> bool:
        damages = outliers.damage(model, ids, "absmax", by=("error", "layer"), progress=False)
        places = {(one.layer, one.role) for one in projections(model)}
        alone = damages.layers["perplexity_only"]
        of_layers = len({*alone}) == len(alone) == len({layer for layer, _ in places})
        return of_layers and places == {*damages.errors[["layer", "role"]].itertuples(index=False, name=None)}

    def streamed() -> bool:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return abs(loss(stream_model(folder)) - expected) < 1e-6

    yield "found", lambda: bool(anatomy_of(model.config))
    yield "loss", lambda: abs(loss(model) - expected) < 1e-6
    yield "trace", lambda: bool(outliers.trace(model, ids, attention=False).roles)
    yield "attention", lambda: bool(outliers.trace(model, ids).roles)
    yield "plant", planted
    for scheme in ("absmax", "w4a4", "llm.int8"):
        yield scheme, lambda scheme=scheme: quantized(scheme)
    for method in ("zero", "mean", "shuffle"):
        yield method, lambda method=method: ablated(method)
    yield "damage", damaged
    yield "stream", streamed


def tried(kind: str) -> Iterator[tuple[str, str]]:
    """Each check with "" where it is as it should be, or why not; the first one is whether transformers runs a type."""
    try:
        model = tiny(kind)
        ids = torch.randint(3, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
        logits = [model(input_ids=block[None], use_cache=False).logits[0].double() for block in ids]
        losses = [nn.functional.cross_entropy(one[:-1], block[1:]) for one, block in zip(logits, ids, strict=True)]
        expected = float(sum(losses) / 2)
    except Exception as error:
        yield RUN, f"{type(error).__name__}: {error}"
        return
    yield RUN, ""
    for name, check in checks(model, ids, expected):
        try:
            why = "" if check() else "differs"
        except UserError as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        yield name, why
        if name in FIRST and why:
            return


def tried_apart(kind: str) -> dict[str, str]:
    """The results of `tried` in a process of its own, which is ended if it hangs."""
    reader, writer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_send, args=(kind, writer))
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
    return found


def _send(kind: str, writer: Connection) -> None:
    for result in tried(kind):
        writer.send(result)


def cell(kind: str, result: dict[str, str]) -> tuple[str, str, str]:
    """A row of the page: the type, what it does, and what not and why."""
    wrong = {name: why for name, why in result.items() if why}
    if result.get(RUN, "no") != "":
        return kind, "not tried", "transformers runs no tiny default model"
    if wrong.keys() & {*FIRST}:
        return kind, "refused", short(next(iter(wrong.values())))
    without = ", ".join(wrong)
    return kind, f"works without {without}" if wrong else "works", "; ".join(dict.fromkeys(map(short, wrong.values())))


def short(why: str) -> str:
    """The first words of a reason, for a cell of a table."""
    why = re.sub(f"'{tempfile.gettempdir()}[^']*'", "the checkpoint", why)
    return textwrap.shorten(why, 140, placeholder=" …").replace("|", "/")


def page(rows: list[tuple[str, str, str]]) -> str:
    """Return the page of all types."""
    run = [row for row in rows if row[1] != "not tried"]
    works = sum(row[1] == "works" for row in run)
    measured = sum(row[1] != "refused" for row in run)
    return "\n".join(
        [
            "# Types of models",
            "",
            "After this page you know which types of causal language models work, and why others do not. Of each type "
            f"that transformers {transformers_version} has, a tiny random model was made and tried: its loss, a trace, "
            "a planted feature, three schemes, three ablations, damage by layer and role, and streaming.",
            "",
            f"Of {len(run)} types that transformers runs, {measured} have its loss here, and {works} pass every check. "
            f"The other {len(rows) - len(run)} have default configurations that transformers cannot build or run. "
            "`python scripts/every_type.py` writes this page; `python -m outliers.anatomy TYPE` shows what was found.",
            "",
            "| type | result | why not |",
            "|---|---|---|",
            *(f"| `{kind}` | {result} | {why} |" for kind, result, why in rows),
            "",
        ]
    )


def main(kinds: list[str]) -> None:
    logging.set_verbosity_error()
    rows = []
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows.append(cell(kind, tried_apart(kind)))
        print(" | ".join(rows[-1]), flush=True)
    if not kinds:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
