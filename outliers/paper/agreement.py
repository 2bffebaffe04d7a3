"""Published facts beside a model's own: agreement, fact by fact, on one page."""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from outliers.errors import UserError, meant
from outliers.files import writing
from outliers.metrics.perplexity import perplexity
from outliers.models.anatomy import anatomy_of, check_block, decoder_layers, family_of, projections
from outliers.models.hooks import residual_hooks
from outliers.models.load import load_model, load_reader, weights_hash
from outliers.models.names import packaged_models, short_name
from outliers.models.source import is_cached
from outliers.paper.facts import Fact, Published, Sink, Source, facts_of, read_sources
from outliers.paper.published import key_of
from outliers.show.section import FINDINGS, Finding, Section
from outliers.show.tables import MISSING, Table
from outliers.show.words import NAMED, listed
from outliers.show.write import write
from outliers.specification.files import ENDINGS, PUBLISHED
from outliers.specification.kinds import Settings
from outliers.subjects.causal import Causal
from outliers.subjects.provenance import measuring
from outliers.text.blocks import load_text, tokens_hash
from outliers.tracing.result import Trace
from outliers.tracing.trace import trace

Reader = PreTrainedTokenizerBase | BaseImageProcessor

TEXT, BLOCKS = "sample", 4  # that a model is traced on; of the length that a source read, or pictures
AGREES, DIFFERS, NOT_RUN, NOT_MEASURED = "agrees", "differs", "not run", "not measured"
NOT_HERE = "not on this machine; name the model to get it"
CAPTION = (
    f"Published beside measured, on {BLOCKS} blocks of the embedded text that are as long as those of the source (a "
    f"perplexity on the whole text that it names), or on {BLOCKS} embedded pictures. Places are compared exactly, and "
    "sizes within a tolerance."
)
HEADERS = ["model", "agreement", "published", "measured", "blocks", "source", "note"]


class Seen(NamedTuple):
    """The observations of a model on some blocks.

    first: the largest |x| of each feature of the residual stream at position 0 (features,) float32. outputs: of each
    layer the largest |x| of each output of its second feed-forward projection (outputs,) float32; empty where some
    layer has none. norms: after each layer the L2 norms of the states of all positions (layers, positions) float32.
    layer_norms: weight and bias of the norm that ends each layer (layers, 2, features); empty where none does.
    """

    trace: Trace
    first: np.ndarray
    largest_outputs: list[np.ndarray]
    norms: np.ndarray
    layer_norms: list[np.ndarray]

    @property
    def outputs(self) -> list[np.ndarray]:
        """As `largest_outputs`.

        Raises:
            UserError: some layer has no second feed-forward projection, such as a mixture of experts.
        """
        if not self.largest_outputs:
            raise UserError("not every layer of this model has one second feed-forward projection")
        return self.largest_outputs

    @property
    def norm_weights(self) -> np.ndarray:
        """As `layer_norms`, in one array.

        Raises:
            UserError: no norm ends the layers, as those of models whose norms stand before the projections.
        """
        if not self.layer_norms:
            raise UserError("no norm ends the layers of this model")
        return np.stack(self.layer_norms)

    @property
    def inputs(self) -> list[np.ndarray]:
        """Of each layer the largest |x| of each input of its second feed-forward projection (inputs,)."""
        return list(self.trace.largest("ffn_out").numpy())


class Verdict(NamedTuple):
    """The verdict on a fact; reason: why it was not run. made: how it was measured, as fields of a row."""

    published: Published
    agreement: str
    measured: str = ""
    reason: str = ""
    made: Mapping = MappingProxyType({})


def look(model: PreTrainedModel, blocks: torch.Tensor, reader: Reader, sinks: bool) -> Seen:
    """The observations of a resident model on blocks, see `Causal.blocks`; sinks: whether attention sinks are looked
    for.

    Raises:
        UserError: as `outliers.trace`.
    """
    norms = defaultdict(list)
    see_norms = residual_hooks(model, lambda layer, state: norms[layer].append(state.float().norm(dim=-1).cpu()))
    with _largest_outputs(model) as outputs, see_norms:
        traced = trace(model, blocks, attention=sinks, tokens=reader)
    beyond = family_of(model.config).vocabulary(model.config)  # the id of position 0, as if it were a token of its own
    at_first = traced.statistics["tokens.ids"] == beyond
    first = traced.statistics["residual.token_max"][at_first][0].numpy()
    whole = "ffn_out" in traced.roles
    return Seen(
        traced,
        first,
        [outputs[layer].cpu().numpy() for layer in range(traced.layers)] if whole else [],
        np.stack([torch.cat(norms[layer]).numpy() for layer in range(traced.layers)]),
        list(_layer_norms(model)) if anatomy_of(model.config).norms_of_sums else [],
    )


def _layer_norms(model: PreTrainedModel) -> Iterator[np.ndarray]:
    """Weight and bias of the last norm of each layer (2, features)."""
    for layer in decoder_layers(model):
        *_, last = (module for module in layer.modules() if isinstance(module, torch.nn.LayerNorm))
        yield torch.stack([last.weight, last.bias]).detach().float().cpu().numpy()


@contextmanager
def _largest_outputs(model: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """The largest |x| of each output of second feed-forward projections, by layer, of all that runs meanwhile."""
    largest: dict[int, torch.Tensor] = {}

    def hook_of(layer: int):
        def hook(_module, _inputs, output):
            magnitudes = output.flatten(0, -2).abs().amax(0).float()
            largest[layer] = torch.maximum(largest.get(layer, magnitudes), magnitudes)

        return hook

    with ExitStack() as stack:
        for projection in projections(model):
            if projection.role == "ffn_out":
                stack.callback(projection.module.register_forward_hook(hook_of(projection.layer)).remove)
        yield largest


def verdicts(name: str, facts: Sequence[Published], device: str = "cpu") -> list[Verdict]:
    """The verdicts on the facts of a model; where it cannot be loaded, all are not run."""
    try:
        model, reader = load_model(name, device=device), load_reader(name)
    except UserError as error:
        return [Verdict(published, NOT_RUN, reason=str(error)) for published in facts]
    about = {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "weights_hash": weights_hash(model),
    }
    looks = defaultdict(list)
    for number, published in enumerate(facts):
        looks[published.protocol if published.fact.measured_by == "trace" else number].append(published)
    results = [verdict for alike in looks.values() for verdict in _of_look(name, model, reader, alike, device)]
    results = [verdict._replace(made=about | verdict.made) if verdict.made else verdict for verdict in results]
    return sorted(results, key=lambda verdict: facts.index(verdict.published))


def _of_look(
    name: str, model: PreTrainedModel, reader: Reader, facts: list[Published], device: str
) -> Iterator[Verdict]:
    """The verdicts on facts that share the blocks on which they are measured."""
    fact = facts[0].fact
    if fact.measured_by is None or getattr(fact, "under", ""):
        yield from (Verdict(published, NOT_MEASURED) for published in facts)
        return
    try:
        with measuring(device) as spent:
            seen, read = _measure(name, model, reader, [published.fact for published in facts])
    except (UserError, torch.OutOfMemoryError) as error:
        reason = str(error) if isinstance(error, UserError) else f"device '{device}' has too little memory"
        yield from (Verdict(published, NOT_RUN, reason=reason) for published in facts)
        return
    for published in facts:
        try:
            words, same = published.fact.compared(seen)
            yield Verdict(published, AGREES if same else DIFFERS, words, made=read | spent.fields)
        except UserError as error:
            yield Verdict(published, NOT_RUN, reason=str(error))


def _measure(name: str, model: PreTrainedModel, reader: Reader, facts: list[Fact]) -> tuple[Seen | float, dict]:
    """The values with which facts of one protocol are compared, and what was read for it."""
    fact = facts[0]
    length = _length(model, fact)
    if fact.measured_by == "perplexity":
        if not length:
            raise UserError("a model that reads pictures has no perplexity on a text")
        check_block(model.config, fact.block)
        text, blocks = fact.text, load_text(fact.text, reader, fact.block, None, fact.bos)
        seen = perplexity(model, blocks)
    else:  # blocks as models of this family read them
        settings = Settings(name=PUBLISHED, text=TEXT, blocks=BLOCKS, bos=fact.bos, **length)
        text, blocks = TEXT, Causal(name, None, settings).blocks
        seen = look(model, blocks, reader, any(isinstance(fact, Sink) for fact in facts))
    return seen, {"text": text, **length, "blocks": len(blocks), "tokens_hash": tokens_hash(blocks)}


def _length(model: PreTrainedModel, fact: Fact) -> dict:
    """The length of blocks as a field; none for pictures.

    Raises:
        UserError: the fact is about the other of both.
    """
    if family_of(model.config).name_of is None:
        if fact.block is None:
            raise UserError("the fact is about pictures (block: null), and the model reads text")
        return {"block": fact.block}
    if fact.block is not None:
        raise UserError(f"the fact is about blocks of {fact.block} tokens, and the model reads pictures (block: null)")
    return {}


def report(names: Sequence[str], device: str = "cpu", out: Path | None = None, redraw: bool = False) -> str:
    """Write the page of what is published of some models, or of all, and return what to print.

    Args:
        names: models, as `outliers.load_model` takes them; before them files of facts in the place of those that come
            with the project. Without a model, those are run that are on this machine.
        device: where they run.
        out: folder of the page, by default `results/published`, with the model's name where one is named.
        redraw: run none.

    Raises:
        UserError: a file of facts is damaged, or says what no fact can; or there is none about a model.
    """
    files = [name for name in names if name.endswith(ENDINGS)]
    models = [name for name in names if name not in files]
    sources = read_sources(files)
    known = list(dict.fromkeys(published.model for source in sources for published in source.facts))
    wanted = {model: facts_of(sources, [model]) for model in models or known}
    for model in (model for model, facts in wanted.items() if not facts):
        raise _without_facts(model, known, files)
    measured = [
        verdict for model, facts in wanted.items() for verdict in _run(model, facts, device, redraw, bool(models))
    ]
    folder = out or Path("results", PUBLISHED, *(map(short_name, models) if len(models) == 1 else ()))
    command = ["python", "-m", "outliers.report", PUBLISHED, *names]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return write(section(measured, sources), folder, shlex.join(command))


def _without_facts(model: str, known: Sequence[str], files: Sequence[str]) -> UserError:
    command = shlex.join(["python", "-m", "outliers.report", PUBLISHED, *files, "--redraw"])
    hint = f"{meant(key_of(model), map(key_of, known))} {command} lists all {len(known)} models".lstrip()
    return UserError(f"no fact about '{key_of(model)}' is in the files; {hint}")


def _run(model: str, facts: list[Published], device: str, redraw: bool, is_named: bool) -> list[Verdict]:
    here = model if is_named else _here(model)
    if redraw or not here:
        reason = "--redraw measures nothing" if redraw else NOT_HERE
        return [Verdict(published, NOT_RUN, reason=reason) for published in facts]
    return verdicts(here, facts, device) if facts else []


def _here(model: str) -> str | None:
    """By which name a published model is on this machine, if it is."""
    key = key_of(model)
    return key if key in packaged_models() else model if is_cached(model) else None


def section(verdicts: Sequence[Verdict], sources: Sequence[Source]) -> Section:
    """The tables, notes and findings of some verdicts."""
    table = _table(verdicts)
    sources_table = _sources(
        [source for source in sources if any(verdict.published.source is source for verdict in verdicts)]
    )
    reasons = defaultdict(dict)  # why something was not run, to the models, each once
    for verdict in verdicts:
        if verdict.reason:
            reasons[verdict.reason][key_of(verdict.published.fact.model)] = None
    notes = [
        f"Not run: {listed(models) if len(models) <= NAMED else f'{len(models)} models'}: {reason}"
        for reason, models in reasons.items()
    ]
    printed = "\n\n".join([table.form("simple"), *notes])
    title, rows = "Published facts and measured ones", [_row(verdict) for verdict in verdicts if verdict.made]
    return Section(title, rows, printed, [table, sources_table], notes=notes, findings=_findings(verdicts))


def _table(verdicts: Sequence[Verdict]) -> Table:
    """A fact a row, those first that were measured."""
    cells = [
        [key_of(fact.model), verdict.agreement, fact.claim, verdict.measured, _blocks(fact), source.short, fact.note]
        for verdict in sorted(verdicts, key=lambda verdict: not verdict.made)
        for fact, source in [verdict.published]
    ]
    return Table.of_words(PUBLISHED, CAPTION, HEADERS, cells)


def _blocks(fact: Fact) -> str:
    first = " with first token" if fact.bos else ""
    return f"{fact.block:,}{first}" if fact.measured_by and fact.block else MISSING


def _sources(sources: Sequence[Source]) -> Table:
    cells = [
        [source.source, source.where, source.licence, "yes" if source.looked_up else "as cited", source.protocol]
        for source in sources
    ]
    headers = ["source", "where", "licence", "looked up", "protocol"]
    return Table.of_words("sources", "Sources, and how each of them measured.", headers, cells)._replace(folded=True)


def _row(verdict: Verdict) -> dict:
    fact, source = verdict.published
    words = {
        "published": fact.claim,
        "measured": verdict.measured,
        "agreement": verdict.agreement,
        "source": source.source,
    }
    return {"metric": fact.kind, **words, **verdict.made}


def _findings(verdicts: Sequence[Verdict]) -> list[Finding]:
    """The findings of all verdicts, disagreement first."""
    measured = sorted(
        (verdict for verdict in verdicts if verdict.made), key=lambda verdict: verdict.agreement == AGREES
    )
    return [
        Finding(
            f"{short_name(verdict.made['model'])} {verdict.agreement}: {verdict.published.fact.claim}; measured "
            f"{verdict.measured} ({verdict.published.source.short}).",
            PUBLISHED,
        )
        for verdict in measured
    ][:FINDINGS]
