"""The damage of schemes to one model: by projection, by role and by layer, and over all of it."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from outliers.errors import UserError, unknown_name
from outliers.metrics.agreement import Agreement
from outliers.metrics.damages import Damages, damages_of
from outliers.metrics.errors import Errors
from outliers.metrics.inputs import Inputs
from outliers.metrics.perplexity import Perplexity
from outliers.metrics.places import Places
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.specification.kinds import DAMAGE_BY, Damage, schemes_of
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Cell, Plan, Stages, Subject
from outliers.variants.quantized import EXACT, Quantized

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from outliers.quantization.calibration import Calibration


def damage_plans(spec: Damage) -> list[Plan]:
    """Of the model what each scheme damages; schemes that share weight codes are side by side."""
    subject = Causal(spec.model, spec.revision, spec)
    variants = [Quantized(scheme, tuple(spec.skip)) for scheme in schemes_of(spec)]
    return [Plan(subject, _stages(subject, variants, spec))]


def _stages(subject: Causal, variants: Sequence[Quantized], spec: Damage) -> Stages:
    """All of it, what is by stack last."""
    chosen = "by" in spec.model_fields_set
    by_stack = _by_stack(subject, subject.config, variants, spec.by, spec.draws, chosen)
    yield _cells(subject, variants, spec.by, spec.draws)
    if by_stack:
        yield by_stack


def _by_stack(
    subject: Subject,
    config: "PretrainedConfig",
    variants: Sequence[Quantized],
    by: Collection[str],
    draws: int,
    chosen: bool,
) -> list[Cell]:
    """What is by stack, where the model has several; chosen: whether somebody asked for it, who is told otherwise."""
    from outliers.models.anatomy import stacks_of

    if "stack" not in by:
        return []
    if len(stacks_of(config)) == 1:
        if chosen:
            raise UserError(f"'{subject.name}' has one stack of layers; leave 'stack' out of what the damage is by")
        return []
    return [Cell(subject, variant, Places(by="stack", draws=draws)) for variant in variants]


def _cells(subject: Subject, variants: Sequence[Quantized], by: Iterable[str], draws: int) -> list[Cell]:
    """The errors under all schemes first, then scheme by scheme.

    Roles and layers bring what is over the model: it is what they are compared with. Projections alone have errors, so
    a scheme that quantizes none of them has none.
    """
    by = set(by)
    _check(by, [variant.scheme for variant in variants])
    asked = []
    if "error" in by:
        with_errors = [variant for variant in variants if variant.scheme.quantizes_projections]
        asked += [(EXACT, Inputs()), *((variant, Errors()) for variant in with_errors)]
    if by - {"error"}:
        places = [Places(by=field, draws=draws) for field in ("role", "layer") if field in by]
        of_scheme = [Perplexity(draws=draws), Agreement(draws=draws), *places]
        asked += [(EXACT, Perplexity(draws=draws)), *((one, metric) for one in variants for metric in of_scheme)]
    return [Cell(subject, variant, metric) for variant, metric in asked]


def _check(by: set[str], schemes: list[Scheme]) -> None:
    if not by:
        raise UserError(f"no part of the damage is asked for; expected some of {', '.join(DAMAGE_BY)}")
    if unknown := sorted(by.difference(DAMAGE_BY)):
        raise unknown_name("part of the damage", unknown[0], DAMAGE_BY)
    for scheme in schemes:
        if not scheme.quantizes:
            raise UserError(
                f"scheme '{scheme.name}' quantizes nothing, so it damages nothing; expected one such as absmax"
            )
        if by == {"error"} and not scheme.quantizes_projections:
            raise UserError(
                f"scheme '{scheme.name}' quantizes no projection, and nothing else has an error of its own; expected "
                "another part of the damage: role, layer or model"
            )


def damage(
    model: "PreTrainedModel",
    blocks: "Iterable[torch.Tensor]",
    scheme: str | Scheme,
    by: Iterable[str] = DAMAGE_BY,
    skip: Sequence[str] = (),
    draws: int = 1,
    calibration: "Calibration | None" = None,
    attention_mask: "Iterable[torch.Tensor] | None" = None,
) -> Damages:
    """Find where a scheme damages a model: by projection, by role, layer and stack, and over all of it.

    The error of a projection is that of its output from the inputs of the unquantized model, so that errors do not
    cascade; perplexities are those of whole models, in which they do. The model is left as it was.

    Args:
        model: a causal language model, resident or streamed, whose exact weights are there.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        scheme: name, or a scheme of one's own.
        by: what to measure: "error" of each projection, perplexity by "role", by "layer" and, where there are
            several, by "stack", and what is over the "model", which these bring along.
        skip: patterns of projections that stay exact, as for `outliers.quantize`.
        draws: how many times perplexities, divergence and agreement are measured, with embeddings changed by 1e-6.
        calibration: how large the inputs are, which some remedies have to know; see `outliers.calibrate`.
        attention_mask: as for `outliers.perplexity`.

    Raises:
        UserError: the scheme is unknown or quantizes nothing, a part of the damage is unknown, several draws are asked
            of a model in 16 bits; as `outliers.quantize` and `outliers.perplexity`.
    """
    from outliers.metrics.measurement import records_of
    from outliers.quantization.convert import check_calibrated
    from outliers.subjects.given import Given
    from outliers.text.blocks import sequences
    from outliers.variants.draw import check_draws

    by = [by] if isinstance(by, str) else by
    blocks, scheme = list(sequences(blocks, attention_mask)), get_scheme(scheme)
    check_draws(draws, str(model.dtype).removeprefix("torch."))
    check_calibrated(scheme, calibration)
    if not blocks:
        raise UserError("no blocks to evaluate; expected at least one")
    subject, variants = Given(model, blocks), [Quantized(scheme, tuple(skip), calibration=calibration)]
    cells = _cells(subject, variants, by, draws)
    cells += _by_stack(subject, model.config, variants, by, draws, by is not DAMAGE_BY)
    return damages_of(records_of(cells))[scheme.name]
