"""Reports: tables and figures of the paper and of experiments beyond it, measured, drawn, and put on one page."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outliers.commands.trace import Tracing
from outliers.config.experiment import Experiment
from outliers.config.files import experiment_files, make_experiment, read_experiment
from outliers.errors import NoOutlier, UserError, unknown_name
from outliers.files import PAGE, write_whole
from outliers.models.names import short_name
from outliers.paper.artefacts import ARTEFACTS, BEYOND
from outliers.paper.published import comparison
from outliers.runs.reprint import page_request, record_run, report_output_key, show_page
from outliers.runs.run import RENDERING, rendering, rows_or_error, shared_bar, show, stored_rows
from outliers.show.page import page
from outliers.show.section import Context, Section, section_of
from outliers.show.value import comparable_rows
from outliers.show.write import files_of, write_files
from outliers.terminal.command import command_line, invocation
from outliers.terminal.progress import Progress

if TYPE_CHECKING:
    from outliers.subjects.model_cache import ModelCache

logger = logging.getLogger(__name__)


def experiments_of(name: str, device: str | None = None, models: Sequence[str] = ()) -> list[Experiment]:
    """Return the validated experiments of a name: a set ("pocket", "paper"), one that the project ships, or a file.

    device: overrides the device in the files. models: override the models in the files, if any are given.

    Raises:
        UserError: nothing has this name, or a file is invalid; the message names the place in the file.
    """
    sets = {known.rpartition("/")[0] for known in experiment_files()}
    names = [known for known in experiment_files() if known.startswith(f"{name}/")] if name in sets else [name]
    if name not in sets and name not in experiment_files() and Path(name).suffix not in (".yaml", ".yml"):
        raise unknown_name("experiment", name, [*sorted(sets), *experiment_files()], "(or the path of a .yaml file)")
    experiments = [_validated(known, device, models) for known in names]
    return sorted(experiments, key=lambda experiment: list(ARTEFACTS).index(experiment.shows))


def _validated(name: str, device: str | None, models: Sequence[str]) -> Experiment:
    fields = read_experiment(name)
    shows = fields.values.get("shows")
    if shows not in ARTEFACTS:
        error = unknown_name("table or figure", str(shows), ARTEFACTS, "(in field 'shows')")
        raise UserError(f"{fields.places.get(('shows',), fields.places[()])}, {error}")
    kind = ARTEFACTS[shows].kind
    if "model" in kind.model_fields and len(models) > 1:
        raise UserError(f"{name} takes one model, got {len(models)}: {', '.join(models)}; run it once for each model")
    others = {"device": device, "models": list(models), "candidates": list(models), "model": models and models[0]}
    given = {field: value for field, value in others.items() if value and field in kind.model_fields}
    experiment = make_experiment(fields.replaced(given), kind)
    return _shortened(experiment, models) if models and "block" in kind.model_fields else experiment


def _shortened(experiment: Experiment, models: Sequence[str]) -> Experiment:
    """Shorten an experiment's blocks to the shortest context of these models, minus prefixed tokens."""
    from outliers.models.anatomy import context_length  # imports torch, like the next one
    from outliers.models.load import load_config

    parts = [part for variant in getattr(experiment, "variants", []) for part in variant.parts]
    prefix = max((len(getattr(part, "tokens", None) or ()) for part in parts), default=0)
    contexts = {model: (context_length(load_config(model)) or experiment.block + prefix) - prefix for model in models}
    shortest = min(contexts, key=contexts.get)
    if contexts[shortest] >= experiment.block:
        return experiment
    logger.info(f"blocks of {contexts[shortest]} tokens, not {experiment.block}: the context of {shortest} ends there")
    return experiment.model_copy(update={"block": contexts[shortest]})


def report_experiments(
    name: str,
    out: Path | None = None,
    force: bool = False,
    redraw: bool = False,
    device: str | None = None,
    models: Sequence[str] = (),
) -> tuple[str, list[dict]]:
    """Measure what is not finished, draw everything and write one page; return the text to print, and all rows.

    A model that cannot be measured, for instance because it cannot be reached, is reported as not run with the reason,
    and the rest continues.

    out: folder of the page, with one folder per measurement of a set; by default `results/<name>`. force: measure again
    what is finished. redraw: draw from finished rows, and neither measure nor load a model.

    Raises:
        UserError: as `experiments_of`; or nothing at all could be measured.
    """
    experiments = experiments_of(name, device, models)
    folder, places = _folders(name, out, experiments)
    requests = [experiment.model_copy(update={"shows": None}).model_dump_json() for experiment in experiments]
    unique: dict[str, tuple[Experiment, Path]] = {}  # Table 4 and Figures 3 and 4 share one measurement
    for measurement, *pair in zip(requests, experiments, places, strict=True):
        unique.setdefault(measurement, tuple(pair))
    command = shlex.join([*invocation("report"), name, *models, *(["--device", device] if device else [])])
    with Progress() if redraw else shared_bar(experiment for experiment, _ in unique.values()) as bar:
        bar.expect(RENDERING._replace(count=len(experiments)))
        known = {key: _drawn(*pair) for key, pair in unique.items()} if redraw else _all_measured(unique, force, bar)
        if not any(rows for rows, _ in known.values()):
            raise UserError(str(next(reasons[0] for _, reasons in known.values())))
        show_page(folder, page_request(experiments))
        sections: list[Section] = []
        wrote = {PAGE: None}
        for measurement, experiment, place in zip(requests, experiments, places, strict=True):
            with rendering(bar, experiment.name):
                section = _without_repeats(shown_section(experiment, place, *known[measurement]), sections)
                sections.append(section)
                if section.rows:
                    write_files(section, place)
                    wrote |= dict.fromkeys(str((place / file).relative_to(folder)) for file in files_of(section))
        write_whole(folder / PAGE, page(_title(name, experiments), sections, command))
    printed_sections = [f"{section.title}\n{'=' * len(section.title)}\n\n{section.terminal}" for section in sections]
    printed_sections.append(f"Rows, tables, figures and page: {folder}/{PAGE}")
    text = "\n" + "\n\n\n".join(printed_sections)
    rows = [row for rows, _ in known.values() for row in rows]
    unfinished = redraw or any("failed" in row for row in rows) or not all(map(_is_final, known.values()))
    record_run(
        folder, experiments, None if unfinished else report_output_key(command_line("report")), command, wrote, text
    )
    return text, rows


def previewed(name: str, out: Path | None, device: str | None, models: Sequence[str]) -> str:
    """Return a preview of what `report` would measure; see `outliers.runs.budget`."""
    from outliers.runs.budget import preview
    from outliers.runs.run import prepared_plans

    experiments = experiments_of(name, device, models)
    unique = {
        experiment.model_copy(update={"shows": None}).model_dump_json(): (experiment, place)
        for experiment, place in zip(reversed(experiments), reversed(_folders(name, out, experiments)[1]), strict=True)
    }
    return preview([(prepared_plans(experiment), place) for experiment, place in reversed(unique.values())])


def _is_final(measured: tuple[list[dict], list]) -> bool:
    """Return whether nothing is left to measure: the only failures are models without outlier features to ablate.

    measured: rows of an experiment, and the errors of those that failed.
    """
    return all(isinstance(reason, NoOutlier) for reason in measured[1])


def _all_measured(
    requests: dict[str, tuple[Experiment, Path]], force: bool, bar: "Progress"
) -> dict[str, tuple[list[dict], list]]:
    from outliers.subjects.model_cache import ModelCache  # imported late, because redrawing needs no torch

    model_cache = ModelCache(bar)
    return {key: _measured(experiment, place, force, model_cache, bar) for key, (experiment, place) in requests.items()}


def _drawn(experiment: Experiment, folder: Path) -> tuple[list[dict], list[str]]:
    rows = stored_rows(experiment, folder)
    return rows, [] if rows else [f"'{folder}' has no finished rows of this experiment; run it without --redraw"]


def _measured(
    experiment: Experiment, folder: Path, force: bool, model_cache: "ModelCache", bar: "Progress"
) -> tuple[list[dict], list]:
    """Measure an experiment; return its rows and the reasons for missing ones.

    If an experiment of several models fails, each model is tried alone. model_cache: keeps the model of the previous
    experiment loaded, because most experiments of a page share it.
    """
    rows, reason = rows_or_error(experiment, folder, force, model_cache, bar)
    models = experiment.models
    if reason is None or len(models) < 2:
        return rows, [reason] if reason else []
    copies = {model: experiment.model_copy(update={"models": [model]}) for model in models}
    tries = {model: rows_or_error(copied, folder, force, model_cache, bar) for model, copied in copies.items()}
    rows = [row for rows_of_model, _ in tries.values() for row in rows_of_model]
    return rows, [f"{model}: {why}" for model, (_, why) in tries.items() if why] if rows else [reason]


def _folders(name: str, out: Path | None, experiments: Sequence[Experiment]) -> tuple[Path, list[Path]]:
    """Return the folder of a report's page, and the folder of each experiment; a set about a single model has one
    folder per model."""
    if len(experiments) == 1:
        folder = out or experiments[0].folder
        return folder, [folder]
    models = [experiment.folder.name for experiment in experiments if isinstance(experiment, Tracing)]
    folder = out or Path("results", name, *models[:1])
    return folder, [folder / Path(experiment.name).name for experiment in experiments]


def shown_section(experiment: Experiment, folder: Path, rows: list[dict], reasons: Sequence = ()) -> Section:
    """Make the section of an experiment's rows by its field `shows`, with the published numbers beside them.

    reasons: why rows are missing.
    """
    artefact = ARTEFACTS[experiment.shows]
    section, comparisons = Section("", []), []
    if rows:
        view = artefact.view
        section = section_of(view, rows, Context(experiment, folder)) if view else show(experiment, folder, rows)
    if artefact.published:
        comparisons.append(comparison(experiment.shows, artefact.published, artefact.ours(comparable_rows(rows))))
    not_run = [str(reason) if isinstance(reason, NoOutlier) else f"Not run: {reason}" for reason in reasons]
    title = section.title
    if not title.startswith(artefact.label):
        title = f"{artefact.label}: {title[0].lower()}{title[1:]}" if rows else artefact.label
    printed = [section.text, *not_run, *(table.printed for table in comparisons if not table.folded)]
    return section._replace(
        title=title,
        tables=[*section.tables, *comparisons],
        notes=[*section.notes, *not_run],
        printed="\n\n".join(filter(None, printed)),
    )


def _without_repeats(section: Section, others: Sequence[Section]) -> Section:
    """Drop findings that other sections already state, because several figures are drawn from the same rows."""
    texts = {finding.text for other in others for finding in other.findings}
    return section._replace(findings=[finding for finding in section.findings if finding.text not in texts])


def _title(name: str, experiments: list[Experiment]) -> str:
    label = ARTEFACTS[experiments[0].shows].label
    if len(experiments) > 1 and isinstance(experiments[0], Tracing):
        return f"Outlier features of {short_name(experiments[0].model)} and their cost"
    if experiments[0].shows in BEYOND:
        return label
    if len(experiments) == 1:
        return f"{label} of LLM.int8(): {name}"
    return f"The tables and figures of LLM.int8(): {name}"
