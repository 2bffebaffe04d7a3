"""The table of the commands, and the way from a command line to rows and their page."""

import importlib
import os
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import outliers.commands as folder
from outliers.commands import Command
from outliers.config.experiment import Experiment
from outliers.config.fields import MODEL, resolved
from outliers.config.files import experiment_files, is_experiment, is_meant_as_experiment, specify
from outliers.errors import UserError, unknown_name
from outliers.files import PAGE, writing
from outliers.models.names import WITH_ADAPTER
from outliers.terminal import command as terminal
from outliers.terminal.command import DryRun, Force, Models, Out, command_line, import_for_good, invocation, models_of
from outliers.terminal.options import options

NO_OPTIONS = ("name", "shows", "model", "models", "recipe", "runs")  # arguments, or fields for files only
OF_MODELS = ("models", "candidates")  # fields of an experiment that given models replace
APART = ("variants",)  # their entries may contain commas, so each has an option of its own

EXPERIMENT = "Before them, an experiment file or the name of an embedded one, whose models they replace."
REDRAW = "Measure nothing: redraw the rows in this folder, such as those of a watched training."
Redraw = Annotated[Path | None, Option("--redraw", help=REDRAW, metavar="FOLDER", show_default=False)]
ADAPTER = "Merge the adapter of PEFT that lies beside the weights of each model."
Adapter = Annotated[bool, Option("--adapter", help=ADAPTER)]


def commands() -> dict[str, str]:
    """Return the module of each command by the command's name, without importing one."""
    files = {file.name: f"{folder.__name__}.{file.name}" for file in pkgutil.iter_modules(folder.__path__)}
    return dict(sorted((files | {"report": "outliers.paper.command"}).items()))


def entry_of(name: str) -> Command:
    """Return the `Command` that a command's module declares."""
    return importlib.import_module(commands()[name]).COMMAND


def run(name: str) -> None:
    """Run the command of a name with the process's arguments."""
    terminal.run_command(command_of(name))


def command_of(name: str) -> Callable:
    """Return a command as a function with its arguments and options as parameters, and its help as docstring."""
    record = entry_of(name)
    function = _measuring_function(name, record) if isinstance(record.runs, type) else record.runs
    function.__name__, function.__doc__ = name, record.help
    return function


def _measuring_function(name: str, command: Command) -> Callable:
    """Return the function of a measuring command: its parameters are arguments, and one option for each field."""
    experiment_type = command.runs

    def measure(
        out: Path | None,
        force: bool,
        dry_run: bool,
        positional,
        models=(),
        redraw: Path | None = None,
        adapter: bool | None = None,
        **given,
    ) -> None:
        if redraw is not None:
            _redraw(name, experiment_type, redraw, out, [positional, models, force, *given.values()])
            return
        positional = [positional] if isinstance(positional, str) else positional or []
        fields = {field: value for field, value in given.items() if value is not None}
        for field, value in fields.items():
            if isinstance(value, list) and field not in APART:
                fields[field] = [part for entry in value for part in entry.split(",") if part]
        experiment = command.completed(
            _specified(name, command, experiment_type, positional, models or [], bool(adapter), fields)
        )
        if dry_run:
            _preview(experiment, out)
        else:
            _measure(name, experiment, out, force)

    takes_one, takes_several = "model" in experiment_type.model_fields, "models" in experiment_type.model_fields
    if takes_one or takes_several:
        metavar, help_text = ("MODEL", MODEL) if takes_one else ("EXPERIMENT|MODEL", f"{MODEL} {EXPERIMENT}")
        place = Annotated[list[str] | None, Argument(metavar=metavar, help=help_text, show_default=False)]
        arguments = {"positional": place, "models": Models}
    else:
        help_text = f"The name of one that comes along, such as {command.example}, or a file."
        place = Annotated[str | None, Argument(metavar="EXPERIMENT", help=help_text, show_default=False)]
        arguments = {"positional": place}
    results = {"out": Out, "force": Force, "dry_run": DryRun} | ({"redraw": Redraw} if command.redraws else {})
    results |= {"adapter": Adapter} if takes_one or takes_several else {}
    measure.__annotations__ = arguments | options(experiment_type, NO_OPTIONS) | results
    return measure


def _specified(
    name: str,
    command: Command,
    experiment_type: type[Experiment],
    positional: list[str],
    flagged_models: list[str],
    adapter: bool,
    fields: dict,
) -> Experiment:
    """Return the experiment of a command line.

    Args:
        name: of the command.
        positional: arguments: models, perhaps after an experiment.
        flagged_models: from `--model`; if there are any, the first positional argument is an experiment.
        adapter: whether to merge the adapter beside each model.
        fields: options by field.
    """
    takes_one, takes_several = "model" in experiment_type.model_fields, "models" in experiment_type.model_fields
    example = " ".join([*invocation(name), command.example])
    if not takes_one and not takes_several:
        if not positional:
            raise UserError(f"no experiment is named; expected one, such as `{example}`")
        experiment = specify(positional[0], fields, None, experiment_type)

        from outliers.paper.artefacts import check_shown

        check_shown(experiment)
        return experiment
    flags = [experiment_type.model_fields[field].title or field for field, value in fields.items() if value is True]
    for path in positional[1:] if flags else ():  # a missing file after the models was meant as the value of a flag
        if re.search(r"\.[a-z]+$", path) and not os.path.exists(path):
            raise UserError(f"--{flags[-1]} takes no value, got '{path}'; --out names the folder of its file")
    name_of_experiment = None
    if takes_several and positional and (flagged_models or is_meant_as_experiment(positional[0])):
        name_of_experiment, *positional = positional
        if not is_experiment(name_of_experiment):
            hint = "(or the path of a .yaml file: the first argument beside --model is an experiment)"
            raise unknown_name("experiment", name_of_experiment, experiment_files(), hint)
    models = [f"{model}{WITH_ADAPTER * adapter}" for model in models_of([*positional, *flagged_models])]
    if adapter and not models:
        raise UserError("--adapter merges the adapter beside a model that is named; expected one")
    if takes_one and len(models) > 1:
        raise UserError(f"{name} takes one model, got {len(models)}: {', '.join(models)}; run it once for each model")
    if not models and (positional or flagged_models or not (name_of_experiment or command.default)):
        raise UserError(f"no model is named; expected {'one' if takes_one else 'some'}, such as `{example}`")
    if takes_one:
        chosen = {"model": models[0]}
    elif models:
        chosen = {field: models for field in OF_MODELS if field in experiment_type.model_fields}
    else:
        chosen = {} if name_of_experiment else command.instead(fields)
    return specify(name_of_experiment, chosen | fields, command.default, experiment_type)


def _measure(name: str, experiment: Experiment, out: Path | None, force: bool) -> None:
    """Run an experiment, and print and write the results; or reprint what the same run printed before.

    The models are checked before anything that needs torch is imported.
    """
    from outliers.config.validate import validate
    from outliers.runs.free import check_room_for_imports
    from outliers.runs.reprint import output_key, page_request, record_run, reprint, show_page

    folder, key = out or experiment.folder, output_key(validate(experiment), command_line(name))
    if not force and (text := reprint(key, folder)):
        print(text)
        return

    check_room_for_imports()
    import_for_good("outliers.runs.engine")
    from outliers.runs.run import RENDERING, check_all_measured, check_any_measured, fitted, rendering, run
    from outliers.subjects.model_cache import ModelCache
    from outliers.terminal.progress import Progress

    experiments, model_cache = [experiment], ModelCache()
    experiment = fitted(experiment, folder, force, model_cache)
    with Progress() as bar:
        bar.expect(RENDERING)
        rows = run(experiment, folder, force, model_cache, bar)
        check_any_measured(rows)
        from outliers.show.section import Context, section_of  # after the measurement, like the view
        from outliers.show.write import files_of, write

        with rendering(bar, experiment.name):
            if experiment.view is None:
                from outliers.paper.report import shown_section  # which imports all commands

                section = shown_section(experiment, folder, rows)
            else:
                section = section_of(resolved(type(experiment).view), rows, Context(experiment, folder))
            show_page(folder, page_request(experiments))
            text = write(section, folder, command_line(name))
    print(text)
    failed = any("failed" in row for row in rows)
    record_run(folder, experiments, None if failed else key, command_line(name), [*files_of(section), PAGE], text)
    check_all_measured(rows)


def _preview(experiment: Experiment, out: Path | None) -> None:
    from outliers.config.validate import validate

    validate(experiment)
    import_for_good("outliers.runs.engine")
    from outliers.runs.budget import preview
    from outliers.runs.run import prepared_plans

    print(preview([(prepared_plans(experiment), out or experiment.folder)]))


def _redraw(name: str, experiment_type: type[Experiment], folder: Path, out: Path | None, others: list) -> None:
    """Print and write the results of the finished rows of a folder; out: by default the same folder."""
    from outliers.runs.rows import read_rows
    from outliers.runs.run import records
    from outliers.show.section import Context, section_of
    from outliers.show.write import write

    if any(value not in (None, False) for value in others):
        raise UserError(f"--redraw '{folder}' with models or options of a measurement; expected --out alone beside it")
    rows = records(row for row in read_rows(folder) if row.run.get("experiment") == name)
    if not rows:
        raise UserError(
            f"'{folder}' has no finished rows of {name}; expected a folder with `rows.jsonl`, such as the one in which "
            "outliers.OutlierCallback writes them"
        )
    place = out or folder
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    print(
        write(
            section_of(resolved(experiment_type.view), rows, Context(experiment_type, folder)),
            place,
            command_line(name),
        )
    )
