"""What is done to a model before it is measured, on one axis: schemes, ablations, planted outliers, several at once.

Each stands for the layers of a resident model, or for that one of a streamed model whose turn it is (see
`outliers.models.stream.Variant`); each can be pickled, and so travels to the machines of a cluster.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import readers
from outliers.models.stream import AS_IT_IS, Variant
from outliers.quantization.calibration import Calibration
from outliers.quantization.convert import quantize
from outliers.quantization.fields import row_fields
from outliers.quantization.schemes import Scheme
from outliers.tracing.result import STREAM, Trace
from outliers.variants.interventions import Intervention, Means
from outliers.variants.plant import plant


@dataclass(frozen=True)
class Quantized:
    """Projections under a scheme; skip, calibration: as for `outliers.quantize`."""

    scheme: Scheme
    skip: tuple[str, ...] = ()
    calibration: Calibration | None = None
    needs_trace = False

    @property
    def name(self) -> str:
        """The scheme's."""
        return self.scheme.name

    def fields(self, model: PreTrainedModel | None = None) -> dict:
        """The scheme's name, what else identifies it, see `row_fields`, and of what text its calibration is."""
        fields = {"scheme": self.name} | row_fields(self.scheme, model, self.skip)
        if self.calibration is not None and self.scheme.needs_calibration:
            fields["calibration_hash"] = self.calibration.tokens_hash
        return fields

    @contextmanager
    def on(self, model: PreTrainedModel, _layer: int | None = None) -> Iterator[PreTrainedModel]:
        """A model that shares what is not quantized."""
        yield quantize(model, self.scheme, skip=self.skip, calibration=self.calibration)


@dataclass(frozen=True)
class Ablated:
    """Features whose values are replaced in the inputs of projections, and altered states propagate.

    where: roles of the inputs, of "attn_in" (the paper's) and "ffn_in".
    """

    intervention: Intervention
    where: tuple[str, ...] = ("attn_in",)

    @property
    def name(self) -> str:
        """What is done to which features."""
        return f"{self.intervention.method} of {', '.join(map(str, self.intervention.features)) or 'nothing'}"

    def fields(self, _model: PreTrainedModel | None = None) -> dict:
        """What is done to which features, and where."""
        one = self.intervention
        return {"method": one.method, "features": list(one.features), "where": list(self.where), "seed": one.seed}

    @property
    def needs_trace(self) -> bool:
        """Whether the values that it puts in are not known yet."""
        return self.intervention.method == "mean" and bool(self.intervention.features) and not self.intervention.means

    def knowing(self, trace: Trace) -> "Ablated":
        """The same with the means over the text that a trace has seen, which the method "mean" needs."""
        return replace(self, intervention=replace(self.intervention, means=feature_means(trace)))

    @contextmanager
    def on(self, model: PreTrainedModel, layer: int | None = None) -> Iterator[PreTrainedModel]:
        """The model itself, with hooks."""
        if self.needs_trace:
            raise UserError("an ablation by the mean needs what the text is like; give it a trace: knowing(trace)")
        inputs = [one for one in readers(model) if one.role in self.where and layer in (None, one.layer)]
        with self.intervention.on(inputs):
            yield model


@dataclass(frozen=True)
class Planted:
    """Features of the norms' outputs scaled by a factor, which the weights that read them undo."""

    features: tuple[int, ...]
    factor: float
    needs_trace = False

    @property
    def name(self) -> str:
        """What is planted."""
        return f"{self.factor:g} times {', '.join(map(str, self.features))}"

    def fields(self, _model: PreTrainedModel | None = None) -> dict:
        """What is planted."""
        return {"planted": list(self.features), "factor": self.factor}

    @contextmanager
    def on(self, model: PreTrainedModel, _layer: int | None = None) -> Iterator[PreTrainedModel]:
        """A model that shares what is not scaled."""
        yield plant(model, self.features, self.factor)


@dataclass(frozen=True)
class Together:
    """Several variants, each on what the one before it made: an ablation under a scheme."""

    variants: tuple[Variant, ...]

    @property
    def name(self) -> str:
        """All names."""
        return ", ".join(variant.name for variant in self.variants) or AS_IT_IS.name

    def fields(self, model: PreTrainedModel | None = None) -> dict:
        """Those of all."""
        return {field: value for variant in self.variants for field, value in variant.fields(model).items()}

    @property
    def needs_trace(self) -> bool:
        """Whether one of them does."""
        return any(variant.needs_trace for variant in self.variants)

    def knowing(self, trace: Trace) -> "Together":
        """The same with what those need that need a trace."""
        return Together(tuple(one.knowing(trace) if one.needs_trace else one for one in self.variants))

    @contextmanager
    def on(self, model: PreTrainedModel, layer: int | None = None) -> Iterator[PreTrainedModel]:
        """What the last one makes."""
        with ExitStack() as stack:
            for variant in self.variants:
                model = stack.enter_context(variant.on(model, layer))
            yield model


def feature_means(found: Trace) -> Means:
    """Mean of every feature over the text of a trace, by layer and role."""
    means = {role: found.statistics[f"{role}.sum"] / found.positions for role in STREAM}
    return {(layer, role): mean for role, of_role in means.items() for layer, mean in enumerate(of_role)}


def parts_of(variant: Variant) -> tuple[Variant, ...]:
    """The variants that it consists of, in the order in which they act."""
    return variant.variants if isinstance(variant, Together) else (variant,)


def schemes_of(variant: Variant) -> list[Quantized]:
    """Those that put projections under a scheme."""
    return [part for part in parts_of(variant) if isinstance(part, Quantized)]


def calibrated(variants: Iterable[Variant], found: Callable[[list[Scheme]], Calibration | None]) -> list[Variant]:
    """Variants that know how large the inputs are; found: the calibration that some schemes need, None if none does."""
    variants = list(variants)
    parts = [part for variant in variants for part in schemes_of(variant) if part.calibration is None]
    calibration = found([part.scheme for part in parts])
    return [variant if calibration is None else _knowing(variant, calibration) for variant in variants]


def _knowing(variant: Variant, calibration: Calibration) -> Variant:
    if isinstance(variant, Together):
        return Together(tuple(_knowing(part, calibration) for part in variant.variants))
    return replace(variant, calibration=calibration) if isinstance(variant, Quantized) else variant
