"""The perplexity of models under schemes (Table 1)."""

import statistics
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.measurements.bench import Bench, Job, check_schemes, left_fields, named, say_what_is_left
from outliers.measurements.measurement import Keeps, Measurement, Question
from outliers.measurements.perplexity import Loss, losses, perplexity_of, variant_losses
from outliers.models.anatomy import projections
from outliers.models.stream import is_streamed
from outliers.quantization.schemes import Scheme, by_weights, get_scheme
from outliers.specification.kinds import Damage, Experiment, Latency, ZeroShot, alpha_of_schemes
from outliers.text.blocks import tokens_hash
from outliers.variants.quantized import Quantized

SIZE = 1e-6  # of a draw's change, relative: fp32 perplexity stays where it is


class Sweep(Measurement[Experiment]):
    """One row a model and scheme; of several draws its mean, with their sample standard deviation.

    Each layer of a streamed model is read once for all schemes.
    """

    splits = True

    def subjects(self) -> list[Job]:
        check_draws(self.spec.draws, self.spec.dtype)
        self.schemes = schemes_of(self.spec)
        jobs = super().subjects()
        if any(scheme.needs_calibration for scheme in self.schemes):
            jobs = [job.calibrated(self.spec) for job in jobs]
        for job in jobs:
            check_schemes(job.config, self.schemes, self.spec.skip)
            say_what_is_left(job.name, job.config, self.schemes)
        return jobs

    def keeps(self, _job: Job) -> Keeps:
        return Keeps(each_alone(self.schemes), variants=len(self.schemes))

    def total(self, _job: Job) -> int:
        return len(self.schemes) * self.spec.blocks * self.spec.draws

    def look(self, bench: Bench, job: Job) -> tuple[dict, dict]:
        model, fields = bench.load(job, self.spec)
        facts = {scheme.name: scheme_fields(scheme, model, self.spec.skip, job.calibration) for scheme in self.schemes}
        return fields, facts

    def questions(self, _job: Job, facts: dict, _trace: None) -> list[Question]:
        draws = {"metric": "perplexity", "draws": self.spec.draws}
        return [
            Question(scheme.name, {**draws, **facts[scheme.name]}, scheme, ("perplexity",)) for scheme in self.schemes
        ]

    def together(self, questions: list[Question]) -> list[list[Question]]:
        return [questions] if self.spec.stream and questions else super().together(questions)

    def steps(self, questions: list[Question]) -> int:
        return len(questions) * self.spec.blocks * self.spec.draws

    def answer(
        self, bench: Bench, job: Job, questions: list[Question], part: slice, fields: dict
    ) -> list[list[list[Loss]]]:
        """Of each scheme, draw by draw, the losses of a part of the text."""
        model, _ = bench.load(job, self.spec, fields)
        schemes = [question.about for question in questions]
        with named(job.name):
            calibration = bench.calibration(job, schemes)
        if not is_streamed(model):
            model = bench.quantized(*schemes, self.spec.skip, calibration)
        found = []
        for draw in range(self.spec.draws):
            with named(job.name, *(scheme.name for scheme in schemes)), drawn(model, draw):
                if is_streamed(model):
                    variants = [Quantized(scheme, tuple(self.spec.skip), calibration=calibration) for scheme in schemes]
                    blocks = bench.counted(job.blocks[part], len(schemes))
                    found.append(variant_losses(model, blocks, variants))
                else:
                    found.append([losses(model, bench.counted(job.blocks[part]))])
        return [list(of_scheme) for of_scheme in zip(*found, strict=True)]

    def rows(self, question: Question, answers: list, _trace: None) -> list[dict]:
        draws = zip(*answers, strict=True)
        return [scattered([perplexity_of(list(chain.from_iterable(of_parts))) for of_parts in draws]) | {"unit": "1"}]


def schemes_of(spec: Experiment | Damage | Latency | ZeroShot) -> list[Scheme]:
    """The schemes of a specification; those that share weight codes are side by side."""
    return by_weights(get_scheme(scheme, alpha_of_schemes(spec)) for scheme in spec.schemes)


def scheme_fields(
    scheme: Scheme, model: PreTrainedModel, skip: Collection[str] = (), calibration: torch.Tensor | None = None
) -> dict:
    """The settings of a scheme, its name among them, which kernels run it, what of a model it leaves, and the hash of
    the blocks that it is calibrated on, if it is."""
    left = left_fields(model, model.num_parameters()) if scheme.quantizes else {}
    text = {"calibration_hash": tokens_hash(calibration)} if scheme.needs_calibration else {}
    return Quantized(scheme, tuple(skip)).fields(model) | left | text


def each_alone(schemes: Iterable[Scheme]) -> tuple[tuple[Scheme, ...], ...]:
    """Sets of one scheme, for `Keeps`: a resident model is under one after the other."""
    return tuple((scheme,) for scheme in schemes)


def coded(model: PreTrainedModel) -> PreTrainedModel:
    """A model under a scheme, its weights quantized now, so that what is made of it shares the codes."""
    for projection in projections(model):
        getattr(projection.module, "quantized_weight", None)
    return model


def scattered(values: list[float]) -> dict:
    """The mean of a value over draws as a field of its row, and their sample standard deviation if there are some."""
    scatter = {"standard_deviation": statistics.stdev(values)} if len(values) > 1 else {}
    return {"value": statistics.fmean(values), **scatter}


def check_draws(draws: int, dtype: str) -> None:
    """Raise UserError if several draws of a model in a dtype would be one and the same."""
    if draws > 1 and dtype != "float32":
        raise UserError(
            f"{draws} draws in {dtype}, which has too few digits for a change of {SIZE:g}; expected float32 or 1 draw"
        )


@contextmanager
def drawn(model: PreTrainedModel, draw: int) -> Iterator[None]:
    """Multiply every entry of the input embeddings by 1 + 1e-6 · z within this context, z standard normal.

    One code that flips because of it changes what all later layers round: how far rounding alone scatters a result. The
    weights stay as they are, and so does a head that is tied to them.

    Args:
        model: a causal language model in float32, quantized or not, resident or streamed.
        draw: seed of z; 0 changes nothing.
    """
    if draw == 0:
        yield
        return
    embeddings = model.get_input_embeddings()
    noise = torch.randn(embeddings.weight.shape, generator=torch.Generator().manual_seed(draw))
    factors = noise.mul_(SIZE).add_(1).to(embeddings.weight.device)
    handle = embeddings.register_forward_hook(lambda _module, inputs, output: output * factors[inputs[0]])
    try:
        yield
    finally:
        handle.remove()
