"""What schemes damage in a model: the error of each projection, and what each role and layer costs of perplexity."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd
import torch
from transformers import PreTrainedModel

from outliers.errors import BrokenModel, UserError, unknown_name
from outliers.measurements.bench import Bench, Job, check_schemes, named, say_what_is_left
from outliers.measurements.damage.errors import EXACT, BlockErrors, Error, block_errors
from outliers.measurements.damage.exchanges import Exchange, exchange_losses, exchanges
from outliers.measurements.measurement import Keeps, Measurement, Question
from outliers.measurements.sweep import coded, scheme_fields, schemes_of
from outliers.metrics.agreement.measure import Distance, distances
from outliers.metrics.perplexity.measure import Loss, perplexity_of, variant_losses
from outliers.models.anatomy import projections
from outliers.models.skeleton import skeleton
from outliers.models.stream import is_streamed
from outliers.quantization.calibration import Calibration
from outliers.quantization.convert import quantize, skipped
from outliers.quantization.schemes import BASELINE, Scheme, get_scheme
from outliers.specification.kinds import DAMAGE_BY, Damage
from outliers.text.blocks import sequences
from outliers.variants.draw import check_draws, drawn, scattered
from outliers.variants.quantized import Quantized

Row = dict[str, Any]
DISTANT = 3  # hidden states of each block that a distance keeps: with the scheme, without it, and the last ones


class Asked(NamedTuple):
    """What is asked of a model.

    view: a name in `VIEWS`. variant: a scheme with what it leaves; None where nothing is quantized. exchange: of which
    role or layer. places: layer, role and path of each projection that its rows are of.
    """

    view: str
    variant: Quantized | None = None
    exchange: Exchange | None = None
    places: tuple[tuple[int, str, str], ...] = ()

    @property
    def name(self) -> str:
        """What to call it in messages, the same for what is alike: there are many layers."""
        what = f"{self.exchange.kind} one {self.exchange.field}" if self.exchange else VIEWS[self.view].name
        return f"{self.variant.scheme.name}, {what}" if self.variant and VIEWS[self.view].drawn else what

    def knowing(self, calibration: Calibration | None) -> "Asked":
        """The same with what its scheme may have to know of the inputs."""
        return self._replace(variant=self.variant and self.variant.calibrated(calibration))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What its rows are about."""
        return tuple(metric.format(kind=self.exchange and self.exchange.kind) for metric in VIEWS[self.view].metrics)


def plan(model: PreTrainedModel, schemes: Sequence[Scheme], by: Iterable[str], skip: Sequence[str]) -> list[Asked]:
    """What is asked of a model: the errors of all schemes first, then scheme by scheme.

    Roles and layers bring what is over the model: it is what they are compared with. Projections alone have errors, so
    a scheme that quantizes none of them has none.

    Args:
        model: of which the names of modules are looked at, and no weight.
        schemes, by, skip: as for `damage`.

    Raises:
        UserError: a part of the damage is unknown, or none is asked for, or a scheme quantizes nothing, or nothing of
            which an error is asked for.
    """
    by, variants = {by} if isinstance(by, str) else set(by), [Quantized(scheme, tuple(skip)) for scheme in schemes]
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
    asked = []
    if "error" in by:
        left = skipped(model, skip, schemes[0])
        places = tuple((one.layer, one.role, one.path) for one in projections(model))
        quantized = tuple(place for place in places if place[2] not in left)
        asked += [
            Asked("input", places=places),
            *(Asked("error", one, places=quantized) for one in variants if one.scheme.quantizes_projections),
        ]
    if by - {"error"}:
        asked.append(Asked("baseline"))
    for variant in variants if by - {"error"} else ():
        asked.append(Asked("model", variant))
        fields = [field for field in DAMAGE_BY if field in by - {"error", "model"}]
        found = chain.from_iterable(exchanges(model, variant, field) for field in fields)
        asked += [Asked("exchange", variant, one) for one in found]
    return asked


def measure(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], asked: Sequence[Asked], draws: int = 1
) -> list[list[list]]:
    """What is asked at once of a model, resident or streamed: of each, draw by draw, what each block shows."""
    view, found = VIEWS[asked[0].view], []
    for draw in range(draws if view.drawn else 1):
        with drawn(model, draw):
            found.append(view.measure(model, blocks, asked))
    return [list(of_one) for of_one in zip(*found, strict=True)]


def _errors(model: PreTrainedModel, blocks: Iterable[torch.Tensor], asked: Sequence[Asked]) -> list[list]:
    variants = [one.variant for one in asked if one.variant]
    found = block_errors(model, blocks, variants)

    def of(one: Asked, block: BlockErrors):
        if one.variant is None:
            return block.largest
        number = variants.index(one.variant)
        return {path: errors[number] for path, errors in block.errors.items()}

    return [[of(one, block) for block in found] for one in asked]


def _baselines(model: PreTrainedModel, blocks: Iterable[torch.Tensor], asked: Sequence[Asked]) -> list[list[Loss]]:
    return variant_losses(model, blocks, [EXACT for _ in asked])


def _distances(model: PreTrainedModel, blocks: Iterable[torch.Tensor], asked: Sequence[Asked]) -> list[list[Distance]]:
    return [distances(model, blocks, one.variant) for one in asked]


def _exchanges(model: PreTrainedModel, blocks: Iterable[torch.Tensor], asked: Sequence[Asked]) -> list[list[Loss]]:
    return exchange_losses(model, blocks, asked[0].variant, [one.exchange for one in asked])


def _input_rows(one: Asked, draws: list[list]) -> list[Row]:
    """Of each hidden state that projections read the largest value, the first of equal ones."""
    states = dict.fromkeys((layer, role) for layer, role, _ in one.places)
    largest = [(place, max((block[place] for block in draws[0]), key=lambda found: found.value)) for place in states]
    return [
        {"metric": one.metrics[0], "layer": layer, "role": role, **found._asdict(), "unit": "1"}
        for (layer, role), found in largest
    ]


def _error_rows(one: Asked, draws: list[list[dict[str, Error]]]) -> list[Row]:
    """Of each projection its error over all tokens, and the mean of those of the tokens."""
    rows = []
    for layer, role, path in one.places:
        square, energy, ratios, tokens = map(math.fsum, zip(*(block[path] for block in draws[0]), strict=True))
        values = square / energy if energy else 0.0, ratios / tokens if tokens else 0.0
        if not (math.isfinite(square) and math.isfinite(energy)):
            raise BrokenModel(
                f"the output of '{path}' has the energy {energy:g}, and its error {square:g}; expected finite numbers: "
                "try another dtype (float32, bfloat16) or check the weights"
            )
        place = {"layer": layer, "role": role, "projection": path, "unit": "1"}
        rows += [{"metric": metric, "value": value, **place} for metric, value in zip(one.metrics, values, strict=True)]
    return rows


def _perplexity_rows(one: Asked, draws: list[list[Loss]]) -> list[Row]:
    return [{"metric": one.metrics[0], **scattered(list(map(perplexity_of, draws))), "unit": "1"}]


def _distance_rows(one: Asked, draws: list[list[Distance]]) -> list[Row]:
    values = [_of_text(blocks) for blocks in draws]
    return [
        {"metric": metric, **scattered([of_draw[number] for of_draw in values]), "unit": unit}
        for number, (metric, unit) in enumerate(zip(one.metrics, ("1", "nat", "1"), strict=True))
    ]


def _of_text(blocks: list[Distance]) -> tuple[float, float, float]:
    """Perplexity, mean divergence, and share of positions that agree."""
    tokens = sum(block.loss.tokens for block in blocks)
    kl, agreeing = math.fsum(block.kl for block in blocks), sum(block.agreeing for block in blocks)
    return perplexity_of([block.loss for block in blocks]), kl / tokens, agreeing / tokens


class View(NamedTuple):
    """One way to look at the damage.

    name: in messages. metrics: of its rows. measure: of a model, blocks and what is asked at once, for each that is
    asked what each block shows. rows: of what is asked and that, draw by draw, the rows. reads: how many times a block
    passes. drawn: whether it is measured under draws.
    """

    name: str
    metrics: tuple[str, ...]
    measure: Callable[[PreTrainedModel, Iterable[torch.Tensor], Sequence[Asked]], list[list]]
    rows: Callable[[Asked, list[list]], list[Row]]
    reads: int = 1
    drawn: bool = True


VIEWS = {
    "input": View("errors", ("damage.largest_input",), _errors, _input_rows, drawn=False),
    "error": View("errors", ("damage.error", "damage.error_by_token"), _errors, _error_rows, drawn=False),
    "baseline": View("not quantized", ("perplexity",), _baselines, _perplexity_rows),
    "model": View(
        "the model", ("perplexity", "damage.kl", "damage.top1_agreement"), _distances, _distance_rows, reads=2
    ),
    "exchange": View("", ("damage.perplexity_{kind}",), _exchanges, _perplexity_rows),
}


class DamageRows(Measurement[Damage]):
    """Rows of every scheme: of each projection `damage.error` and `damage.error_by_token`; of each role and layer
    `damage.perplexity_only` and `damage.perplexity_without`; of the model `perplexity`, `damage.kl` and
    `damage.top1_agreement`. And of no scheme `damage.largest_input` of each hidden state that projections read, and the
    perplexity without any."""

    splits = True
    experiment = "damage"

    def subjects(self) -> list[Job]:
        check_draws(self.spec.draws, self.spec.dtype)
        self.schemes = schemes_of(self.spec)
        job = Job.of(self.spec.model, self.spec.revision, self.spec)
        if any(scheme.needs_calibration for scheme in self.schemes):
            job = job.calibrated(self.spec)
        check_schemes(job.config, self.schemes, self.spec.skip)
        self.asked = plan(skeleton(job.config, torch.bfloat16), self.schemes, self.spec.by, self.spec.skip)
        say_what_is_left(job.name, job.config, self.schemes)
        return [job]

    def keeps(self, _job: Job) -> Keeps:
        fields = Counter((one.variant.name, one.exchange.field) for one in self.asked if one.exchange)
        return Keeps((tuple(self.schemes),), variants=max([DISTANT, *fields.values()]))

    def total(self, _job: Job) -> int:
        return sum(map(self._steps, self.asked))

    def look(self, bench: Bench, job: Job) -> tuple[dict, dict]:
        model, fields = bench.load(job, self.spec)
        schemes = [get_scheme(BASELINE), *self.schemes]
        facts = {scheme.name: scheme_fields(scheme, model, self.spec.skip, job.calibration) for scheme in schemes}
        return fields, facts

    def questions(self, _job: Job, facts: dict, _trace: None) -> list[Question]:
        return [self._question(one, facts) for one in self.asked]

    def _question(self, one: Asked, facts: dict) -> Question:
        fields = {} if one.view == "input" else facts[one.variant.scheme.name if one.variant else BASELINE]
        if VIEWS[one.view].drawn:
            fields = fields | {"draws": self.spec.draws}
        if one.exchange:
            fields = fields | {one.exchange.field: one.exchange.place}
        return Question(one.name, fields, one, one.metrics)

    def is_whole(self, question: Question, rows: list[dict], _trace: None) -> bool:
        expected = _distinct(question.about) or {(metric,) for metric in question.metrics}
        return len(rows) == len(expected) and {_place(row, question.about) for row in rows} == expected

    def together(self, questions: list[Question]) -> list[list[Question]]:
        bundles: dict[Any, list[Question]] = {}
        for question in questions:
            bundles.setdefault(self._bundle(question), []).append(question)
        return list(bundles.values())

    def _bundle(self, question: Question) -> Any:
        """What is equal for questions that are answered at once."""
        one = question.about
        if not VIEWS[one.view].drawn:
            return "errors"
        if self.spec.stream and one.exchange:
            return one.variant.scheme.name, one.exchange.field
        if one.exchange and one.exchange.field == "layer":
            return one.variant.scheme.name, one.exchange.kind
        return question

    def steps(self, questions: list[Question]) -> int:
        return sum(self._steps(question.about) for question in questions)

    def _steps(self, one: Asked) -> int:
        view = VIEWS[one.view]
        return view.reads * self.spec.blocks * (self.spec.draws if view.drawn else 1)

    def answer(self, bench: Bench, job: Job, questions: list[Question], part: slice, fields: dict) -> list:
        model, _ = bench.load(job, self.spec, fields)
        asked = [question.about for question in questions]
        blocks = bench.counted(job.blocks[part], len(asked))
        schemes = {one.variant.scheme.name: one.variant.scheme for one in asked if one.variant}
        with named(job.name):
            calibration = bench.calibration(job, schemes.values())
        asked = [one.knowing(calibration) for one in asked]
        if not is_streamed(model) and VIEWS[asked[0].view].drawn and schemes:
            model = coded(bench.quantized(*schemes.values(), self.spec.skip, calibration))
        with named(job.name, *schemes):
            return measure(model, blocks, asked, self.spec.draws)

    def rows(self, question: Question, answers: list, _trace: None) -> list[dict]:
        draws = [list(chain.from_iterable(of_parts)) for of_parts in zip(*answers, strict=True)]
        return VIEWS[question.about.view].rows(question.about, draws)


def _distinct(one: Asked) -> set[tuple]:
    """What tells its rows apart; nothing where there is one for each metric."""
    fields = ("layer", "role", "projection")
    places = [dict(zip(fields, place, strict=True)) for place in one.places]
    return {_place(place | {"metric": metric}, one) for place in places for metric in one.metrics}


def _place(row: dict, one: Asked) -> tuple:
    fields = {"input": ("layer", "role"), "error": ("layer", "role", "projection")}.get(one.view, ())
    return tuple(row.get(field) for field in ("metric", *fields))


ERRORS = [
    *("layer", "role", "projection", "error", "db", "by_token", "by_token_db"),
    *("largest", "feature", "position", "token"),
]


@dataclass(frozen=True, eq=False)
class Damages:
    """What a scheme damages in a model; what was not measured is empty.

    errors: a row a projection: `layer`, `role`, `projection` (its path), `error` (‖Y_q − Y‖² / ‖Y‖²) and `by_token`
    (the mean of the same of single tokens), both in dB too, `db` and `by_token_db`; and of its input `largest` (|x|),
    `feature`, `position`, `token` (id).
    roles, layers: a row a role or layer: `perplexity_only` with only it quantized, `perplexity_without` with all but
    it, and each relative to the unquantized model, `damage_only` and `damage_without`. Under several draws there is a
    column `…_deviation` for each perplexity.
    model: `perplexity`, `unquantized` (the perplexity without the scheme), `damage`, `kl` (nats) and `top1_agreement`;
    under several draws with the `…_deviation` of each that was measured.
    """

    scheme: str
    errors: pd.DataFrame
    roles: pd.DataFrame
    layers: pd.DataFrame
    model: dict[str, float]


def damage(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    scheme: str | Scheme,
    by: Iterable[str] = DAMAGE_BY,
    skip: Sequence[str] = (),
    draws: int = 1,
    calibration: Calibration | None = None,
    attention_mask: Iterable[torch.Tensor] | None = None,
) -> Damages:
    """Find where a scheme damages a model: by projection, by role and layer, and over all of it.

    The error of a projection is that of its output from the inputs of the unquantized model, so that errors do not
    cascade; perplexities are those of whole models, in which they do. The model is left as it was.

    Args:
        model: a causal language model, resident or streamed, whose exact weights are there.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        scheme: name, or a scheme of one's own.
        by: what to measure: "error" of each projection, perplexity by "role" and by "layer", and what is over the
            "model", which roles and layers bring along.
        skip: patterns of projections that stay exact, as for `outliers.quantize`.
        draws: how many times perplexities, divergence and agreement are measured, with embeddings changed by 1e-6.
        calibration: how large the inputs are, which some remedies have to know; see `outliers.calibrate`.
        attention_mask: as for `outliers.perplexity`.

    Raises:
        UserError: the scheme is unknown or quantizes nothing, a part of the damage is unknown, several draws are asked
            of a model in 16 bits; as `outliers.quantize` and `outliers.perplexity`.
    """
    blocks, scheme = list(sequences(blocks, attention_mask)), get_scheme(scheme)
    check_draws(draws, str(model.dtype).removeprefix("torch."))
    asked = [one.knowing(calibration) for one in plan(model, [scheme], by, skip)]
    if not is_streamed(model):
        model = coded(quantize(model, scheme, skip=skip, calibration=calibration))
    rows = []
    for some in _at_once(asked):
        for one, answer in zip(some, measure(model, blocks, some, draws), strict=True):
            fields = {one.exchange.field: one.exchange.place} if one.exchange else {}
            of_scheme = {"scheme": one.variant.scheme.name if one.variant else BASELINE}
            rows += [of_scheme | fields | row for row in VIEWS[one.view].rows(one, answer)]
    return damages_of(rows)[scheme.name]


def _at_once(asked: list[Asked]) -> list[list[Asked]]:
    """What one model is asked at once: all errors, all of a field."""
    bundles: dict[tuple, list[Asked]] = {}
    for one in asked:
        key = (VIEWS[one.view].drawn, one.exchange and one.exchange.field)
        bundles.setdefault((*key, one.view if key[0] else ""), []).append(one)
    return list(bundles.values())


def damages_of(rows: list[dict]) -> dict[str, Damages]:
    """What rows of one model say, scheme by scheme in their order."""
    schemes = dict.fromkeys(row["scheme"] for row in rows if row.get("scheme", BASELINE) != BASELINE)
    inputs = [row for row in rows if row["metric"] == VIEWS["input"].metrics[0]]
    baseline = next((row["value"] for row in rows if row.get("scheme") == BASELINE and _is_whole_model(row)), None)
    return {
        scheme: _damages(scheme, [row for row in rows if row.get("scheme") == scheme], inputs, baseline)
        for scheme in schemes
    }


def _is_whole_model(row: dict) -> bool:
    return row["metric"] == "perplexity"


def _damages(scheme: str, rows: list[dict], inputs: list[dict], baseline: float | None) -> Damages:
    model = {} if baseline is None else {"unquantized": baseline}
    for row in rows:
        if row["metric"] in VIEWS["model"].metrics:
            model |= _named(row["metric"].removeprefix("damage."), row)
    if "perplexity" in model:
        model["damage"] = model["perplexity"] / baseline - 1
    return Damages(
        scheme, _error_table(rows, inputs), *(_exchange_table(rows, f, baseline) for f in ("role", "layer")), model
    )


def _named(name: str, row: dict) -> dict[str, float]:
    scatter = {f"{name}_deviation": row["standard_deviation"]} if "standard_deviation" in row else {}
    return {name: row["value"], **scatter}


def _error_table(rows: list[dict], inputs: list[dict]) -> pd.DataFrame:
    largest = {(row["layer"], row["role"]): row for row in inputs}
    found: dict[str, dict] = {}
    for row in rows:
        if row["metric"] in VIEWS["error"].metrics:
            place = {name: row[name] for name in ("layer", "role", "projection")}
            name = row["metric"].removeprefix("damage.").removeprefix("error_")
            decibels = 10 * math.log10(row["value"]) if row["value"] else -math.inf
            of_projection = found.setdefault(row["projection"], place)
            of_projection |= {name: row["value"], "db" if name == "error" else f"{name}_db": decibels}
    for row in found.values():
        of_input = largest.get((row["layer"], row["role"]), {})
        row |= {"largest": of_input.get("value")}
        row |= {name: of_input.get(name) for name in ("feature", "position", "token")}
    return pd.DataFrame(list(found.values()), columns=ERRORS)


def _exchange_table(rows: list[dict], field: str, baseline: float | None) -> pd.DataFrame:
    found: dict[Any, dict] = {}
    for row in rows:
        name = row["metric"].removeprefix("damage.")
        if name.startswith("perplexity_") and field in row:
            of_place = found.setdefault(row[field], {field: row[field]})
            relative = {name.replace("perplexity", "damage"): row["value"] / baseline - 1}
            of_place |= _named(name, row) | relative
    return pd.DataFrame(list(found.values()), columns=None if found else [field])
