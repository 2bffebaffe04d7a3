"""The damage to a model by schemes, caches or another model: by projection, role, layer and head, and of the whole."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PlainSerializer, PlainValidator

from outliers.commands import Command
from outliers.config.experiment import CALIBRATED, UNDER_SCHEMES, Experiment
from outliers.config.fields import Draws, Model, Models, Name, Names, Schemes, Split, Unique, saying_all
from outliers.errors import UserError, unknown_name
from outliers.metrics.records import Agreement, Errors, Inputs, Layers, Metric, Perplexity, Places, Weights
from outliers.quantization.cache_formats import Formats
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell, CellPlan, Stages, Subject
from outliers.terminal.progress import with_bar
from outliers.variants.cached import Cached
from outliers.variants.peer import Against
from outliers.variants.quantized import EXACT, Quantized

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outliers.metrics.damages import Damages
    from outliers.models.anatomy.examples import Block
    from outliers.quantization.magnitudes import Calibration

Damaging = Quantized | Cached | Against
DAMAGE_BY = ("error", "role", "layer", "stack", "head", "model")  # parts of the damage
EXPERT = "expert"  # a further part, only on request, for a model may have thousands of experts


def _cache(value: object) -> Cached:
    """Return the variant of a quantized KV cache, which may be given by its name."""
    if isinstance(value, Cached):
        return value
    if not isinstance(value, str):
        raise ValueError("expected a cache such as kv=int4")
    with saying_all():
        return Cached(Formats.read(value))


Cache = Annotated[Cached, PlainValidator(_cache, json_schema_input_type=str), PlainSerializer(lambda cache: cache.name)]


class Damage(Experiment):
    """The damage of schemes to one model, by the arguments of `outliers.damage`."""

    takes = (*CALIBRATED, *UNDER_SCHEMES)
    view = "outliers.views.damage:damage_rows_section"

    name: Name = "damage"
    model: Model
    schemes: Schemes = Field(
        default=["absmax", "llm.int8"], validate_default=True, description="Schemes whose damage is measured."
    )
    caches: Annotated[list[Cache], Split, Unique] = Field(
        default=[], description="Caches such as kv=int4; instead of schemes unless some are given."
    )
    against: Models = Field(
        default=[],
        description="Other models to compare with, such as a quantized checkpoint; instead of schemes, as with caches.",
    )
    by: Names = Field(
        default=list(DAMAGE_BY),
        description="Parts of the damage: errors of projections, perplexity by role, layer, stack, head of a cache "
        "or expert, whole model.",
    )
    draws: Draws = 1
    model_draws: Draws | None = Field(
        default=None, description="Draws of the whole model, by default as many as of its parts."
    )

    def check(self) -> None:
        from outliers.config.validate import check_model  # late, for `--help` does not need them
        from outliers.models.weight_files import INT8

        for name in self.against:
            if not (Path(name) / INT8).exists():  # an int8 model is checked as it is loaded
                check_model(name)

    def plans(self) -> list[CellPlan]:
        subject = ModelWithText(self.model, self.revision, self)
        variants: list[Damaging] = [*self.caches, *map(Against, self.against)]
        if not variants or "schemes" in self.model_fields_set:
            variants = [*self.quantized, *variants]
        return [CellPlan(subject, _stages(subject, variants, self))]


COMMAND = Command(
    "places of the damage by a scheme: projections, roles and layers",
    """Measure where schemes damage a model: the error of each projection, and the cost of each role and layer.

Prints tables and writes rows, tables and figures to results/damage/NAME. A second run resumes the first.

Examples:

`python -m outliers.damage smollm2-135m --scheme absmax,llm.int8`

`python -m outliers.damage gpt2 --by error --text c4 --block 1024`
""",
    Damage,
)


def _stages(subject: ModelWithText, variants: Sequence[Damaging], experiment: Damage) -> Stages:
    """Yield all cells; cells by stack are a stage of their own, the last one."""
    if experiment.against:
        _check_tokenizers(subject, experiment.against)
    chosen = "by" in experiment.model_fields_set
    by_stack = _by_stack(subject, variants, experiment.by, experiment.draws, chosen)
    yield _cells(subject, variants, experiment.by, experiment.draws, chosen, experiment.model_draws)
    if by_stack:
        yield by_stack


def _by_stack(
    subject: Subject, variants: Sequence[Damaging], by: Collection[str], draws: int, chosen: bool
) -> list[Cell]:
    """Return the cells by stack, if the model has several stacks.

    Args:
        chosen: whether the user asked for parts of the damage; then a model of one stack is an error.
    """
    from outliers.models.anatomy import stacks_of

    if "stack" not in by:
        return []
    if len(stacks_of(subject.config)) == 1:
        if chosen:
            raise UserError(f"'{subject.name}' has one stack of layers; leave 'stack' out")
        return []
    schemes = [variant for variant in variants if "stack" in variant.place_kinds]
    return [Cell(subject, scheme, Places(by="stack", draws=draws)) for scheme in schemes]


def _cells(
    subject: Subject,
    variants: Sequence[Damaging],
    by: Collection[str],
    draws: int,
    chosen: bool,
    model_draws: int | None = None,
) -> list[Cell]:
    """Return the cells for the errors of all schemes, then the other cells of one scheme after the other.

    Single places need the damage of the whole model for comparison. Only projections have errors, so a cache has none,
    nor has a scheme that quantizes no projection; only a cache has heads. Another model's weights are compared too, and
    each whole layer is replaced by the other model's.

    Args:
        chosen: as for `_by_stack`.
        model_draws: draws of the whole model; by default `draws`.
    """
    by = set(by)
    _check(by, variants, chosen)
    pairs = []
    if with_errors := [variant for variant in variants if "error" in by and variant.has_output_errors]:
        pairs += [(EXACT, Inputs()), *((variant, Errors()) for variant in with_errors)]
        pairs += [(variant, Weights()) for variant in with_errors if variant.swaps]
    if by - {"error"}:
        whole = {"draws": model_draws or draws}
        pairs += [(EXACT, Perplexity(**whole))]
        for variant in variants:
            metrics = [Perplexity(**whole), Agreement(**whole), *_place_metrics(variant, by, draws)]
            pairs += [(variant, metric) for metric in metrics]
    return [Cell(subject, variant, metric) for variant, metric in pairs]


def _place_metrics(variant: Damaging, by: Collection[str], draws: int) -> list[Metric]:
    """Return the metrics of the cost of single roles, layers, heads or experts, for the kinds in `by`."""
    fields = ("role", "layer", "head" if "head" in variant.place_kinds else EXPERT)
    instead = {"layer": Layers(draws=draws)} if variant.swaps else {}
    return [instead.get(field) or Places(by=field, draws=draws) for field in fields if field in by]


def _check(by: set[str], variants: Sequence[Damaging], chosen: bool) -> None:
    if not by:
        raise UserError(f"no part of the damage is requested; expected some of {', '.join(DAMAGE_BY)}")
    if unknown := sorted(by.difference(DAMAGE_BY, [EXPERT])):
        raise unknown_name("part of the damage", unknown[0], (*DAMAGE_BY, EXPERT))
    if chosen and "head" in by and not any("head" in variant.place_kinds for variant in variants):
        raise UserError("schemes have no heads; leave 'head' out, or give a cache such as kv=int4")
    for variant in variants:
        if not variant.place_kinds:
            raise UserError(
                f"scheme '{variant.name}' quantizes nothing, and so has no damage; expected one such as absmax"
            )
        if by == {"error"} and not variant.has_output_errors:
            raise UserError(
                f"'{variant.name}' quantizes no projection, and only projections have errors; expected another "
                "part of the damage: role, layer or model"
            )


def _check_tokenizers(subject: ModelWithText, others: Iterable[str]) -> None:
    """Raise UserError if another model's tokenizer gives a token another id than the subject's tokenizer."""
    from outliers.models.load import load_tokenizer

    ids = getattr(subject.preprocessor, "vocab", {})
    for other in others:
        if Path(other).is_dir() and not (Path(other) / "tokenizer.json").exists():
            continue  # transformers would make an empty tokenizer
        vocabulary: dict[str, int] = {}
        with suppress(UserError):  # many come without a tokenizer, and use that of the subject
            vocabulary = load_tokenizer(other).get_vocab() if ids else {}
        if moved := next((token for token, number in vocabulary.items() if ids.get(token, number) != number), None):
            raise UserError(
                f"the tokenizer of '{other}' has {moved!a} as token {vocabulary[moved]}, and that of "
                f"'{subject.model}' as {ids[moved]}; expected a model of the same vocabulary"
            )


@with_bar
def damage(
    model: "PreTrainedModel",
    blocks: "Iterable[Block]",
    scheme: "str | Scheme | Cached | None" = None,
    by: Iterable[str] = DAMAGE_BY,
    skip: Sequence[str] = (),
    draws: int = 1,
    calibration: "Calibration | None" = None,
    attention_mask: "Iterable[torch.Tensor] | None" = None,
    against: "PreTrainedModel | str | None" = None,
    *,
    progress: bool | None = None,
) -> "Damages":
    """Return the damage of a scheme, a cache or another model by projection, role, layer, head, and in all.

    The error of a projection is that of its output from the inputs of the unquantized model, so that errors do not
    cascade; perplexities are of whole models, in which errors do. The model is left as it was.

    Args:
        model: a causal language model, resident or streamed, with its exact weights.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        scheme: name, or a scheme of one's own; or a cache of keys and values, `outliers.variant("kv=int4")`.
        by: what to measure: "error" of each projection; perplexity by "role" (keys and values of a cache), by "layer",
            by "stack" if there are several, by "head" of a cache, and, only on request, by "expert"; and that of the
            whole "model", which the other perplexities include.
        skip: patterns of projections that stay exact, as for `outliers.quantize`.
        draws: how many times perplexities, divergence and agreement are measured, with embeddings changed by 1e-6 and
            ties of weights rounded anew.
        calibration: magnitudes of the inputs, which some remedies need; see `outliers.calibrate`.
        attention_mask: as for `outliers.perplexity`.
        against: instead of a scheme another model of the same architecture and sizes, such as one that torchao or
            bitsandbytes has quantized, whose modules compute as they do; or its name, as for `outliers.load_model`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: there are both a scheme and another model, or neither; the other model has another architecture,
            other sizes, another dtype or device; the scheme is unknown or quantizes nothing, a part of the damage is
            unknown, several draws are requested of a model in 16 bits; as `outliers.quantize` and
            `outliers.perplexity`.

    Example:
        >>> outliers.damage(model, blocks, "absmax", by=["role"]).variant
        'absmax'
    """
    from outliers.metrics.damages import damages_of
    from outliers.quantization.convert import check_calibrated
    from outliers.runs.loaded import measure_loaded
    from outliers.subjects.given import Given
    from outliers.text.blocks import unpad
    from outliers.variants.draw import check_draws

    chosen = by is not DAMAGE_BY
    by = [by] if isinstance(by, str) else list(by)
    blocks = list(unpad(blocks, attention_mask))
    check_draws(draws, str(model.dtype).removeprefix("torch."))
    if (scheme is None) == (against is None):
        raise UserError("both a scheme and another model, or neither; expected one of the two: scheme=… or against=…")
    if against is not None:
        variant = Against(against)
        variant.check(model)
    elif isinstance(scheme, Cached):
        variant = scheme
    else:
        check_calibrated(get_scheme(scheme), calibration)
        variant = Quantized(get_scheme(scheme), tuple(skip), calibration=calibration)
    subject = Given(model, blocks)
    cells = _cells(subject, [variant], by, draws, chosen)
    cells += _by_stack(subject, [variant], by, draws, chosen)
    (damages,) = damages_of(measure_loaded(subject, cells)).values()
    return damages
