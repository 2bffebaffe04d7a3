"""`python -m outliers.zeroshot`: zero-shot accuracy under 8-bit schemes, as in Figure 1 of the paper."""

from typing import Annotated

from typer import Argument, Option

from outliers.terminal.command import Alpha, Device, Dtype, Force, Models, Out, Revision, given, run, typed


def zeroshot(
    experiment: Annotated[str | None, Argument(help="An experiment file, or the name of one that comes along.")] = None,
    models: Models = None,
    schemes: Annotated[
        list[str] | None,
        Option("--scheme", help="Repeatable; by default fp32, absmax-vector and llm.int8; fp32 is not quantized."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        Option(
            "--task",
            help="Repeatable; of lm-eval, by default hellaswag, piqa, winogrande and lambada_openai; or lambada-local "
            "and piqa-local, of which 200 examples each come along.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="Folder with lambada_test.jsonl, piqa_valid.jsonl and piqa_valid_labels.lst, from which the local "
            "tasks read more than the examples that come along."
        ),
    ] = None,
    limit: Annotated[int | None, Option(help="Examples of each task, from its start; by default all.")] = None,
    alpha: Alpha = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Measure the zero-shot accuracy of models under 8-bit schemes with the harness lm-eval.

    Prints the table and writes rows, the table and a figure. Run again, it goes on where it stopped. Options replace
    the fields of the experiment; with --model and no experiment, the other fields have their defaults. The harness
    comes with `pip install 'outliers[zeroshot]'`.

    Examples:

    `python -m outliers.zeroshot`

    `python -m outliers.zeroshot --model smollm2-135m --task lambada-local --scheme fp32 --scheme absmax`

    `python -m outliers.zeroshot paper/figure1 --model facebook/opt-125m --task piqa --task winogrande`
    """
    fields = given(locals())

    from outliers.specification.door import checked
    from outliers.specification.files import specify
    from outliers.specification.kinds import ZeroShot

    specified = checked(specify(experiment, fields, "pocket/figure1", ZeroShot))

    from outliers.experiment.zeroshot import measure_zeroshot
    from outliers.report.artefacts.figure1 import zeroshot_section
    from outliers.report.write import write

    rows = measure_zeroshot(specified, out, force)
    print(write(zeroshot_section(rows), out or specified.folder, typed("zeroshot")))


if __name__ == "__main__":
    run(zeroshot)
