"""The command `report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from outliers.commands import Command
from outliers.config.files import is_meant_as_experiment
from outliers.terminal.command import DryRun, Force, Models, Out, command_line, models_of

DEFAULT, PUBLISHED = "pocket", "published"
EXPERIMENTS = (
    f"A set of experiments ({DEFAULT}, the default, paper, or look, of one model), one of them (paper/table4), or an "
    f"experiment file; then models in place of theirs. Or {PUBLISHED}: published facts beside measured ones."
)


def report(
    places: Annotated[
        list[str] | None, Argument(metavar="EXPERIMENT|MODEL", help=EXPERIMENTS, show_default=False)
    ] = None,
    models: Models = None,
    redraw: Annotated[bool, Option("--redraw", help="Measure nothing: redraw the finished rows.")] = False,
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:N or auto; by default as the experiments say.")] = None,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Print tables and figures of experiments, or published facts beside measured ones."""
    places, models = places or [], models or []
    if places and places[0] == PUBLISHED:
        from outliers.paper.agreement import report_agreement

        print(report_agreement([*places[1:], *models_of(models)], device or "cpu", out, redraw))
        return
    name, *others = places if places and is_meant_as_experiment(places[0]) else [DEFAULT, *places]
    from outliers.config.validate import check_configs  # late, as it imports the hub's library

    models = models_of([*others, *models])
    check_configs(models)
    if dry_run:
        from outliers.paper.report import previewed

        print(previewed(name, out, device, models))
        return

    from outliers.runs.reprint import report_output_key, reprint  # which knows the hub

    folders = [out] if out else [Path("results", name), *Path("results", name).glob("*/")]
    if not (force or redraw or Path(name).suffix) and (
        text := reprint(report_output_key(command_line("report")), *folders)
    ):
        print(text)
        return

    from outliers.paper.report import report_experiments
    from outliers.runs.run import check_all_measured

    text, rows = report_experiments(name, out, force, redraw, device, models)
    print(text)
    check_all_measured([] if redraw else rows)


COMMAND = Command(
    "every table and figure of the paper, measured beside published",
    """Make tables and figures of the LLM.int8() paper, with the published numbers beside the measured ones.

Or one page of a model: `look` traces it, finds the writers of its outlier features, ablates them, and measures the
damage of 8-bit schemes.

Measures all that is unfinished and writes rows, tables and figures, and one page with all of them, `report.html`.
Measurements that fail are printed as not run, with the reason.

Examples:

`python -m outliers.report`

`python -m outliers.report look smollm2-135m`

`python -m outliers.report paper/table4 --device cpu`

`python -m outliers.report pocket/table4 gpt2 gpt2-medium`

`python -m outliers.report pocket --redraw`

`python -m outliers.report published smollm2-135m`
""",
    report,
)
