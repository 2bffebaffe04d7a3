"""Check an experiment before a command imports torch or transformers, which takes seconds."""

import logging
import re
from collections.abc import Callable, Iterable

from outliers.config.experiment import AnyExperiment, Experiment
from outliers.errors import UserError, no_such_feature
from outliers.models.config_file import WIDTH, check_weights, read_config_file
from outliers.models.names import known_configs
from outliers.models.source import config_path, find_model
from outliers.quantization.schemes import REMEDIES, SCHEMES, Scheme, get_scheme
from outliers.text.documents import check_text
from outliers.variants.term import PEER

logger = logging.getLogger(__name__)


def _acting(acts: Callable[[Scheme], bool]) -> Callable[[Experiment], bool]:
    """Return a function that tells whether an option affects an experiment: if `acts` holds for one of its schemes.

    An experiment without schemes has variants, which are not looked into: an option might affect them.
    """

    def acting(experiment: Experiment) -> bool:
        schemes = experiment.requested_schemes
        return not schemes or any(scheme == PEER or acts(scheme) for scheme in schemes)

    return acting


def _decomposes(scheme: Scheme) -> bool:
    return get_scheme(scheme, 1) != get_scheme(scheme, 2)


CALIBRATES = (
    _acting(lambda scheme: scheme.needs_calibration),
    "a scheme that is calibrated, such as absmax+smoothing=0.5",
)
# Options that have an effect only beside others: whether they have one, and what is missing otherwise.
BESIDE = {
    "memory": (lambda experiment: experiment.stream, "--stream"),
    "alpha": (
        lambda experiment: not experiment.schemes or _acting(_decomposes)(experiment),
        "a scheme that decomposes, such as llm.int8",
    ),
    "data": (
        lambda experiment: any(task.endswith("-local") for task in experiment.tasks),
        "a local task, such as piqa-local",
    ),
    "places": (lambda experiment: "readers" in experiment.by, "readers in --by"),
    "neurons": (lambda experiment: "writers" in experiment.by, "writers in --by"),
    "skip": (_acting(lambda scheme: scheme.quantizes), "a scheme that quantizes, such as absmax"),
    "calibration": CALIBRATES,
    "calibration_blocks": CALIBRATES,
}


def validate(experiment: AnyExperiment) -> AnyExperiment:
    """Return the experiment after checking its models, texts and tasks; log options that have no effect.

    The check only saves time: whatever is measured is checked again when it is loaded.

    Raises:
        UserError: a model, its revision or a text of the hub is unknown or cannot be reached, or the configuration of a
            model is invalid.
    """
    known = () if experiment.with_weights else known_configs()
    for name, revision in experiment.checkpoints:
        base = re.split("[=@+]", name)[0].lower()
        if base in REMEDIES:
            raise UserError(f"'{name}' stands where a model does; a remedy stands behind its scheme: absmax+{name}")
        if base in SCHEMES:
            raise UserError(f"'{name}' stands where a model does; schemes are one option: --scheme fp32,{name}")
        if name in known:
            continue
        fields = check_model(name, revision, experiment.with_weights)
        widths = {fields[field] for field in WIDTH if isinstance(fields.get(field), int)}
        if experiment.features and len(widths) == 1 and max(experiment.features) >= min(widths):
            raise no_such_feature(max(experiment.features), *widths)
    experiment.check()
    for text in (experiment.text, experiment.calibration):
        check_text(text)
    for field, (acts, beside) in BESIDE.items():
        if field in experiment.model_fields_set and getattr(experiment, field) and not acts(experiment):
            logger.info(f"--{field.replace('_', '-')} has no effect without {beside}")
    return experiment


def check_configs(names: Iterable[str]) -> None:
    """Raise UserError if a model is unknown or has an invalid configuration; its weights may be missing."""
    for name in names:
        if name not in known_configs():
            check_model(name, with_weights=False)


def check_model(name: str, revision: str | None = None, with_weights: bool = True) -> dict:
    """Return the fields of a model's configuration, or {} of a GGUF file, whose header is read later, by transformers.

    Raises:
        UserError: the model is unknown, or its configuration or the sizes of its weights are invalid.
    """
    source = find_model(name, revision)
    file = None if source.file else config_path(source)
    fields = read_config_file(file) if file else {}
    if fields and with_weights:
        check_weights(fields, name, source.files)
    return fields
