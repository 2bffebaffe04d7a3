"""Published facts beside measured values on one page: whether they agree, fact by fact."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from outliers.commands.measure import Cells
from outliers.config.fields import text_label
from outliers.errors import UserError, suggestion
from outliers.files import writing
from outliers.models.load import load_tokenizer
from outliers.models.names import packaged_models, short_name
from outliers.models.source import is_cached
from outliers.published.facts import FACTS, Fact, facts_of, read_facts
from outliers.published.numbers import model_key
from outliers.runs.rows import Row, read_rows
from outliers.runs.run import rows_or_error
from outliers.show.section import FINDINGS, Finding, Section
from outliers.show.tables import MISSING, Table
from outliers.show.words import NAMED, listed
from outliers.show.write import write
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.command import invocation
from outliers.text.blocks import load_text

PUBLISHED = "published"
BLOCKS = 4  # blocks of the embedded text as long as the source's, or pictures; a perplexity takes the whole text
AGREES, DIFFERS, NOT_RUN, NOT_MEASURED = "agrees", "differs", "not run", "not measured"
NOT_HERE = "not on this machine; name the model to get it"
CAPTION = (
    f"Published beside measured, on {BLOCKS} blocks of the embedded text that are as long as those of the source (a "
    f"perplexity on the whole text that it names), or on {BLOCKS} embedded pictures. Places are compared exactly, and "
    "sizes within a tolerance."
)
HEADERS = ["model", "agreement", "published", "measured", "blocks", "source", "note"]


class Verdict(NamedTuple):
    """The verdict on a fact.

    reason: why it was not run. row: the measured row that decides it.
    """

    fact: Fact
    agreement: str
    measured: str = MISSING
    reason: str = ""
    row: Row | None = None


def report_agreement(names: Sequence[str], device: str = "cpu", out: Path | None = None, redraw: bool = False) -> str:
    """Compare published facts about models with measurements, write the page, and return the text to print.

    Args:
        names: models, as `outliers.load_model` takes them; before them optionally a file of facts that replaces the
            project's own. Without a model, the models on this machine are measured.
        device: where the models run.
        out: folder of the rows and the page, by default `results/published`, with the model's name if one is named.
        redraw: draw from finished rows and measure nothing.

    Raises:
        UserError: a file of facts is damaged; or there is no fact about a model.
    """
    files = [name for name in names if name.endswith(FACTS.suffix)]
    models = [name for name in names if name not in files]
    facts = [fact for file in files or [FACTS] for fact in read_facts(file)]
    known = list(dict.fromkeys(fact.model for fact in facts))
    for model in models:
        if not facts_of(facts, [model]):
            command = shlex.join([*invocation("report"), PUBLISHED, *files, "--redraw"])
            key = model_key(model)
            hint = f"{suggestion(key, map(model_key, known))} {command} lists all {len(known)} models".lstrip()
            raise UserError(f"no fact about '{key}' is in the files; {hint}")
    folder = out or Path("results", PUBLISHED, *(map(short_name, models) if len(models) == 1 else ()))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    model_cache, verdicts = None if redraw else ModelCache(), []
    for model in models or known:
        here = model if models else _local_name(model)
        verdicts += verdicts_of(model, here, facts_of(facts, [model]), folder, device, model_cache)
    return write(section(verdicts), folder, shlex.join([*invocation("report"), PUBLISHED, *names]))


def _local_name(model: str) -> str | None:
    key = model_key(model)
    return key if key in packaged_models() else model if is_cached(model) else None


def verdicts_of(
    model: str,
    here: str | None,
    facts: Sequence[Fact],
    folder: Path,
    device: str = "cpu",
    model_cache: ModelCache | None = None,
) -> list[Verdict]:
    """Return the verdicts on a model's facts from the rows in a folder; with a cache, first measure what is missing.

    here: the model's name on this machine, or None if it is not here.
    """
    facts_by_cell: dict[tuple, list[Fact]] = defaultdict(list)
    for fact in facts:
        facts_by_cell[fact.cell_key].append(fact)
    reasons = dict.fromkeys(facts_by_cell, NOT_HERE if model_cache else "--redraw measures nothing")
    if here and model_cache:
        reasons = {
            key: key[0] and _measured(here, alike, folder, device, model_cache) for key, alike in facts_by_cell.items()
        }
    rows = [
        row
        for row in reversed(read_rows(folder))
        if model_key(row.request["subject"].get("model", "")) == model_key(model)
    ]
    return [_verdict(fact, rows, reasons[fact.cell_key]) for fact in facts]


def _measured(model: str, facts: Sequence[Fact], folder: Path, device: str, model_cache: ModelCache) -> str | None:
    """Measure the cell that these facts share unless it is finished; return the reason if that is impossible."""
    fact = facts[0]
    fields = {"name": PUBLISHED, "models": [model], "metrics": [fact.cell], "device": device, "blocks": BLOCKS}
    if fact.block:
        fields |= {"text": fact.text, "block": fact.block, "bos": fact.bos}
    if fact.cell == "trace":
        sinks = any(number.metric.startswith("attention_sink") for other in facts for number in other.numbers)
        fields |= {"details": True, "attention": sinks}
    try:
        if fact.cell == "perplexity":
            fields["blocks"] = len(load_text(fact.text, load_tokenizer(model), fact.block, None, fact.bos))
        reason = rows_or_error(Cells(**fields), folder, False, model_cache)[1]
        return reason and str(reason)
    except UserError as error:
        return str(error)


def _verdict(fact: Fact, rows: Sequence[Row], reason: str | None) -> Verdict:
    if not fact.cell:
        return Verdict(fact, NOT_MEASURED)
    expected = {"text": text_label(fact.text), "block": fact.block} if fact.block else {}
    for row in rows:
        metric, subject = row.request["metric"]["name"], row.request["subject"]
        if metric == fact.cell and expected.items() <= subject.items() and subject.get("bos", False) == fact.bos:
            if not row.values:
                return Verdict(fact, NOT_RUN, reason=row.run["failed"])
            words, same = fact.compared(row.values)
            return Verdict(fact, AGREES if same else DIFFERS, words, row=row)
    return Verdict(fact, NOT_RUN, reason=reason)


def section(verdicts: Sequence[Verdict]) -> Section:
    """Make the tables, notes and findings of verdicts, those with a measurement first."""
    cells = [
        [model_key(fact.model), agreement, fact.words, measured, _block_phrase(fact), fact.source.short, fact.note]
        for fact, agreement, measured, *_ in sorted(verdicts, key=lambda verdict: not verdict.row)
    ]
    table = Table.of_words(PUBLISHED, CAPTION, HEADERS, cells)
    sources = [
        [source.source, source.where, source.licence, "yes" if source.looked_up else "as cited", source.protocol]
        for source in dict.fromkeys(verdict.fact.source for verdict in verdicts)
    ]
    headers = ["source", "where", "licence", "looked up", "protocol"]
    caption = "Sources, and how each of them measured."
    sources_table = Table.of_words("sources", caption, headers, sources)._replace(folded=True)
    reasons = defaultdict(dict)  # the models (each once) by the reason why they were not run
    for verdict in verdicts:
        if verdict.reason:
            reasons[verdict.reason][model_key(verdict.fact.model)] = None
    notes = [
        f"Not run: {listed(models) if len(models) <= NAMED else f'{len(models)} models'}: {reason}"
        for reason, models in reasons.items()
    ]
    printed = "\n\n".join([table.printed, *notes])
    title, rows = "Published facts and measured ones", [_record(verdict) for verdict in verdicts if verdict.row]
    return Section(title, rows, [table, sources_table], notes=notes, findings=_findings(verdicts), printed=printed)


def _block_phrase(fact: Fact) -> str:
    return f"{fact.block:,}{' with first token' if fact.bos else ''}" if fact.cell and fact.block else MISSING


def _record(verdict: Verdict) -> dict:
    fact, row = verdict.fact, verdict.row
    words = {"published": fact.words, "measured": verdict.measured, "agreement": verdict.agreement}
    return {
        "metric": fact.cell,
        **words,
        "source": fact.source.source,
        **row.request["subject"],
        **row.provenance,
        **row.run,
    }


def _findings(verdicts: Sequence[Verdict]) -> list[Finding]:
    measured = sorted((verdict for verdict in verdicts if verdict.row), key=lambda verdict: verdict.agreement == AGREES)
    return [
        Finding(
            f"{short_name(verdict.row.request['subject']['model'])} {verdict.agreement}: {verdict.fact.words}; "
            f"measured {verdict.measured} ({verdict.fact.source.short}).",
            PUBLISHED,
        )
        for verdict in measured
    ][:FINDINGS]
