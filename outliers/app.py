"""The table of the commands, and the way from a command line to rows and their page."""

import difflib
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option

from outliers.errors import UserError, unknown_name
from outliers.files import PAGE, writing
from outliers.models.names import WITH_ADAPTER
from outliers.specification.fields import MODEL, resolved
from outliers.specification.files import experiment_files, is_experiment, specify
from outliers.specification.kinds import Named
from outliers.terminal import command as terminal
from outliers.terminal.command import DryRun, Force, Out, called, import_for_good, typed
from outliers.terminal.options import options


class Command(NamedTuple):
    """A command that measures; its help stands in the file of its name.

    kind: the type of its specification, or `module:name` of the type, whose fields are the options. If it has `models`,
    the command takes several models, and an experiment before them; without a model or models, an experiment alone.
    default: the experiment that runs if neither one nor models are given. instead: function of the given fields that
    returns fields of that experiment to override. redraws: whether it can draw the rows in a folder that something else
    wrote. example: an argument for messages. view: `module:function` that makes a section from specification, folder
    and rows.
    """

    kind: type[Named] | str
    default: str | None = None
    instead: Callable[[dict], dict] = lambda fields: {}
    redraws: bool = False
    example: str = "pocket/gpt2-1.7m"
    view: str = "outliers.paper.shown:show"


COMMANDS = {
    "ablate": Command("outliers.presets.ablate:Ablation"),
    "damage": Command("outliers.presets.damage:Damage"),
    "emergence": Command(
        "outliers.presets.emergence:Emergence",
        "pocket/table4",
        lambda fields: {"name": "emergence", "shows": None},
        redraws=True,
    ),
    "latency": Command("outliers.presets.latency:Latency"),
    "measure": Command("outliers.presets.cells:Cells"),
    "memory": Command(
        "outliers.presets.memory:Memory",
        "paper/table3",
        lambda fields: {"name": "memory", "candidates": None} if "hardware" in fields else {},
    ),
    "origins": Command("outliers.presets.origins:Account"),
    "plan": Command("outliers.presets.plan:Planning"),
    "sweep": Command("outliers.presets.sweep:Experiment", "pocket/table1"),
    "trace": Command("outliers.presets.emergence:OneModel"),
    "training": Command(
        "outliers.presets.training:Training", example="training/causes", view="outliers.paper.report:shown_section"
    ),
    "zeroshot": Command("outliers.presets.zeroshot:ZeroShot", "pocket/figure1"),
}  # other commands are functions in their files

NO_OPTIONS = (*Named.model_fields, "model", "models", "recipe", "runs")  # arguments, or fields for files only
OF_MODELS = ("models", "candidates")  # fields of an experiment that given models replace
APART = ("variants",)  # their entries may contain commas, so each has an option of its own
ALIKE = 0.8  # similarity of difflib from which a name is a mistyped experiment, not a model

EXPERIMENT = "Before them, an experiment file or the name of an embedded one, whose models they replace."
REDRAW = "Measure nothing: redraw the rows in this folder, such as those of a watched training."
Redraw = Annotated[Path | None, Option("--redraw", help=REDRAW, metavar="FOLDER", show_default=False)]
ADAPTER = "Merge the adapter of PEFT that lies beside the weights of each model."
Adapter = Annotated[bool, Option("--adapter", help=ADAPTER)]
Models = Annotated[list[str] | None, Option("--model", "--models", help="Models as an option.", metavar="A,B,…")]


def run(name: str) -> None:
    """Run the command of a name with the process's arguments."""
    terminal.run(command_of(name))


def command_of(name: str) -> Callable:
    """Return a command as a function with its arguments and options as parameters, and its help as docstring."""
    # not imported, for the module would replace the function `outliers.sweep`
    found = runpy.run_module(f"outliers.{name}")
    command = COMMANDS.get(name) or found[name]
    function = _measuring(name, command) if isinstance(command, Command) else command
    function.__name__, function.__doc__ = name, found["__doc__"].partition("\n\n")[2]
    return function


def _measuring(name: str, command: Command) -> Callable:
    kind = resolved(command.kind)

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
            _redraw(name, kind, redraw, out, [positional, models, force, *given.values()])
            return
        places = [positional] if isinstance(positional, str) else positional or []
        fields = {  # fields split their values at commas
            field: ",".join(value) if isinstance(value, list) and field not in APART else value
            for field, value in given.items()
            if value is not None
        }
        spec = _specified(name, command, kind, places, models or [], bool(adapter), fields)
        if dry_run:
            _preview(spec, out)
        else:
            _measure(name, spec, out, force, command.view)

    one, several = "model" in kind.model_fields, "models" in kind.model_fields
    if one or several:
        metavar, help_text = ("MODEL", MODEL) if one else ("EXPERIMENT|MODEL", f"{MODEL} {EXPERIMENT}")
        place = Annotated[list[str] | None, Argument(metavar=metavar, help=help_text, show_default=False)]
        arguments = {"positional": place, "models": Models}
    else:
        help_text = f"The name of one that comes along, such as {command.example}, or a file."
        place = Annotated[str | None, Argument(metavar="EXPERIMENT", help=help_text, show_default=False)]
        arguments = {"positional": place}
    results = {"out": Out, "force": Force, "dry_run": DryRun} | ({"redraw": Redraw} if command.redraws else {})
    results |= {"adapter": Adapter} if one or several else {}
    measure.__annotations__ = arguments | options(kind, NO_OPTIONS) | results
    return measure


def _specified(
    name: str,
    command: Command,
    kind: type[Named],
    places: list[str],
    behind: list[str],
    adapter: bool,
    fields: dict,
) -> Named:
    """Return the specification that a command line asks for.

    Args:
        name: of the command.
        places: positional arguments: models, perhaps behind an experiment.
        behind: models from `--model`; if there are any, the first positional argument is an experiment.
        adapter: whether to merge the adapter beside each model.
        fields: options by field.
    """
    one, several = "model" in kind.model_fields, "models" in kind.model_fields
    example = " ".join([*called(name), command.example])
    if not one and not several:
        if not places:
            raise UserError(f"no experiment is named; expected one, such as `{example}`")
        spec = specify(places[0], fields, None, kind)

        from outliers.paper.report import check_shown

        check_shown(spec)
        return spec
    _check_flags(kind, fields, places)
    experiment = None
    if several and places and (behind or is_meant_as_experiment(places[0])):
        experiment, *places = places
        if not is_experiment(experiment):
            hint = "or the path of a .yaml file, which the first argument is beside --model"
            raise unknown_name("experiment", experiment, experiment_files(), hint)
    models = [f"{model}{WITH_ADAPTER * adapter}" for model in models_of([*places, *behind])]
    if adapter and not models:
        raise UserError("--adapter merges the adapter beside a model that is named; expected one")
    if one and len(models) > 1:
        raise UserError(f"{name} takes one model, got {len(models)}: {', '.join(models)}; run it once for each model")
    if not models and (places or behind or not (experiment or command.default)):
        raise UserError(f"no model is named; expected {'one' if one else 'some'}, such as `{example}`")
    if one:
        chosen = {"model": models[0]}
    elif models:
        chosen = {field: models for field in OF_MODELS if field in kind.model_fields}
    else:
        chosen = {} if experiment else command.instead(fields)
    return specify(experiment, chosen | fields, command.default, kind)


def _check_flags(kind: type[Named], fields: dict, places: list[str]) -> None:
    """Raise UserError if a missing file follows the models, as if it were the value of a flag."""
    flags = [kind.model_fields[field].title or field for field, value in fields.items() if value is True]
    for place in places[1:] if flags else ():
        if re.search(r"\.[a-z]+$", place) and not os.path.exists(place):
            raise UserError(f"--{flags[-1]} takes no value, got '{place}'; --out names the folder of its file")


def models_of(entries: list[str]) -> list[str]:
    """Return models that are given one by one or separated by commas; an existing path may contain a comma."""
    return [part for entry in entries for part in ([entry] if os.path.exists(entry) else entry.split(",")) if part]


def is_meant_as_experiment(name: str) -> bool:
    """Return whether a name is that of an experiment or of a set of them, or close to one and nothing that exists."""
    names = [part for known in experiment_files() for part in (known, *known.split("/"))]
    return (
        name in names
        or is_experiment(name)
        or bool(difflib.get_close_matches(name, names, 1, ALIKE) and not os.path.exists(name))
    )


def _measure(name: str, spec: Named, out: Path | None, force: bool, view: str) -> None:
    """Run a specification, and print and write the results; or reprint what the same run printed before.

    The models are checked before anything that needs torch is imported.
    """
    from outliers.runs.again import keep, key_of, printed, request_of, turn_to
    from outliers.runs.free import check_room_for_imports
    from outliers.specification.door import checked

    folder, key = out or spec.folder, key_of(checked(spec), typed(name))
    if not force and (text := printed(key, folder)):
        print(text)
        return

    check_room_for_imports()
    import_for_good("outliers.runs.engine")
    from outliers.runs.run import DRAWN, check_all_measured, check_any_measured, drawing, fitted, run
    from outliers.subjects.model_cache import ModelCache
    from outliers.terminal.progress import Progress

    asked, model_cache = [spec], ModelCache()
    spec = fitted(spec, folder, force, model_cache)
    with Progress() as bar:
        bar.expect(DRAWN)
        rows = run(spec, folder, force, model_cache, bar)
        check_any_measured(rows)
        from outliers.show.write import files_of, write  # after the measurement, like the view

        with drawing(bar, spec.name):
            section = resolved(view)(spec, folder, rows)
            turn_to(folder, request_of(asked))
            text = write(section, folder, typed(name))
    print(text)
    failed = any("failed" in row for row in rows)
    keep(folder, asked, None if failed else key, typed(name), [*files_of(section), PAGE], text)
    check_all_measured(rows)


def _preview(spec: Named, out: Path | None) -> None:
    from outliers.specification.door import checked

    checked(spec)
    import_for_good("outliers.runs.engine")
    from outliers.runs.budget import preview
    from outliers.runs.run import prepared

    print(preview([(prepared(spec), out or spec.folder)]))


def _redraw(name: str, kind: type[Named], folder: Path, out: Path | None, others: list) -> None:
    """Print the results in the finished rows of a folder, and write them, into the same folder by default."""
    from outliers.paper.shown import view_of
    from outliers.runs.rows import read
    from outliers.runs.run import records
    from outliers.show.section import section_of
    from outliers.show.write import write

    if any(value not in (None, False) for value in others):
        raise UserError(f"--redraw '{folder}' with models or options of a measurement; expected --out alone beside it")
    rows = records(row for row in read(folder) if row.run.get("experiment") == name)
    if not rows:
        raise UserError(
            f"'{folder}' has no finished rows of {name}; expected a folder with `rows.jsonl`, such as the one in which "
            "outliers.OutlierCallback writes them"
        )
    place = out or folder
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    print(write(section_of(view_of(kind), rows), place, typed(name)))
