"""`python -m outliers.sweep`: what every 8-bit scheme costs, as in Table 1 of the paper."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from outliers.command import run
from outliers.quantization.schemes import SCHEMES


def sweep(
    experiment: Annotated[str | None, Argument(help="An experiment file, or the name of one that comes along.")] = None,
    model: Annotated[list[str] | None, Option(help="Hub id, local folder or pocket/NAME; repeatable.")] = None,
    scheme: Annotated[list[str] | None, Option(help=f"Repeatable; by default all: {', '.join(SCHEMES)}.")] = None,
    text: Annotated[
        str | None, Option(help="sample (the default), c4, wikitext2, or a .txt, .txt.gz or .jsonl file.")
    ] = None,
    block: Annotated[int | None, Option(help="Tokens a block; by default 256.")] = None,
    blocks: Annotated[int | None, Option(help="How many blocks, from the start of the text; by default 32.")] = None,
    alpha: Annotated[float | None, Option(help="Outlier threshold of the decomposing schemes; by default 6.")] = None,
    device: Annotated[str | None, Option(help="cpu (the default), cuda or cuda:N.")] = None,
    dtype: Annotated[
        str | None, Option(help="Of weights and activations: float32 (the default), float16 or bfloat16.")
    ] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of the models on the hub.")] = None,
    out: Annotated[Path | None, Option(help="Folder for the results; by default results/NAME.")] = None,
    force: Annotated[bool, Option("--force", help="Measure again what is finished.")] = False,
) -> None:
    """Measure the perplexity of models under every 8-bit scheme of the paper's Table 1.

    Prints the table and writes rows, tables and a figure. Run again, it goes on where it stopped. Options replace
    the fields of the experiment; with --model and no experiment, the other fields have their defaults.

    Examples:

    `python -m outliers.sweep`

    `python -m outliers.sweep --model gpt2 --model facebook/opt-125m --text c4 --block 1024 --device cuda`

    `python -m outliers.sweep pocket --scheme fp32 --scheme llm.int8 --alpha 4`
    """
    given = {
        "models": model,
        "schemes": scheme,
        "text": text,
        "block": block,
        "blocks": blocks,
        "alpha": alpha,
        "device": device,
        "dtype": dtype,
        "revision": revision,
    }
    given = {field: value for field, value in given.items() if value is not None}

    from outliers.experiment.spec import make_experiment, read_experiment

    fields = {} if model and experiment is None else read_experiment(experiment or "pocket")
    specified = make_experiment(fields | given)

    from outliers.experiment.run import sweep as measure
    from outliers.report.write import write_sweep

    rows = measure(specified, out, force)
    print(write_sweep(rows, out or specified.folder))


if __name__ == "__main__":
    run(sweep)
