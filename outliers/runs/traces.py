"""Traces that are stored beside the rows: a run resumes from a saved one, and moves traces of other requests aside."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from outliers.errors import UserError
from outliers.files import EARLIER, check_replaceable, move
from outliers.models.anatomy.stack_views import stack_view_names
from outliers.models.names import check_same_model
from outliers.subjects.cell import Cell, Subject, Task
from outliers.subjects.model_cache import ModelCache, check_same_weights
from outliers.tracing.excerpt import Excerpt, excerpt, features_to_show
from outliers.tracing.masks import Masks, masks
from outliers.tracing.requests import STEM, exchange_traces, labels_of, request_of
from outliers.tracing.result import Trace, merge_traces

# File names in the folder of the rows.
EXCERPT, IMATRIX = "excerpt.safetensors", "imatrix.gguf"
MASKS, MASKS_LISTED = "masks.safetensors", "masks.json"
logger = logging.getLogger(__name__)


def file_of_stack(file: str, stack: str) -> str:
    """Return the name of a file of one stack of a model; it includes the stack unless the model has only one, ""."""
    stem, dot, ending = file.partition(".")
    return f"{stem}.{stack}{dot}{ending}" if stack else file


class TraceStore:
    """The trace of each view of a cell's model, in files of a folder.

    labels: what identifies the traces. traces: of the first blocks of the text; empty if nothing is traced yet.
    """

    def __init__(self, folder: Path, cell: Cell, provenance: dict):
        self.folder, self.cell, self.provenance = folder, cell, provenance
        self.stacks = stack_view_names(cell.subject.config)
        self.labels = cell.subject.request | provenance | {"roles": cell.metric.roles}
        self.traces: list[Trace] = []
        self._arrived: dict[int, list[Trace]] = {}  # parts by their first block, until all earlier ones are added

    @property
    def done(self) -> int:
        """The number of blocks that are traced."""
        return self.traces[0].sequences if self.traces else 0

    @contextmanager
    def swap_in(self, force: bool) -> Iterator[None]:
        """Move the traces of another request out of the folder, with all derived files, and those of this request back.

        If the context ends before a trace of this request is saved, the other traces return. Raises UserError if they
        are of another model, unless forced.
        """
        files = [f"{STEM}.safetensors", EXCERPT, IMATRIX]
        names = [file_of_stack(file, stack) for stack in self.stacks for file in files] + [MASKS, MASKS_LISTED]
        shown = self.folder / names[0]
        check_replaceable(shown)
        before = labels_of(shown) or self.labels
        if not force:
            subjects = [
                (labels.get("model", ""), labels.get("checkpoint")) for labels in (self.labels | before, self.labels)
            ]
            check_same_model(self.folder, *subjects)
        exchange_traces(self.folder, request_of(self.labels), names)
        try:
            yield
        finally:
            if not shown.exists():
                move(self.folder / EARLIER / request_of(before), self.folder, names)

    def find(self) -> None:
        """Take the saved traces of all views if they have the same source and the same number of blocks."""
        tokens, most = self.cell.metric.tokens, len(self.cell.subject.blocks)
        saved = [trace for trace in (_saved_trace(stem, self.labels, tokens, most) for stem in self._stems) if trace]
        if len(saved) == len(self._stems) and len({trace.sequences for trace in saved}) == 1:
            self.traces = saved

    @property
    def missing(self) -> Cell:
        """The cell for blocks that are not traced yet; it has tokens if the resumed trace has them."""
        if not (self.traces and self.traces[0].names):
            return self.cell
        return replace(self.cell, metric=self.cell.metric.model_copy(update={"tokens": True}))

    def check(self, weights: dict) -> None:
        """Drop the traces if they are of other weights."""
        self.labels |= weights
        self.traces = self.traces if all(trace.labels == self.labels for trace in self.traces) else []

    def add(self, first: int, part: list[Trace], weights: dict) -> None:
        """Add the traces of a part of the text, which starts at block `first`; earlier parts may arrive later."""
        check_same_weights(self.cell.subject.name, [self.labels | weights, weights | self.labels])
        self.labels |= weights
        self._arrived[first] = part
        while self.done in self._arrived:  # in the order of the text, so that a saved trace is of its beginning
            part = self._arrived.pop(self.done)
            self.traces = merge_traces([self.traces, part]) if self.traces else part
            for trace in self.traces:
                trace.labels = self.labels

    def save(self) -> None:
        for trace, stem in zip(self.traces, self._stems, strict=True):
            trace.save(stem)

    def derived(self) -> Iterator[tuple[Task, Path]]:
        """Save the requested importance matrices, and yield tasks for other missing files, each with the file's path.

        These files are the masks, and an excerpt of the text for each trace.
        """
        subject, metric = self.cell.subject, self.cell.metric
        for trace in self.traces if metric.imatrix else ():
            trace.save_imatrix(self.folder / file_of_stack(IMATRIX, trace.stack))
        if metric.masks and not _is_newer(self.folder / MASKS, self.folder / f"{STEM}.safetensors"):
            path = self.folder / Path(MASKS).stem
            yield Task("masks", _outlier_masks, subject, (self.provenance, self.traces[0])), path
        for trace in () if subject.experiment.stream else self.traces:  # an excerpt would read all layers again
            path = self.folder / file_of_stack(EXCERPT, trace.stack)
            if saved_excerpt(path, trace) is None:
                arguments = self.provenance, features_to_show(trace), trace.stack or None, trace.labels
                yield Task("excerpt", _excerpt, subject, arguments), path

    @property
    def _stems(self) -> list[Path]:
        return [self.folder / file_of_stack(STEM, stack) for stack in self.stacks]


def _is_newer(file: Path, than: Path) -> bool:
    return file.is_file() and file.stat().st_mtime_ns > than.stat().st_mtime_ns


def _saved_trace(stem: Path, labels: dict, tokens: bool, most: int) -> Trace | None:
    """Return the saved trace beside `stem` if it has the same source and at most `most` sequences, or None.

    It is also None if tokens are requested that the trace lacks. The weights of a streamed model may be unknown. Raises
    UserError if something other than a file has its name.
    """
    file = stem.with_name(f"{stem.name}.safetensors")
    check_replaceable(file)
    if not file.exists():
        return None
    try:
        trace = Trace.load(stem)
    except UserError as error:
        logger.info(f"{error}; this run does")
        return None
    unknown = {"weights_hash"} - labels.keys()
    same = {field: trace.labels[field] for field in trace.labels.keys() - unknown} == labels
    whole = trace.names or not tokens
    return trace if same and whole and trace.sequences <= most else None


def _excerpt(
    model_cache: ModelCache,
    subject: Subject,
    provenance: dict,
    features: dict[str, list[int]],
    stack: str | None,
    labels: dict,
) -> Excerpt:
    return replace(excerpt(subject.load(model_cache, provenance), subject.blocks[0], features, stack), labels=labels)


def _outlier_masks(model_cache: ModelCache, subject: Subject, provenance: dict, trace: Trace) -> Masks:
    return masks(subject.load(model_cache, provenance), subject.blocks, trace)


def saved_excerpt(path: Path, trace: Trace) -> Excerpt | None:
    """Return the excerpt of a trace; None if it is missing, damaged, or of another trace."""
    try:
        excerpt = Excerpt.load(path)
    except UserError:
        return None
    return excerpt if excerpt.labels == trace.labels else None
