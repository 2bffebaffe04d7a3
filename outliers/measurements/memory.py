"""What models need of GPUs at inference, and on which hardware they fit (Table 3)."""

from typing import NamedTuple

from transformers import PretrainedConfig

from outliers.errors import unknown_name
from outliers.measurements.bench import Bench
from outliers.measurements.footprint import BITS, Footprint, fits, measure_footprint
from outliers.measurements.measurement import Measurement, Question
from outliers.models.configs import find_config
from outliers.specification.kinds import Memory

OF_A_MODEL = ("metric", "bits", "hardware", "gpus", "gigabytes", "headroom")  # which of its rows one is


class Configured(NamedTuple):
    """A model of which nothing but the configuration is read."""

    name: str
    config: PretrainedConfig


class MemoryRows(Measurement[Memory]):
    """Of each model a row with its parameters, one with the bytes of its weights in 16 bits and one in 8, of its cache,
    and of its activations; and one for each hardware and number of bits: 1 where it fits, else 0.

    No weights are read: it takes about a second a model. All rows say whether the model is one of the candidates.
    """

    unit = "model"

    def subjects(self) -> list[Configured]:
        for name in self.spec.candidates or []:
            if name not in self.spec.models:
                raise unknown_name("candidate", name, self.spec.models, "(the field 'models' names it too)")
        return [Configured(name, find_config(name)) for name in self.spec.models]

    def look(self, _bench: Bench, subject: Configured) -> tuple[dict, None]:
        spec = self.spec
        fields = {"model": subject.name, "candidate": subject.name in (spec.candidates or spec.models)}
        fields |= {"architecture": subject.config.model_type, "context": spec.context, "batch": spec.batch}
        return fields, None

    def questions(self, _subject: Configured, _facts: None) -> list[Question]:
        return [Question("footprint", {})]

    def finished(self, _question: Question, rows: list[dict]) -> list[dict]:
        """Rows of other hardware may be there too."""
        found = {_which(row): row for row in rows}
        asked = [_which(row) for row in self._asked()]
        return [found[which] for which in asked] if found.keys() >= set(asked) else []

    def answer(self, _bench: Bench, subject: Configured, _question: Question, _fields: dict) -> Footprint:
        return measure_footprint(subject.config, self.spec.context, self.spec.batch)

    def rows(self, _question: Question, footprint: Footprint) -> list[dict]:
        about = {"parameters": footprint.parameters, "context_used": footprint.context}
        return [about | asked | {"value": _value(asked, footprint)} for asked in self._asked()]

    def _asked(self) -> list[dict]:
        """What is asked of every model: rows without a value."""
        places = [hardware.model_dump(exclude_none=True) for hardware in self.spec.hardware]
        return [
            {"metric": "parameters", "unit": "1"},
            *({"metric": "weights", "bits": bits, "unit": "bytes"} for bits in BITS),
            *({"metric": metric, "unit": "bytes"} for metric in ("cache", "activations")),
            *(
                {"metric": "fits", **place, "bits": bits, "headroom": self.spec.headroom, "unit": "1"}
                for place in places
                for bits in BITS
            ),
        ]


def _which(row: dict) -> tuple:
    return tuple(row.get(field) for field in OF_A_MODEL)


def _value(asked: dict, footprint: Footprint) -> int:
    match asked["metric"]:
        case "weights":
            return footprint.weights(asked["bits"])
        case "fits":
            return int(fits(footprint, **{name: asked[name] for name in ("bits", "gpus", "gigabytes", "headroom")}))
        case metric:
            return getattr(footprint, metric)
