"""Quantization schemes as variants, for a whole model or some of its places."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.quantization.plans.plan import MARK, Plan, expanded, read_plan
from outliers.quantization.schemes import BASELINE, SCHEMES, Scheme, get_scheme
from outliers.variants.edges import LIMITS, PLACES_BY_FIELD, AtPlaces
from outliers.variants.term import read_number, write_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outliers.models.anatomy import Projection
    from outliers.quantization.magnitudes import Calibration

OPTIONS = ("alpha", *LIMITS)
INSTEAD = re.compile(r"instead=(\((?P<remedied>[^()]+)\)|(?P<scheme>[^@()]+))@(?P<places>.+)")


@dataclass(frozen=True)
class Quantized(AtPlaces):
    """A model under a scheme; skip, only, calibration, instead: as for `outliers.quantize`.

    Example:
        >>> outliers.Quantized(outliers.SCHEMES["absmax"], skip=("ffn_out",)).name
        'absmax+skip=ffn_out'
    """

    scheme: Scheme
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    calibration: "Calibration | None" = None
    instead: tuple[tuple[Scheme, tuple[str, ...]], ...] = ()

    @classmethod
    def read(cls, terms: Sequence[str]) -> "Quantized":
        """Parse a scheme with its remedies and options, or `@FILE`, a whole plan.

        Options are `alpha=NUMBER`, `only=PLACE/PLACE`, `skip=PLACE/PLACE` or `skip=@FILE` of a plan, and, once for each
        scheme, `instead=SCHEME@PLACE/PLACE`.

        Raises:
            UserError: an option is repeated, has no value, or is incompatible with the scheme; as `get_scheme` and
                `read_plan`.
        """
        if terms[0].startswith(MARK):
            return cls.of_plan(read_plan("+".join(terms).removeprefix(MARK)))
        if wrong := [term for term in terms[:1] if term.partition("=")[0] in (*OPTIONS, "instead")]:
            reordered = "+".join([*(terms[1:] or ["absmax"]), *wrong])
            raise UserError(f"'{'+'.join(terms)}': an option stands behind its scheme: {reordered}")
        instead = [match for match in map(INSTEAD.fullmatch, terms[1:]) if match]
        terms = [term for term in terms if not INSTEAD.fullmatch(term)]
        pairs = [term.partition("=")[::2] for term in terms[1:]]
        options = {option: value for option, value in pairs if option in OPTIONS and value}
        scheme_terms = [terms[0]]
        scheme_terms += [term for term, (option, _) in zip(terms[1:], pairs, strict=True) if option not in OPTIONS]
        if len(scheme_terms) + len(options) < len(terms):
            raise UserError(
                f"'{'+'.join(terms)}' has an option twice or without a value; expected each once, as in alpha=4, "
                "only=ffn_out or skip=layers.0/*.down_proj"
            )
        scheme = get_scheme("+".join(scheme_terms))
        if "alpha" in options:
            if scheme.outlier_threshold is None:
                raise UserError(
                    f"scheme '{scheme.name}' has no threshold of outliers, which alpha={options['alpha']} would "
                    "change; expected a scheme such as llm.int8, or no alpha"
                )
            scheme = get_scheme(scheme, read_number(options["alpha"], "+".join(terms)))
        places = {option: _places(options[option]) for option in LIMITS if option in options}
        others = [(get_scheme(match["remedied"] or match["scheme"]), _places(match["places"])) for match in instead]
        return cls(scheme, **places, instead=tuple(others))

    @classmethod
    def of_plan(cls, plan: Plan) -> "Quantized":
        instead = [(get_scheme(name), tuple(paths)) for name, paths in plan.instead.items()]
        return cls(get_scheme(plan.scheme), tuple(plan.exact), instead=tuple(instead))

    @property
    def name(self) -> str:
        """The text form, which `read` parses; a custom scheme appears by its name alone."""
        alpha = [] if self._own_alpha is None else [f"alpha={write_number(self._own_alpha)}"]
        return "+".join([self.scheme.name, *alpha, *self._places])

    @property
    def change_terms(self) -> list[str]:
        return [*self.scheme.name.split("+")[1:], *self._places]

    @property
    def _places(self) -> list[str]:
        places = self.limits
        for scheme, paths in self.instead:
            name = f"({scheme.name})" if "+" in scheme.name else scheme.name
            places.append(f"instead={name}@{'/'.join(paths)}")
        return places

    @property
    def _own_alpha(self) -> float | None:
        """The threshold of outliers, if it differs from that of the scheme's name."""
        try:
            usual = get_scheme(self.scheme.name).outlier_threshold
        except UserError:  # a custom scheme, which is in no table and appears by its name alone
            return None
        return None if self.scheme.outlier_threshold == usual else self.scheme.outlier_threshold

    def fields(self, model: "PreTrainedModel | None" = None) -> dict:
        """Return the scheme's name, the fields of `row_fields`, and the hash of the calibration text."""
        from outliers.quantization.fields import row_fields

        fields = {"scheme": self.scheme.name} | row_fields(self.scheme, model, self.skip, self.only, dict(self.instead))
        if self.calibration is not None and self.scheme.needs_calibration:
            fields["calibration_hash"] = self.calibration.tokens_hash
        return fields

    @property
    def is_exact(self) -> bool:
        return not self.scheme.quantizes and not self.instead

    @property
    def schemes(self) -> tuple["Quantized", ...]:
        return (self,)

    @property
    def needs_calibration(self) -> bool:
        return self.calibration is None and self.scheme.needs_calibration

    @property
    def has_output_errors(self) -> bool:
        return self.scheme.quantizes_projections or bool(self.instead)

    @property
    def has_codes(self) -> bool:
        return self.scheme.quantizes_projections and not self.only and not self.instead

    @property
    def place_kinds(self) -> tuple[str, ...]:
        return ("role", "layer", "stack", "expert") if self.scheme.quantizes else ()

    @property
    def in_memory(self) -> bool:
        return self.scheme.learns

    def calibrated(self, calibration: "Calibration | None") -> "Quantized":
        return replace(self, calibration=calibration)

    def _schemes_in(self, model: "PreTrainedModel") -> "dict[Projection, Scheme]":
        """Return the schemes of the projections, routers and attentions that the variant quantizes."""
        from outliers.models.anatomy import projections
        from outliers.quantization.convert import quantized_parts, resolve_instead, skipped

        exact = skipped(model, self.skip, self.scheme, self.only)
        others = resolve_instead(model, self.scheme, exact, dict(self.instead))
        schemes = dict.fromkeys(quantized_parts(model, self.scheme), self.scheme)
        schemes |= {part: others[part.path] for part in projections(model) if part.path in others}
        return {part: scheme for part, scheme in schemes.items() if part.path not in exact}

    def first_layer(self, model: "PreTrainedModel") -> int:
        from outliers.models.anatomy import decoder_layers

        return min((part.layer for part in self._schemes_in(model)), default=len(decoder_layers(model)))

    def layers(self, model: "PreTrainedModel") -> tuple[frozenset, ...]:
        """Return keys of the changes to each layer, so that variants that skip different places share unchanged
        layers."""
        from outliers.models.anatomy import decoder_layers

        if self.calibration is not None or not self.skip:
            return super().layers(model)
        changes: list[set] = [set() for _ in decoder_layers(model)]
        for part, scheme in self._schemes_in(model).items():
            changes[part.layer].add((part.path, scheme))
        return tuple(map(frozenset, changes))

    def places(self, model: "PreTrainedModel", field: str) -> dict[str | int, str]:
        """Return the roles, layers, stacks or experts (field) with quantized parts, each with its place for `only` and
        `skip`."""
        from outliers.models.anatomy.stack_views import stack_views
        from outliers.quantization.convert import quantized_parts, skipped

        exact = skipped(model, self.skip, self.scheme)
        parts = [part for part in quantized_parts(model, self.scheme) if part.path not in exact]
        parts = [part for part in parts if field != "expert" or part.expert is not None]
        stacks = {layer: view for view in stack_views(model).values() if not view.cross for layer in view.layers}
        by_stack = {"stack": lambda part: (stacks[part.layer].name, stacks[part.layer].place)}
        return dict(map((PLACES_BY_FIELD | by_stack)[field], parts))

    def served(self, model: str, dtype: str, device: str, revision: str | None) -> "PreTrainedModel":
        """Load a model by its name, see `outliers.load_model`, without exact weights that int8 codes can replace."""
        from outliers.models.load import load_model
        from outliers.quantization.store import load_int8

        if self.has_codes:
            return load_int8(model, self.scheme, dtype, device, revision, skip=self.skip)
        loaded = load_model(model, dtype, device, revision)
        return loaded if self.is_exact else self._quantized(loaded)

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        yield self._quantized(model)

    def _quantized(self, model: "PreTrainedModel") -> "PreTrainedModel":
        from outliers.quantization.convert import quantize

        return quantize(model, self.scheme, "exact", self.skip, self.calibration, self.only, dict(self.instead))


def _places(written: str) -> tuple[str, ...]:
    return tuple(expanded([written] if written.startswith(MARK) else written.split("/")))


EXACT = Quantized(SCHEMES[BASELINE])  # the unquantized model
