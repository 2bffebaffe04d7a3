"""The state that a process keeps between two cells, above all the loaded model, and checks before a model is loaded."""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from outlier_kernels.dispatch import backends
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outliers.config.experiment import Experiment
from outliers.config.fields import BOS, DOCUMENTS
from outliers.criterion import STREAM
from outliers.errors import BrokenModel, ChangedWeights, UserError
from outliers.models.anatomy.examples import Examples, input_ids
from outliers.models.internals import dtype_of
from outliers.models.load import (
    find_device,
    first_names,
    load_model,
    quantized_from,
    stored_as,
    weights_hash,
)
from outliers.models.skeleton import skeleton
from outliers.models.source import Source
from outliers.models.stream import AS_IT_IS, Variant, is_streamed, stream_model
from outliers.models.weight_files import check_unchanged
from outliers.quantization.convert import check_attends, quantize, resolve_instead, skipped
from outliers.quantization.magnitudes import Calibration
from outliers.quantization.schemes import BASELINE, Scheme
from outliers.terminal.progress import Progress
from outliers.text.blocks import find_text, tokens_hash

logger = logging.getLogger(__name__)


def check_machine(experiment: Experiment) -> None:
    """Raise UserError if the device of an experiment, or the kernel path that the user forces, does not exist here."""
    if experiment.engine == "ray":
        if experiment.device not in ("cpu", "cuda", "auto"):
            raise UserError(
                f"device '{experiment.device}' with engine 'ray', which chooses GPUs; expected cpu, cuda or auto"
            )
        return
    device = find_device(experiment.device)
    try:
        backends(device)
    except ValueError as error:  # outlier_kernels does not import this package, and has no UserError
        raise UserError(str(error)) from None


class ModelSubject(Protocol):
    """A subject that is a model, see `outliers.subjects.causal.Pretrained`, and the text on which it is calibrated."""

    name: str
    model: str
    revision: str | None
    experiment: Experiment
    blocks: torch.Tensor
    calibration: torch.Tensor

    @property
    def source(self) -> Source: ...

    @property
    def config(self) -> PretrainedConfig: ...

    @property
    def preprocessor(self) -> PreTrainedTokenizerBase: ...


class ModelCache:
    """The state that a process keeps between cells: the last model that it loaded, and values cached of it.

    bar: the progress bar to move; may be set later.
    """

    def __init__(self, bar: Progress | None = None):
        self.bar = bar
        self._key, self._loaded, self._expected = None, None, None
        self._calibrations: dict[str, Calibration] = {}  # of the last model and text, by the name of the prefix
        self._needing: set[str] = set()  # statistics that the calibrations need
        self._form: PreTrainedModel | None = None  # the model under the last scheme, to share codes with
        # Of the last model, by draw and part of a text: its last hidden states, also by variant; the logits and the
        # inputs of layers of the unchanged model.
        self.states: dict[tuple, list[torch.Tensor]] = {}
        self.logits: dict[tuple, list[dict[int, torch.Tensor]]] = {}
        self.inputs: dict[tuple, list[dict[int, torch.Tensor]]] = {}
        # By draw and part of a text: the changes of the last variant that changes the first layer, and layers' outputs.
        self.passed: dict[tuple, tuple[tuple[frozenset, ...], list[dict[int, torch.Tensor]]]] = {}
        self.traces: dict[str, list] = {}  # of whole texts by their hashes: one trace for each view of the model

    def load(self, subject: ModelSubject, expected: dict | None = None) -> tuple[PreTrainedModel, dict]:
        """Return the model of a subject, as the last variant left it, and the provenance that all its rows share.

        For a streamed model this provenance lacks the hash of the weights, see `weights`.

        Args:
            expected: provenance with the expected hash of the weights.

        Raises:
            UserError: as `load_model` or `stream_model`; or the weights differ from those in `expected`, because they
                changed after another process read them.
        """
        experiment, streamed = subject.experiment, subject.experiment.stream
        form = experiment.dtype, experiment.device, streamed, streamed and experiment.memory

        def load() -> tuple[PreTrainedModel, dict]:
            place = subject.model, experiment.dtype, experiment.device, subject.revision
            model = stream_model(*place, experiment.memory) if streamed else load_model(*place)
            return model, describe(subject, model)

        return self.fetch(subject, form, load, expected)

    def fetch(
        self, subject: ModelSubject, form: Hashable, load: Callable, expected: dict | None
    ) -> tuple[PreTrainedModel, dict]:
        """Return a subject's model and its provenance from `load`, or those of the last call if the model is the same.

        Args:
            form: what else determines the loaded model, such as its dtype.
            expected: provenance with the expected hash of the weights.
        """
        self._expected = expected
        key = subject.model, subject.revision, form
        if key != self._key:
            self._key = self._loaded = self._form = None  # free the last model first: never two at once
            of_model = self.states, self.logits, self.inputs, self.passed, self.traces
            for kept in (self._calibrations, self._needing, *of_model):
                kept.clear()
            self._loaded = load()
            self._form = self._loaded[0]
            self._key = key
        if not is_streamed(self._loaded[0]):
            self.check_weights()
        return self._loaded

    @property
    def is_loaded(self) -> bool:
        return self._key is not None

    @contextmanager
    def under(self, variant: Variant) -> Iterator[PreTrainedModel]:
        """Provide the last model, in memory, under a variant.

        Successive schemes share their codes, unless a variant before them changes the weights.
        """
        first = next((part for part in variant.parts if not part.keeps_weights), AS_IT_IS)
        with ExitStack() as stack:
            model = self._form if first.schemes else self._loaded[0]
            for number, part in enumerate(variant.parts):
                model = stack.enter_context(part.on(model))
                if number == 0 and part.schemes:
                    self._form = model
            yield model

    def with_progress(self, blocks: torch.Tensor, steps: int = 1) -> "BlocksWithProgress":
        """Return blocks (blocks, T) that move the bar by some steps whenever one passes the loaded model."""
        return BlocksWithProgress(blocks, self.bar, steps, is_streamed(self._loaded[0]))

    def completed(self, variants: Iterable[Variant], subject: ModelSubject) -> list[Variant]:
        """Return variants with the calibrations, and the means of a trace, that they need of the subject's text.

        Each is computed once per model and text.
        """
        variants, model = list(variants), self._loaded[0]
        for variant in variants:
            self._needing.update(*(quantized.scheme.needs for quantized in variant.schemes))
        variants = [
            self._calibrated(variant, subject) if variant.needs_calibration else variant for variant in variants
        ]
        if any(variant.needs_trace for variant in variants):
            from outliers.tracing.trace import traces  # late, for few variants need it

            text = tokens_hash(subject.blocks)
            if text not in self.traces:
                self.traces[text] = traces(model, subject.blocks, STREAM, attention=False)
            variants = [variant.knowing(*self.traces[text]) if variant.needs_trace else variant for variant in variants]
        return variants

    def _calibrated(self, variant: Variant, subject: ModelSubject) -> Variant:
        """Return a variant with a calibration of its parts; if it has a prefix, the text is read behind the prefix."""
        from outliers.variants.together import Together  # late, for few variants have a prefix

        first, *others = variant.parts
        if not first.is_prefix:
            return variant.calibrated(self._calibration(subject, variant))
        prefix = first
        if first.needs_calibration:
            prefix = first.calibrated(self._calibration(subject, first))
            texts = map(repr, map(subject.preprocessor.decode, prefix.tokens))
            logger.info(f"{prefix.name} of '{subject.name}' is {', '.join(texts)}")
        others = [
            part.calibrated(self._calibration(subject, part, prefix)) if part.needs_calibration else part
            for part in others
        ]
        return Together((prefix, *others))

    def _calibration(self, subject: ModelSubject, variant: Variant, prefix: Variant = AS_IT_IS) -> Calibration:
        """Return the calibration on the text behind a prefix, with what the schemes of a variant learn on it.

        It is computed once for all draws.
        """
        from outliers.quantization.calibration import collect
        from outliers.quantization.remedies.learning import learn

        blocks = subject.calibration
        keys = variant.needs_keys
        if any(not torch.equal(known.blocks, input_ids(blocks)) for known in self._calibrations.values()):
            self._calibrations.clear()
        calibration = self._calibrations.get(prefix.name)
        if calibration is None or not self._needing <= calibration.statistics or (keys and not calibration.keys):
            with prefix.on(self._loaded[0]) as model:
                exact = quantize(model, BASELINE)
                self._calibrations[prefix.name] = calibration = collect(exact, blocks, self._needing, keys)
        for scheme in [quantized.scheme for quantized in variant.schemes if quantized.scheme.learns]:
            with prefix.on(self._loaded[0]) as model, naming(subject.name):
                learn(model, scheme, calibration)  # the result is shared by schemes that differ in later steps
        return calibration

    def weights(self) -> dict:
        """Return the hash of the last model's weights as a field of rows; a streamed model is read for it."""
        if self._loaded is None:
            return {}
        model, fields = self._loaded
        return {"weights_hash": model.stream.weights_hash() if is_streamed(model) else fields["weights_hash"]}

    def check_weights(self) -> None:
        """Raise UserError if the last model's weights are not the expected ones.

        The weights of a streamed model are known once its layers were read.
        """
        if self._expected and "weights_hash" in self._expected:
            check_same_weights(self._key[0], [self._expected, self.weights()])

    def check_unchanged(self) -> None:
        """Raise UserError if the files of the last model changed after they were read."""
        if self._key:
            check_unchanged(*self._key[:2])


def check_same_weights(model: str, provenance: Iterable[dict]) -> None:
    """Raise ChangedWeights if measurements of a model, perhaps in several processes, were of different weights."""
    if len({measured.get("weights_hash") for measured in provenance}) > 1:
        raise ChangedWeights(
            f"the weights of '{model}' changed while they were measured; run again once they are whole"
        )


@contextmanager
def naming(model: str, *variants: str) -> Iterator[None]:
    """Add the name of the model, and of the variants that change it, to a BrokenModel raised within this context."""
    try:
        yield
    except BrokenModel as error:
        changing = " or ".join(variant for variant in variants if variant != BASELINE)
        under = f" under {changing}" if changing else ""
        raise BrokenModel(f"'{model}'{under}: {error}") from None


def describe(subject: ModelSubject, model: PreTrainedModel) -> dict:
    """Return the provenance that all rows of a subject's loaded model share."""
    # parameters that transformers keeps in float32 in a 16-bit model, such as T5's wo
    others = [tensor for name, tensor in model.named_parameters() if dtype_of(model, name) != model.dtype]
    provenance = {
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_hash": None if is_streamed(model) else weights_hash(model),
        "ignored_tensors": first_names(model.ignored_tensors) or None,
        "quantized_from": quantized_from(subject.source) or stored_as(subject.config),
        "zero_points": model.zero_points,
        "adapter": model.merged_adapter,
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "float32_parameters": sum(map(torch.numel, others)) or None,
    }
    return {name: value for name, value in provenance.items() if value is not None}


def protocol_of(experiment: Experiment, blocks: torch.Tensor | Examples | None = None) -> str:
    """Return the field `protocol` of rows: how a text is cut into blocks, and which part of them is predicted."""
    predicted = blocks.protocol if isinstance(blocks, Examples) else ""
    if predicted and not predicted.startswith("+"):  # of pictures
        return predicted
    ways = [BOS] * experiment.bos + [DOCUMENTS] * experiment.documents
    return "".join([find_text(experiment.text).protocol, *ways, predicted])


def check_scheme(
    config: PretrainedConfig,
    scheme: Scheme,
    skip: Collection[str],
    only: Collection[str] = (),
    instead: Iterable[tuple[Scheme, Collection[str]]] = (),
) -> None:
    """Raise UserError if schemes do not fit a model, places match nothing in it, or nothing is left to quantize.

    skip, only: places that stay exact, or that alone are quantized. instead: other schemes with their places.
    """
    if scheme.learns:
        from outliers.quantization.remedies.learning import check_learned

        check_learned(config, scheme)
    if skip or only or instead or scheme.group or scheme.attention is not None:
        model = skeleton(config)
        check_attends(model, scheme)
        resolve_instead(model, scheme, skipped(model, skip, scheme, only), dict(instead))


@dataclass
class BlocksWithProgress:
    """Blocks that move a bar by some steps whenever a block passes a model.

    streamed: whether the model reads all blocks before its layers compute; the layers then move the bar.
    """

    blocks: torch.Tensor
    bar: Progress
    steps: int
    streamed: bool

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.streamed:
            self.bar.begin(self.steps * len(self.blocks))
        for block in self.blocks:
            if not self.streamed:
                self.bar.together = self.steps
            yield block
            if not self.streamed:
                self.bar.update(self.steps)
