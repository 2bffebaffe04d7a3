"""Names of a model's hidden states in other tools (docs/names.md)."""

from transformers import PreTrainedModel

from outliers.criterion import RESIDUAL, in_nnsight, in_transformerlens
from outliers.errors import UserError, unknown_name
from outliers.models.anatomy import layers_of, stacks_of, state_readers

LayerState = tuple[int, str]  # a layer and a role


def modules_of(model: PreTrainedModel) -> dict[LayerState, list[str]]:
    """Return the paths of the modules that read each hidden state, by layer and role, and for the residual stream the
    layer that puts it out."""
    modules: dict[LayerState, list[str]] = {}
    for reader in (one for one in state_readers(model) if one.expert is None):
        modules.setdefault(reader.layer_state, []).append(reader.path)
    return modules | {(layer.number, RESIDUAL): [layer.path] for layer in layers_of(model)}


TOOLS = {
    "transformerlens": lambda layer, role, _modules: in_transformerlens(layer, role),
    "nnsight": lambda _layer, role, modules: in_nnsight(role, modules[0]),
}


def state_names(model: PreTrainedModel, tool: str) -> dict[LayerState, str]:
    """Return the name of each hidden state of a model in a tool.

    Raises:
        UserError: the tool is unknown, or has no names for models with several stacks of layers.
    """
    if tool not in TOOLS:
        raise unknown_name("names", tool, TOOLS)
    if tool == "transformerlens" and len(stacks_of(model.config)) > 1:
        raise UserError(
            f"'{model.config.model_type}' has several stacks of layers, which names of TransformerLens do not tell "
            "apart; expected a model with one stack, or names of nnsight"
        )
    named = {state: TOOLS[tool](*state, modules) for state, modules in modules_of(model).items()}
    return {state: name for state, name in named.items() if name}
