"""From what is typed to rows and their page: one way for every kind of specification."""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from inspect import Parameter
from itertools import starmap
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from outliers.errors import UserError, unknown_name
from outliers.files import writing
from outliers.specification.fields import MODEL
from outliers.specification.files import experiment_files, is_experiment, specify
from outliers.specification.kinds import Named
from outliers.terminal.command import Force, Out, called, import_for_good, typed
from outliers.terminal.options import options, signed

OF_MODELS = ("models", "candidates")  # what an experiment has others of where models are named
APART = ("variants",)  # whose entries may have commas: an option each
ALIKE = 0.8  # of difflib: a mistyped experiment, rather than a model

EXPERIMENT = "Before them, an experiment file or the name of an embedded one, whose models they replace."
REDRAW = "Measure nothing: redraw the rows in this folder, such as those of a watched training."
Redraw = Annotated[Path | None, Option("--redraw", help=REDRAW, metavar="FOLDER", show_default=False)]
Models = Annotated[list[str] | None, Option("--model", "--models", help="Models as an option.", metavar="A,B,…")]


def measuring(
    name: str,
    kind: type[Named],
    doc: str,
    default: str | None = None,
    instead: Callable[[dict], dict] = lambda fields: {},
    redraws: bool = False,
) -> Callable:
    """A command that measures a kind of specification, as a function from whose parameters Typer makes its options.

    kind: whose fields are its options; one with `models` takes several, and an experiment before them. doc: of the
    command's file, whose further paragraphs are its help. default: the experiment that is measured where neither one
    nor models are given. instead: what fields of that experiment are instead, by those that are given. redraws: whether
    it can draw the rows of a folder that something else wrote.
    """

    def command(
        positional: list[str] | None,
        models: list[str] | None,
        out: Path | None,
        force: bool,
        redraw: Path | None = None,
        **given,
    ) -> None:
        if redraw is not None:
            _redraw(name, kind, redraw, out, [positional, models, force, *given.values()])
            return
        fields = _fields(given)
        _check_flags(kind, fields, positional or [])
        experiment, chosen = _experiment_and_models(name, kind, positional or [], models or [], default)
        if experiment is None and not chosen:
            chosen = instead(fields)
        _measure(name, specify(experiment, chosen | fields, default, kind), out, force)

    metavar, help_text = ("MODEL", MODEL) if _takes_one_model(kind) else ("EXPERIMENT|MODEL", f"{MODEL} {EXPERIMENT}")
    places = Annotated[list[str] | None, Argument(metavar=metavar, help=help_text, show_default=False)]
    before = {"positional": places, "models": Models}
    return _finished(command, name, doc, kind, before, ["model", "models"], {"redraw": Redraw} if redraws else {})


def of_experiments(name: str, kind: type[Named], doc: str, without: Iterable[str], example: str) -> Callable:
    """A command that runs experiments of a kind that names no models, by the names that they have or by their files.

    without: fields that only a file can say. example: an experiment that comes along.
    """

    def command(experiment: str | None, out: Path | None, force: bool, **given) -> None:
        if experiment is None:
            raise UserError(f"no experiment is named; expected one, such as `{' '.join([*called(name), example])}`")
        spec = specify(experiment, _fields(given), None, kind)

        from outliers.paper.report import check_shown, shown_section

        check_shown(spec)
        _measure(name, spec, out, force, shown_section)

    help_text = f"The name of one that comes along, such as {example}, or a file."
    place = Annotated[str | None, Argument(metavar="EXPERIMENT", help=help_text, show_default=False)]
    return _finished(command, name, doc, kind, {"experiment": place}, without, {})


def _finished(
    command: Callable, name: str, doc: str, kind: type[Named], before: dict, without: Iterable[str], after: dict
) -> Callable:
    """A command with its name, its help and its parameters: some, the fields of a kind, where results go, some more."""
    command.__name__, command.__doc__ = name, doc.partition("\n\n")[2]

    def option(parameter: str, annotation: object, default: object = None) -> Parameter:
        return Parameter(parameter, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    fields = options(kind, without=[*Named.model_fields, *without])
    results = [option("out", Out), option("force", Force, False)]
    return signed(command, [*starmap(option, before.items()), *fields, *results, *starmap(option, after.items())])


def _fields(given: dict) -> dict:
    """The values of the options that are given; the fields themselves divide what has commas."""
    fields = {field: value for field, value in given.items() if value is not None}
    joined = {
        field: ",".join(value) for field, value in fields.items() if isinstance(value, list) and field not in APART
    }
    return fields | joined


def _check_flags(kind: type[Named], fields: dict, places: list[str]) -> None:
    """Raise UserError where a file that is not there stands behind the models, as if it were the value of a flag."""
    flags = [kind.model_fields[field].title or field for field, value in fields.items() if value is True]
    for place in places[1:] if flags else ():
        if re.search(r"\.[a-z]+$", place) and not os.path.exists(place):
            raise UserError(f"--{flags[-1]} takes no value, got '{place}'; --out names the folder of its file")


def _takes_one_model(kind: type[Named]) -> bool:
    return "model" in kind.model_fields


def _experiment_and_models(
    command: str, kind: type[Named], places: list[str], behind: list[str], default: str | None
) -> tuple[str | None, dict]:
    """The experiment that is named, if one is, and the fields of the models that are.

    behind: models behind their option, beside which what is in the first place is an experiment.
    """
    experiment = None
    if places and not _takes_one_model(kind) and (behind or is_meant_as_experiment(places[0])):
        experiment, *places = places
        if not is_experiment(experiment):
            hint = "or the path of a .yaml file, which the first argument is beside --model"
            raise unknown_name("experiment", experiment, experiment_files(), hint)
    models = models_of([*places, *behind])
    if _takes_one_model(kind) and len(models) > 1:
        raise UserError(
            f"{command} takes one model, got {len(models)}: {', '.join(models)}; run it once for each model"
        )
    if not models and (places or behind or not (experiment or default)):
        example = " ".join([*called(command), "pocket/gpt2-1.7m"])
        count = "one" if _takes_one_model(kind) else "some"
        raise UserError(f"no model is named; expected {count}, such as `{example}`")
    if _takes_one_model(kind):
        return None, {"model": models[0]}
    return experiment, {field: models for field in OF_MODELS if models and field in kind.model_fields}


def models_of(entries: list[str]) -> list[str]:
    """Models that are named one by one or with commas; a path of its own may have one."""
    return [part for entry in entries for part in ([entry] if os.path.exists(entry) else entry.split(",")) if part]


def is_meant_as_experiment(name: str) -> bool:
    """Whether this names an experiment, a set of them, or nothing that is here but nearly one."""
    names = [part for known in experiment_files() for part in (known, *known.split("/"))]
    return (
        name in names
        or is_experiment(name)
        or bool(difflib.get_close_matches(name, names, 1, ALIKE) and not os.path.exists(name))
    )


def _measure(name: str, spec: Named, out: Path | None, force: bool, shown: Callable | None = None) -> None:
    """Print and write what a specification measures, or print what the same run printed before; what needs torch is
    imported after a look at the models.

    shown: what makes a section of the specification, the folder and the rows, by default the view of its kind.
    """
    from outliers.runs.again import keep, key_of, printed
    from outliers.specification.door import checked

    folder, key = out or spec.folder, key_of(checked(spec), typed(name))
    if not force and (text := printed(folder, key)):
        print(text)
        return

    import_for_good("outliers.runs.engine", "outliers.show.write")
    from outliers.paper.shown import show
    from outliers.runs.run import check_all_measured, run
    from outliers.show.write import write

    rows = run(spec, folder, force)
    text = write((shown or show)(spec, folder, rows), folder, typed(name))
    print(text)
    check_all_measured(rows)
    keep(folder, key, text)


def _redraw(name: str, kind: type[Named], folder: Path, out: Path | None, others: list) -> None:
    """Print and write what the finished rows in a folder show, into the same folder by default."""
    from outliers.paper.shown import view_of
    from outliers.runs.rows import read
    from outliers.runs.run import records
    from outliers.show.section import section_of
    from outliers.show.write import write

    if any(value not in (None, False) for value in others):
        raise UserError(f"--redraw '{folder}' with models or options of a measurement; expected --out alone beside it")
    rows = records(row for row in read(folder) if row.made.get("experiment") == name)
    if not rows:
        raise UserError(
            f"'{folder}' has no finished rows of {name}; expected a folder with `rows.jsonl`, such as the one in which "
            "outliers.OutlierCallback writes them"
        )
    place = out or folder
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    print(write(section_of(view_of(kind), rows), place, typed(name)))
