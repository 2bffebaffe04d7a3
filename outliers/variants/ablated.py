"""Ablations: the values of features are replaced in the inputs of projections."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outliers.criterion import STREAM, role_of
from outliers.errors import UserError, shown
from outliers.models.variant import Variant
from outliers.quantization.schemes import BASELINE
from outliers.variants.edges import NORMS, ROLES, Place, replaced_readers
from outliers.variants.term import Term

if TYPE_CHECKING:  # parsing a variant does not import torch, so that a mistake is reported at once
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy import Projection
    from outliers.tracing.result import Trace

Means = dict[tuple[int, str], "torch.Tensor"]


def _shuffle(values, _mean, generator):
    import torch

    order = torch.rand(values.shape, generator=generator).argsort(0)
    return values.gather(0, order.to(values.device))


# Method: (values (T, features), their means over the text (features,), generator) to values.
METHODS = {
    "zero": lambda values, _mean, _generator: values.new_zeros(values.shape),
    "mean": lambda values, mean, _generator: mean.to(values).expand_as(values),
    "shuffle": _shuffle,
}
SEEDS = range(2**63)  # valid seeds of the generators of numpy and torch
WHERE = ("attn_in",)  # as in the paper


@dataclass(frozen=True)
class Intervention:
    """A replacement of the values of features.

    method: "zero" (the paper's), "mean", their mean over the text, or "shuffle", their values permuted over the
    positions of the sequence, each feature separately. The permutation depends only on the seed and the number of
    positions, so that the order in which layers and sequences are computed does not matter. means: the mean of every
    feature by layer and role, for "mean"; they are ignored when interventions are compared.

    Example:
        >>> outliers.Ablated(outliers.Intervention((3, 17), "zero")).name
        'zero(3,17)'
    """

    features: tuple[int, ...]
    method: str = "zero"
    seed: int = 0
    means: Means = field(default_factory=dict, repr=False, compare=False)

    @contextmanager
    def on(
        self, projections: "list[Projection]", outputs: "Collection[tuple[Projection, torch.Tensor]]" = ()
    ) -> Iterator[None]:
        """Replace the features in the inputs of projections within this context.

        outputs: further projections, of which only some outputs, such as those of a head, read the change, each with
        the mask of these outputs, bool (outputs,).
        """
        import torch

        from outliers.models.hooks import independent, input_hooks, output_hooks

        if not self.features:
            yield
            return
        columns = list(self.features)

        @independent
        def replaced(layer: int, role: str, x: torch.Tensor) -> torch.Tensor:
            mean = self.means[layer, role][columns] if self.means else None
            changed = x.clone()
            changed[:, columns] = METHODS[self.method](x[:, columns], mean, torch.Generator().manual_seed(self.seed))
            return changed

        with input_hooks(projections, replaced), output_hooks(outputs, replaced):
            yield


@dataclass(frozen=True)
class Ablated(Variant):
    """An intervention in all layers at once, so that changed hidden states propagate.

    where: the places in which the features are replaced: roles of inputs, "attn_in" (the paper's) and "ffn_in", or a
    selection of their readers, see `Place`.

    Raises:
        UserError: a place is unknown; or the method is "mean" and a place is of a norm or an expert, for which traces
            have no means; or places are of the residual stream and of experts.

    Example:
        >>> ablated = outliers.Ablated(outliers.Intervention((3,)), where=("attn_in", "ffn_in"))
        >>> perplexity = outliers.perplexities(model, blocks, [ablated])
    """

    intervention: Intervention
    where: tuple[str, ...] = WHERE
    keeps_weights = True

    def __post_init__(self):
        places = [Place.read(written) for written in self.where]
        # our own names, so that a row is found by either name
        object.__setattr__(self, "where", tuple(place.written for place in places))
        for place in places:
            if self.intervention.method == "mean" and (set(place.parts) & set(NORMS) or place.expert is not None):
                part = "a norm" if place.expert is None else "an expert"
                raise UserError(
                    f"the mean of what {part} reads, as '{place.written}' asks for it, is not known; expected zero or "
                    "shuffle, or a projection such as q"
                )

    @classmethod
    def read(cls, term: Term) -> "Ablated":
        """Parse `METHOD(FEATURE,FEATURE@PLACE/PLACE,seed=SEED)`.

        Raises:
            UserError: a place or an option is unknown, or the seed is invalid.
        """
        term.check_options(["seed"])
        seed = term.options.get("seed", 0)
        if not isinstance(seed, int) or seed not in SEEDS:
            raise UserError(f"'{term}' has the seed {shown(seed)}; expected a whole number from 0 to 2**63 - 1")
        return cls(Intervention(term.features, term.name, seed), term.places or WHERE)

    @property
    def name(self) -> str:
        if not self.intervention.features:
            return BASELINE
        where, seed = () if self.where == WHERE else self.where, self.intervention.seed
        return str(Term(self.intervention.method, self.intervention.features, where, {"seed": seed} if seed else {}))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        method, features, seed = self.intervention.method, self.intervention.features, self.intervention.seed
        return {"method": method, "features": list(features), "where": list(self.where), "seed": seed}

    @property
    def needs_trace(self) -> bool:
        return self.intervention.method == "mean" and bool(self.intervention.features) and not self.intervention.means

    def knowing(self, *traces: "Trace") -> "Ablated":
        """Return the ablation with the feature means of traces, one for each stack; the method "mean" needs them."""
        means = {place: mean for trace in traces for place, mean in feature_means(trace).items()}
        return replace(self, intervention=replace(self.intervention, means=means))

    @property
    def in_attention(self) -> bool:
        """Whether only queries, keys and values read the change."""
        return all(set(place.parts) <= set(ROLES["attn_in"]) for place in map(Place.read, self.where))

    @property
    def attention_ablation(self) -> "Ablated | None":
        """The ablation whose effect on attention is measured layer by layer: of the input of q/k/v if the places are
        whole roles; itself if only q, k or v read it; else None."""
        if set(self.where) <= ROLES.keys():
            return Ablated(self.intervention)
        return self if self.in_attention else None

    def first_layer(self, model: "PreTrainedModel") -> int:
        if not self.intervention.features:
            from outliers.models.anatomy import decoder_layers

            return len(decoder_layers(model))
        return min(place.layers[0] if place.layers else 0 for place in map(Place.read, self.where))

    def check(self, model: "PreTrainedModel") -> None:
        """Raise UserError if a model, which may be on the meta device, lacks a feature or a place."""
        self._check_features(model)
        replaced_readers(model, self.where)

    def _check_features(self, model: "PreTrainedModel") -> None:
        from outliers.models.anatomy import check_features, features_of, shape_of

        if not self.intervention.features:
            return
        places = [Place.read(written) for written in self.where]
        units = [place for place in places if place.parts == ("down",)]
        if units and len(units) < len(places):
            raise UserError(
                f"'{self.name}' has features of the residual stream and units of an expert; expected places of one kind"
            )
        read = replaced_readers(model, self.where).inputs if units else ()
        width = min(shape_of(part.module)[1] for part in read) if units else features_of(model)
        check_features(self.intervention.features, width)

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        if self.needs_trace:
            raise UserError("an ablation by the mean needs the means over the text; give it a trace: knowing(trace)")
        self._check_features(model)
        with self.intervention.on(*replaced_readers(model, self.where, layer)):
            yield model


def feature_means(trace: "Trace") -> Means:
    """Return the mean of every feature over the text of a trace, by layer and role."""
    states = [state for state in trace.roles if role_of(state) in STREAM]
    means = {state: trace.statistics[f"{state}.sum"] / trace.positions for state in states}
    return {
        (layer, role): mean
        for role, by_layer in means.items()
        for layer, mean in enumerate(by_layer, trace.first_layer)
    }
