"""`python -m outliers.trace`: which features are outliers, where, and how large."""

from functools import partial

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


def trace(
    model: Model,
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
    """Trace a model's hidden states: its outlier features and its row in the paper's Table 4.

    Prints the features, the largest input of each kind of projection, massive activations and attention sinks; writes
    the trace, rows, tables and figures to results/trace/NAME. Run again, it goes on where it stopped.

    Examples:

    `python -m outliers.trace pocket/gpt2-1.7m`

    `python -m outliers.trace facebook/opt-1.3b --text c4 --block 2048 --device cuda --dtype float16`
    """
    fields = given(locals())

    from outliers.specification.door import checked
    from outliers.specification.files import make_experiment
    from outliers.specification.kinds import OneModel

    specified = checked(make_experiment(fields, OneModel))

    from outliers.experiment.place import place_of
    from outliers.experiment.tracing import trace_model
    from outliers.models.load import load_tokenizer
    from outliers.report.artefacts.trace import trace_section
    from outliers.report.write import write
    from outliers.text.tokens import visible_token

    folder = place_of(specified, out)
    found, rows = trace_model(specified, folder, force)
    names = partial(visible_token, load_tokenizer(specified.model, specified.revision))
    print(write(trace_section(found, rows, names), folder, typed("trace")))


if __name__ == "__main__":
    run(trace)
