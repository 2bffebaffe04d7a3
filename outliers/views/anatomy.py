"""The parts of each kind of a model's layers, by the roles of their projections."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from outliers.criterion import QUANTIZED, ROUTER
from outliers.errors import UserError
from outliers.models.anatomy import Layer, anatomy_of, family_of, layers_of, part_config, reader_at, width_of
from outliers.models.anatomy.experts import ExpertProjection, expert_count
from outliers.models.anatomy.weights import own_parameters
from outliers.models.load import find_config
from outliers.models.names import known_configs
from outliers.models.skeleton import skeleton
from outliers.models.source import local_place
from outliers.show.axes import count_label
from outliers.show.tables import Table, wrapped
from outliers.show.value import grouped
from outliers.show.words import ranges

COLUMNS = ("layers", "norm", "role", "module", "inputs", "outputs", "parameters", "quantized", "note")


@dataclass(frozen=True)
class ModelAnatomy:
    """The parts of a model's layers.

    kind: the type of the model. family: causal, masked, seq2seq or vision. layers: their number. features: of the
    residual stream. parameters: of the whole model. table: a row for each module of each kind of layer, with the layers
    of this kind, the norm in front, the role of what the module reads, its shape, its parameters, whether schemes
    quantize it, and a note.
    """

    kind: str
    family: str
    layers: int
    features: int
    parameters: int
    table: pd.DataFrame

    @property
    def quantized(self) -> float:
        """The share of the layers' parameters that schemes quantize, in percent."""
        sizes = self.table["parameters"] * self.table["layers"].map(len)
        return 100 * float(sizes[self.table["quantized"]].sum() / sizes.sum())

    def __str__(self) -> str:
        kinds = [kind for _, kind in self.table.groupby("kind", sort=False)]
        head = (
            f"{self.kind}: {self.family}, {self.layers} layers of {len(kinds)} kind{'s' * (len(kinds) > 1)}, "
            f"{self.features:,} features, {count_label(self.parameters)} parameters. "
            f"Schemes quantize {self.quantized:.3g} % of the weights in its layers."
        )
        return "\n\n".join([wrapped(head), *map(_layer_text, kinds)])


def anatomy(model: str | PretrainedConfig | PreTrainedModel) -> ModelAnatomy:
    """Return what each kind of a model's layers consists of; no weights are read.

    Args:
        model: a model, its configuration, or its name: a hub id, a local folder, a pocket model, or a type of model
            that transformers has, such as "mamba", for its default configuration.

    Raises:
        UserError: the model is unknown, transformers cannot build it, or no layers are found in it.

    Example:
        >>> outliers.anatomy("pocket/gpt2-0.1m").features
        24
    """
    if isinstance(model, str):
        model = _config(model)
    if isinstance(model, PretrainedConfig):
        model = part_config(model)
        anatomy_of(model)
        model = skeleton(model)
    layers = layers_of(model)
    rows = []
    kinds = grouped(layers, lambda layer: (layer.stack, *_rows(layer)))
    for number, ((_, *of_kind), alike) in enumerate(kinds.items()):
        numbers = tuple(layer.number for layer in alike)
        rows += [{"kind": number, "layers": numbers, **row} for row in map(dict, of_kind)]
    return ModelAnatomy(
        model.config.model_type,
        family_of(model.config).name,
        len(layers),
        width_of(model.config),
        sum(parameter.numel() for parameter in own_parameters(model).values()),
        pd.DataFrame(rows, columns=["kind", *COLUMNS]),
    )


def _config(name: str) -> PretrainedConfig:
    if name in CONFIG_MAPPING and name not in known_configs() and not local_place(name):
        try:
            return AutoConfig.for_model(name)
        except Exception as error:  # the default configuration of a type may be invalid
            raise UserError(f"transformers has no default configuration of '{name}' ({error}); give a model") from None
    return find_config(name)


def _rows(layer: Layer) -> Iterator[tuple]:
    """Return a row for each module of a layer, with its role."""
    anatomy = layer.anatomy
    front = {role: norm for norm, roles in anatomy.norms.items() for role in roles}
    front |= {path: norm for norm, paths in anatomy.read_by.items() for path in paths}
    behind = {role: norm for norm, role in anatomy.norms_behind.items()}

    def row(role: str, path: str, module: nn.Module | nn.Parameter, quantized: bool, note: str = "") -> tuple:
        weight = getattr(module, "weight", None)
        matrix = isinstance(module, nn.Module) and weight is not None and weight.ndim == 2
        inputs, outputs = reversed(weight.shape) if matrix and quantized else (None, None)
        if module is not None and type(module).__name__ == "Conv1D" and quantized:
            inputs, outputs = weight.shape
        parameters = [module] if isinstance(module, nn.Parameter) else module.parameters()
        size = sum(parameter.numel() for parameter in parameters)
        if isinstance(module, ExpertProjection):  # of all experts in one row
            count = expert_count(layer.module.get_submodule(anatomy.experts))
            path = path.replace(f"{anatomy.experts}.0.", f"{anatomy.experts}.0:{count}.")
            size = count * sum(tensor.numel() for tensor in (module.weight, module.bias) if tensor is not None)
        norm = front.get(path, front.get(role, ""))
        values = (norm, role, path, inputs, outputs, size, quantized, note)
        return tuple(zip(COLUMNS[1:], values, strict=True))

    for role in QUANTIZED:
        for path in getattr(anatomy, role):
            if (reader_at(layer, role, path).expert or 0) > 0:
                continue
            note = f"then {behind[role]}" if role in behind else ""
            yield row(role, path, layer.module.get_submodule(path), True, note)
    for path in anatomy.router:
        yield row(ROUTER, path, layer.module.get_submodule(path), False, "exact")
    parts = dict(layer.module.named_modules()) | dict(layer.module.named_parameters())
    for path, why in anatomy.apart.items():
        yield row("–", path, parts[path], False, why)


def _layer_text(kind: pd.DataFrame) -> str:
    numbers = kind["layers"].iloc[0]
    size = int(kind["parameters"].sum())
    several = len(numbers) > 1
    title = f"Layer{'s' * several} {ranges(list(numbers))}: {count_label(size)} parameters{' each' * several}"
    rows, before = [], (None, None)
    for row in kind.itertuples():
        shape = "" if pd.isna(row.inputs) else f"{int(row.inputs):,} → {int(row.outputs):,}"
        place = row.norm, row.role
        shown = ["" if place == before else row.norm, "" if place == before else row.role]
        rows.append([*shown, row.module, shape, count_label(row.parameters) if row.parameters else "", row.note])
        before = place
    headers = ["norm", "role", "module", "shape", "weights", "note"]
    return Table("anatomy", title, headers, rows, kind, texts=("norm", "role", "module", "note")).printed
