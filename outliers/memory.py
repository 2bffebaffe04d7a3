"""`python -m outliers.memory`: bytes that models need, and the largest that some GPUs hold, as in Table 3."""

import re
from typing import Annotated

from typer import Argument, Option

from outliers.errors import UserError
from outliers.terminal.command import Force, Out, run, typed


def memory(
    models: Annotated[
        list[str] | None,
        Argument(metavar="[MODEL]...", help="Hub id, local folder or pocket/NAME.", show_default=False),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        Option("--gpu", help="Hardware: 8x24 for eight GPUs of 24 GiB, 24 for one; repeatable.", show_default=False),
    ] = None,
    context: Annotated[int | None, Option(help="Tokens a sequence; by default 256.")] = None,
    batch: Annotated[int | None, Option(help="Sequences at once; by default 1.")] = None,
    headroom: Annotated[float | None, Option(help="GiB that each GPU keeps free; by default 0.75.")] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Say what models need at inference in 16 and in 8 bits, and the largest that fits GPUs.

    Counts weights, KV cache and activations of a model's configuration: no weights are loaded, no GPU is needed. With
    no model, those of the paper's Table 3 and their families; with no model and no GPUs, Table 3.

    Examples:

    `python -m outliers.memory`

    `python -m outliers.memory --gpu 2x24 --gpu 16 --context 2048`

    `python -m outliers.memory facebook/opt-6.7b bigscience/bloom-7b1 --gpu 12 --batch 8`
    """
    settings = {"context": context, "batch": batch, "headroom": headroom}
    fields = {name: value for name, value in settings.items() if value is not None}
    if gpus:
        fields["hardware"] = [_hardware(name) for name in gpus]

    from outliers.specification.door import checked
    from outliers.specification.files import make_experiment, read_experiment
    from outliers.specification.kinds import Memory

    if models:
        specified = make_experiment(fields | {"models": models}, Memory)
    elif gpus:
        of_file = read_experiment("paper/table3")
        specified = make_experiment(of_file.replaced(fields | {"name": "memory", "candidates": None}), Memory)
    else:
        specified = make_experiment(read_experiment("paper/table3").replaced(fields), Memory)

    checked(specified)

    from outliers.experiment.memory import measure_memory
    from outliers.report.artefacts.table3 import memory_section
    from outliers.report.write import write

    rows = measure_memory(specified, out, force)
    print(write(memory_section(rows), out or specified.folder, typed("memory")))


def _hardware(name: str) -> dict:
    """The fields of GPUs given as 8x24 or 24."""
    found = re.fullmatch(r"(?:([0-9]{1,9})x)?([0-9]{1,9}(?:\.[0-9]+)?)", name)
    if not found:
        raise UserError(f"hardware '{name}'; expected a number of GPUs and the GiB of each, such as --gpu 8x24")
    count = int(found[1] or 1)
    return {"hardware": f"{count}x GPU", "gpus": count, "gigabytes": float(found[2])}


if __name__ == "__main__":
    run(memory)
