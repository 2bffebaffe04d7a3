"""Features whose values are replaced in the inputs of projections."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outliers.errors import UserError, shown, unknown_name
from outliers.quantization.schemes import BASELINE
from outliers.variants.term import Term

if TYPE_CHECKING:  # to read a variant takes no torch, so that a mistake is refused at once
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy import Projection
    from outliers.tracing.result import Trace

Means = dict[tuple[int, str], "torch.Tensor"]


def _zero(values, _mean, _generator):
    return values.new_zeros(values.shape)


def _mean(values, mean, _generator):
    return mean.to(values).expand_as(values)


def _shuffle(values, _mean, generator):
    import torch

    order = torch.rand(values.shape, generator=generator).argsort(0)
    return values.gather(0, order.to(values.device))


# Method: (values (T, features), their means over the text (features,), generator) to values.
METHODS = {"zero": _zero, "mean": _mean, "shuffle": _shuffle}
SEEDS = range(2**63)  # what the generators of numpy and torch both take
WHERE = ("attn_in",)  # as the paper has it


@dataclass(frozen=True)
class Intervention:
    """Features whose values are replaced in the inputs of projections.

    method: "zero" (the paper's), "mean", their mean over the text, or "shuffle", their values permuted over the
    positions of the sequence, each feature by itself. means: mean of every feature by layer and role, for "mean";
    interventions that differ in nothing else are equal.
    """

    features: tuple[int, ...]
    method: str = "zero"
    seed: int = 0
    means: Means = field(default_factory=dict, repr=False, compare=False)

    @contextmanager
    def on(self, projections: "list[Projection]") -> Iterator[None]:
        """Replace the features in the inputs of these projections; what is shuffled is a function of the seed."""
        import torch

        from outliers.models.hooks import input_hooks

        if not self.features:
            yield
            return
        generator = torch.Generator().manual_seed(self.seed)
        columns = list(self.features)

        def replaced(layer: int, role: str, x: torch.Tensor) -> torch.Tensor:
            mean = self.means[layer, role][columns] if self.means else None
            changed = x.clone()
            changed[:, columns] = METHODS[self.method](x[:, columns], mean, generator)
            return changed

        with input_hooks(projections, replaced):
            yield


@dataclass(frozen=True)
class Ablated:
    """An intervention in all layers at once, so that altered states propagate.

    where: roles of the inputs, of "attn_in" (the paper's) and "ffn_in".
    """

    intervention: Intervention
    where: tuple[str, ...] = WHERE
    needs_calibration = False

    @classmethod
    def read(cls, term: Term) -> "Ablated":
        """`METHOD(FEATURE,FEATURE@ROLE/ROLE,seed=SEED)`.

        Raises:
            UserError: a role or an option is unknown, or the seed is none.
        """
        term.check_options(["seed"])
        seed = term.options.get("seed", 0)
        if not isinstance(seed, int) or seed not in SEEDS:
            raise UserError(f"'{term}' has the seed {shown(seed)}; expected a whole number from 0 to 2**63 - 1")
        if term.places:
            from outliers.tracing.result import STREAM  # late, for it brings torch

            for role in term.places:
                if role not in STREAM:
                    raise unknown_name("place", role, STREAM)
        return cls(Intervention(term.features, term.name, seed), term.places or WHERE)

    @property
    def name(self) -> str:
        """What is done to which features, as `read` takes it."""
        if not self.intervention.features:
            return BASELINE
        one, where = self.intervention, () if self.where == WHERE else self.where
        return str(Term(one.method, one.features, where, {"seed": one.seed} if one.seed else {}))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        """What is done to which features, and where."""
        one = self.intervention
        return {"method": one.method, "features": list(one.features), "where": list(self.where), "seed": one.seed}

    @property
    def needs_trace(self) -> bool:
        """Whether the values that it puts in are not known yet."""
        return self.intervention.method == "mean" and bool(self.intervention.features) and not self.intervention.means

    def knowing(self, trace: "Trace") -> "Ablated":
        """The same with the means over the text that a trace has seen, which the method "mean" needs."""
        return replace(self, intervention=replace(self.intervention, means=feature_means(trace)))

    def first_layer(self, model: "PreTrainedModel") -> int:
        """From which decoder layer on it changes anything: the first, if there are features."""
        return 0 if self.intervention.features else model.config.num_hidden_layers

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        """The model itself, with hooks."""
        from outliers.models.anatomy import check_features, readers

        if self.needs_trace:
            raise UserError("an ablation by the mean needs what the text is like; give it a trace: knowing(trace)")
        if self.intervention.features:
            check_features(self.intervention.features, model.config.hidden_size)
        inputs = [one for one in readers(model) if one.role in self.where and layer in (None, one.layer)]
        with self.intervention.on(inputs):
            yield model


def feature_means(found: "Trace") -> Means:
    """Mean of every feature over the text of a trace, by layer and role."""
    from outliers.tracing.result import STREAM

    means = {role: found.statistics[f"{role}.sum"] / found.positions for role in STREAM}
    return {(layer, role): mean for role, of_role in means.items() for layer, mean in enumerate(of_role)}
