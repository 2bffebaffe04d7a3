"""`python -m outliers.sweep`: what every 8-bit scheme costs, as in Table 1 of the paper."""

from typing import Annotated

from typer import Argument, Option

from outliers.quantization.schemes import SCHEMES
from outliers.terminal.command import (
    Alpha,
    Block,
    Blocks,
    Bos,
    Device,
    Dtype,
    Engine,
    Force,
    Memory,
    Models,
    Out,
    Revision,
    Stream,
    Text,
    given,
    run,
    typed,
)


def sweep(
    experiment: Annotated[str | None, Argument(help="An experiment file, or the name of one that comes along.")] = None,
    models: Models = None,
    schemes: Annotated[
        list[str] | None, Option("--scheme", help=f"Repeatable; by default all: {', '.join(SCHEMES)}.")
    ] = None,
    text: Text = None,
    block: Block = None,
    blocks: Blocks = None,
    bos: Bos = None,
    alpha: Alpha = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    draws: Annotated[
        int | None,
        Option(help="Measure each so many times with embeddings changed by 1e-6, for mean ± scatter; by default 1."),
    ] = None,
    stream: Stream = None,
    memory: Memory = None,
    engine: Engine = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Measure the perplexity of models under every 8-bit scheme of the paper's Table 1.

    Prints the table and writes rows, tables and a figure. Run again, it goes on where it stopped. Options replace
    the fields of the experiment; with --model and no experiment, the other fields have their defaults.

    Examples:

    `python -m outliers.sweep`

    `python -m outliers.sweep --model gpt2 --model facebook/opt-125m --text c4 --block 1024 --device cuda`

    `python -m outliers.sweep pocket/table1 --scheme fp32 --scheme llm.int8 --alpha 4`
    """
    fields = given(locals())

    from outliers.specification.door import checked
    from outliers.specification.files import specify
    from outliers.specification.kinds import Experiment

    specified = checked(specify(experiment, fields, "pocket/table1", Experiment))

    from outliers.experiment.sweep import sweep as measure
    from outliers.report.artefacts.table1 import sweep_section
    from outliers.report.write import write

    rows = measure(specified, out, force)
    print(write(sweep_section(rows), out or specified.folder, typed("sweep")))


if __name__ == "__main__":
    run(sweep)
