"""Discovery of the stacks of layers of a model by one pass on the meta device."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy.discovery.flow import ADDED, MEMORY, STREAM, RecordedPass, ancestors, is_projection
from outliers.models.anatomy.discovery.layer import FoundLayer
from outliers.models.anatomy.row import Anatomy, of_all_kinds

RESIDUAL_SCALE = "residual_multiplier"  # the field of Granite's configuration that multiplies its layers' outputs


def find_stacks(model: PreTrainedModel, inputs: Mapping[str, object]) -> list[Anatomy]:
    """Return the stacks of layers of a model on the meta device, in the order in which they run.

    inputs: the arguments of the model's call.

    Raises:
        UserError: no list of layers is called with hidden states.
    """
    seen = RecordedPass(model)
    seen.run(inputs)
    counts = Counter(seen.layers[path][0] for path in dict.fromkeys(seen.order))
    if not counts:
        raise UserError(
            f"unknown architecture '{model.config.model_type}': no layers in a list were called with hidden states "
            "(tokens, features); expected calls of the layers, and not of their forward methods, which no hook sees"
        )
    return [_stack(seen, top) for top in _main(seen, counts)]


def _main(seen: RecordedPass, counts: Counter) -> list[str]:
    """Return the lists of layers that are stacks: the longest one, or both of an encoder-decoder."""
    (longest, _), *_ = counts.most_common()
    crossed = [path for path, call in seen.calls.items() if MEMORY in call.history | call.later]
    if crossed:
        reading = next(top for path, (top, _) in seen.layers.items() if crossed[0].startswith(f"{path}."))
        before = [top for top in dict.fromkeys(seen.layers[path][0] for path in seen.order) if top != reading]
        return [max(before, key=counts.get), reading] if before else [reading]
    often = [top for top in counts if any(seen.entered[path] > 1 for path, (of, _) in seen.layers.items() if of == top)]
    if longest in often and len(often) > 1:
        raise UserError(
            f"unknown architecture '{seen.model.config.model_type}': layers of {' and '.join(map(repr, often))} run in "
            "turns; expected layers of a single list, in which each passes its output on to the next"
        )
    return [longest]


def _stack(seen: RecordedPass, top: str) -> Anatomy:
    """Return the anatomy of the stack whose list of layers is at a path, `top`."""
    model, members = seen.model, sorted((place, path) for path, (of, place) in seen.layers.items() if of == top)
    _check_whole(model, top, len(members))
    kinds: list[Anatomy] = []
    places: list[int | None] = []
    for _, path in members:
        kind = FoundLayer(seen, path).anatomy() if path in seen.left else None
        if kind is not None and kind not in kinds:
            kinds.append(kind)
        places.append(None if kind is None else kinds.index(kind))
    path = next((one for one in ancestors(top) if one in seen.models), "")
    module = None if model.get_submodule(path) in (model, model.base_model) else path
    around = (path for path in ancestors(top) if isinstance(model.get_submodule(path), PreTrainedModel))
    added = sorted(label.removeprefix(ADDED) for label in seen.before[top] if label.startswith(ADDED))
    norms = [path for path in added if path in seen.flow.normalizes]
    last = (
        path
        for path, (before, behind) in seen.norms.items()
        if behind and not seen.inside(path) and any(label.startswith(f"{STREAM}{top}.") for label in before)
    )
    width, streams = seen.widths[top], seen.streams[top]
    if narrow := seen.wide().get(top):
        width, streams = narrow, width // narrow
    reader = next(iter(seen.readers), None)
    others = [path for path in added if path not in (*norms, *seen.readers)]
    return of_all_kinds(
        replace(kinds[0], others=tuple(kinds[1:])),
        module=module,
        config=_config(model, module or next(around, "")),
        width=width,
        streams=streams,
        last_norm=next(last, None),
        embedding=reader if reader and not isinstance(model.get_submodule(reader), nn.Embedding) else None,
        embedding_norm=next(iter(norms), None),
        positions=others[0] if len(others) == 1 else None,
        residual_scale=RESIDUAL_SCALE if hasattr(model.config, RESIDUAL_SCALE) else None,
        padded_positions=_has_padded_positions(model, seen.readers),
        kind_numbers=tuple(places),
        turns=tuple(seen.layers[path][1] for path in seen.order if path in seen.left and seen.layers[path][0] == top),
    )


def _check_whole(model: nn.Module, layers: str, count: int) -> None:
    """Raise UserError if parts of the layers are in another list, as the feed-forward parts of XLM are."""
    parent = layers.rpartition(".")[0]
    for name, other in model.get_submodule(parent)._modules.items():
        path = f"{parent}.{name}".lstrip(".")
        is_parallel = isinstance(other, nn.ModuleList) and len(other) == count and path != layers
        if is_parallel and any(map(is_projection, other.modules())):
            raise UserError(
                f"unknown architecture '{model.config.model_type}': parts of its layers are in two lists, "
                f"'{layers}' and '{path}'; expected all parts of a layer in one module"
            )


def _has_padded_positions(model: PreTrainedModel, readers: Collection[str]) -> bool:
    """Return whether the embedding of positions has a row for padding."""
    context = getattr(model.config, "max_position_embeddings", None)
    return any(
        isinstance(module, nn.Embedding) and module.num_embeddings == context and module.padding_idx is not None
        for path, module in model.named_modules()
        if path not in readers
    )


def _config(model: PreTrainedModel, path: str) -> str | None:
    """Return the field of the configuration that holds the configuration of a module; None if there is none."""
    own = model.get_submodule(path).config
    parts = {name: part for name, part in vars(model.config).items() if isinstance(part, PretrainedConfig)}
    return next((name for name, part in parts.items() if part is own or part == own), None) if parts else None
