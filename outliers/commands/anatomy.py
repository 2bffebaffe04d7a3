"""The layers of a model, kind by kind."""

from typing import Annotated

from typer import Argument

from outliers.commands import Command
from outliers.errors import UserError
from outliers.models.names import may_be_type
from outliers.terminal.command import models_of

MODELS = (
    "A Hugging Face id, a folder, a GGUF file, a pocket model, or a type of model that transformers has, for its "
    "default configuration."
)


def anatomy(
    names: Annotated[list[str] | None, Argument(metavar="MODEL", help=MODELS, show_default=False)] = None,
) -> None:
    """Print the anatomy of models."""
    if not names:
        raise UserError("no model is named; expected some, such as `outliers anatomy smollm2-135m`")
    from outliers.config.validate import check_configs  # late, as it imports the hub's library

    models = models_of(names)
    check_configs(name for name in models if not may_be_type(name))

    from outliers.views.anatomy import anatomy as anatomy_of  # late, as it imports torch

    print("\n\n".join(str(anatomy_of(name)) for name in models))


COMMAND = Command(
    "what each kind of a model's layers consists of",
    """Print the layers of a model, kind by kind: norms, projections by role, shapes, and what schemes leave exact.

No weights are read: a configuration is enough, also that of a model which no machine here could hold.

Examples:

`python -m outliers.anatomy smollm2-135m`

`python -m outliers.anatomy deepseek_v3`
""",
    anatomy,
)
