"""`python -m outliers.ablate`: what a model loses without its outlier features."""

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
    Model,
    Out,
    Revision,
    Stream,
    Text,
    given,
    run,
    typed,
)


def ablate(
    model: Model,
    features: Annotated[
        str | None, Option(help="Such as 3,17; by default the outlier features that a trace finds.")
    ] = None,
    methods: Annotated[
        str | None, Option("--method", help="zero (the default), mean, shuffle, or several: zero,mean.")
    ] = None,
    where: Annotated[
        str | None, Option(help="Inputs that are changed for perplexity: attn_in (the default) or attn_in,ffn_in.")
    ] = None,
    controls: Annotated[int | None, Option(help="Draws of random features to compare with; by default 10.")] = None,
    seed: Annotated[int | None, Option(help="Of the draws and of shuffling; by default 0.")] = None,
    text: Text = None,
    block: Block = None,
    blocks: Blocks = None,
    bos: Bos = None,
    alpha: Alpha = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    stream: Stream = None,
    memory: Memory = None,
    engine: Engine = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Take outlier features out of a model; measure attention and perplexity beside random features.

    Prints the table and writes rows, tables and a figure to results/ablate/NAME. Run again, it goes on where it
    stopped.

    Examples:

    `python -m outliers.ablate pocket/opt-1.7m --method zero,mean,shuffle`

    `python -m outliers.ablate gpt2 --features 138,378,447 --text c4 --block 1024`
    """
    fields = given(locals())

    from outliers.specification.door import checked
    from outliers.specification.files import make_experiment
    from outliers.specification.kinds import Ablation

    specified = checked(make_experiment(fields, Ablation))

    from outliers.experiment.ablation import ablate_model
    from outliers.experiment.place import place_of
    from outliers.report.artefacts.ablation import ablation_section
    from outliers.report.write import write

    folder = place_of(specified, out)
    rows = ablate_model(specified, folder, force)
    print(write(ablation_section(rows), folder, typed("ablate")))


if __name__ == "__main__":
    run(ablate)
