"""`python -m outliers.emergence`: outlier features along a family of models or along training, Figures 3 and 4."""

from typing import Annotated

from typer import Option

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
    Stream,
    Text,
    given,
    run,
    typed,
)


def emergence(
    models: Models = None,
    revisions: Annotated[
        str | None, Option(help="Of one model, such as step1000,step8000; for a local folder its checkpoints' folders.")
    ] = None,
    text: Text = None,
    block: Block = None,
    blocks: Blocks = None,
    bos: Bos = None,
    alpha: Alpha = None,
    device: Device = None,
    dtype: Dtype = None,
    stream: Stream = None,
    memory: Memory = None,
    engine: Engine = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Measure how outlier features emerge with size, with perplexity, or along training.

    Prints the paper's Table 4 with the exponential fits of Figure 3b, and writes rows, tables, and Figures 3 and 4. By
    default all pocket models. Run again, it goes on where it stopped.

    Examples:

    `python -m outliers.emergence`

    `python -m outliers.emergence --model gpt2 --model gpt2-medium --model gpt2-large --text c4 --block 1024`

    `python -m outliers.emergence --model EleutherAI/pythia-160m --revisions step1000,step8000,step64000,step143000`
    """
    fields = given(locals())

    from outliers.specification.door import checked
    from outliers.specification.files import make_experiment, read_experiment
    from outliers.specification.kinds import Emergence

    default = read_experiment("pocket/table4").values["models"]
    specified = checked(make_experiment({"models": default} | fields, Emergence))

    from outliers.experiment.emergence import emergence as measure
    from outliers.report.artefacts.table4 import emergence_section
    from outliers.report.write import write

    rows = measure(specified, out, force)
    print(write(emergence_section(rows), out or specified.folder, typed("emergence")))


if __name__ == "__main__":
    run(emergence)
