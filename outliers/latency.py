"""`python -m outliers.latency`: milliseconds a generated token, as in Table 6 of the paper."""

from typing import Annotated

from typer import Argument, Option

from outliers.terminal.command import Alpha, Bos, Device, Force, Out, Revision, Text, given, run, typed


def latency(
    models: Annotated[
        list[str], Argument(metavar="MODEL", help="Hub id, local folder or pocket/NAME.", show_default=False)
    ],
    batches: Annotated[str | None, Option("--batch", help="Sequences at once; by default 1,8,32.")] = None,
    schemes: Annotated[
        str | None, Option("--scheme", help="By default fp32,llm.int8; fp32 is the model without quantization.")
    ] = None,
    prompt: Annotated[int | None, Option(help="Tokens a sequence has before; by default 128.")] = None,
    tokens: Annotated[int | None, Option(help="Timed decode steps of a generation; by default 32.")] = None,
    repeats: Annotated[int | None, Option(help="Timed generations; by default 3.")] = None,
    text: Text = None,
    bos: Bos = None,
    alpha: Alpha = None,
    device: Device = None,
    dtype: Annotated[
        str | None, Option(help="Of what is not quantized: bfloat16 (the default), float16 or float32.")
    ] = None,
    revision: Revision = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Time the generation of tokens with a KV cache, with and without int8 weights.

    Prints the paper's Table 6, milliseconds a generated token by batch, and writes rows, tables and a page. Run again,
    it goes on where it stopped.

    Examples:

    `python -m outliers.latency pocket/gpt2-5.9m`

    `python -m outliers.latency facebook/opt-1.3b --batch 1,8 --prompt 512 --tokens 64`

    `python -m outliers.latency bigscience/bloom-7b1 --scheme fp32,absmax-vector,llm.int8 --device cuda --dtype float16`
    """
    fields = given(locals())

    from outliers.specification.door import checked
    from outliers.specification.files import make_experiment
    from outliers.specification.kinds import Latency

    specified = checked(make_experiment(fields, Latency))

    from outliers.experiment.latency import measure_latency
    from outliers.report.artefacts.table6 import latency_section
    from outliers.report.write import write

    rows = measure_latency(specified, out, force)
    print(write(latency_section(rows), out or specified.folder, typed("latency")))


if __name__ == "__main__":
    run(latency)
