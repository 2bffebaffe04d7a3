"""Masks of outlier features and tokens, for training sparse dictionaries on hidden states without them."""

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from outliers.criterion import LAYERS, MASSIVE, MASSIVE_RATIO, POSITIONS, RESIDUAL, of_transformerlens
from outliers.errors import UserError
from outliers.files import write_whole
from outliers.models.anatomy import features_of, ids_of, layers_of
from outliers.models.anatomy.names import state_names
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import hooks
from outliers.models.load import weights_hash
from outliers.models.stream import is_streamed
from outliers.terminal.progress import with_bar
from outliers.text.blocks import tokens_hash, unpad
from outliers.tracing.result import Trace
from outliers.tracing.statistics import STREAM
from outliers.tracing.trace import trace as trace_of


@dataclass(frozen=True, eq=False)
class Masks:
    """The outliers in the hidden states of a text, by their names in TransformerLens (docs/names.md#masks).

    features: bool (features,). tokens: bool (blocks, T), False after the end of a shorter block. labels: the model, its
    weights, the text and its tokens, and the criterion.
    """

    features: dict[str, torch.Tensor]
    tokens: dict[str, torch.Tensor]
    labels: dict

    def save(self, stem: str | Path) -> None:
        """Write the masks to `stem`.safetensors and their indices to `stem`.json.

        The first file has the masks as NAME.features and NAME.tokens. The second has their `labels` and, by name, the
        layer, the role, the features, and the positions in each block.

        Raises:
            UserError: a file cannot be written.
        """
        stem, hooked = Path(stem), {}
        for name, features in self.features.items():
            layer, role = of_transformerlens(name)
            positions = [row.nonzero().flatten().tolist() for row in self.tokens[name]]
            indices = {"features": features.nonzero().flatten().tolist(), "tokens": positions}
            hooked[name] = {"layer": layer, "role": role} | indices
        tensors = {
            f"{name}.{kind}": mask for kind in ("features", "tokens") for name, mask in getattr(self, kind).items()
        }
        write_whole(stem.with_name(f"{stem.name}.safetensors"), save(tensors, {"labels": json.dumps(self.labels)}))
        write_whole(stem.with_name(f"{stem.name}.json"), json.dumps({"labels": self.labels, "hooks": hooked}) + "\n")


@with_bar
@inference
def masks(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    trace: Trace | None = None,
    attention_mask: Iterable[torch.Tensor] | None = None,
    *,
    progress: bool | None = None,
) -> Masks:
    """Return masks of a model's outlier features, and of the tokens at which they are large.

    In the inputs of attention and feed-forward layers, an entry is marked where an outlier feature reaches alpha; in
    the residual stream, where it is a massive activation (docs/definitions.md#outlier-features). A feature, or a token,
    of a hidden state is in its mask if any of its entries is marked.

    Args:
        model: a causal language model, resident or streamed, quantized or not; it is left as it was.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,), also of several lengths.
        trace: a trace of this model, possibly on another text, which defines alpha and the outlier features; by default
            one of these blocks.
        attention_mask: which tokens are padding and left out, shaped as the blocks; None if there is none.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: the model has several stacks of layers; there is no block, one is longer than the model's context or
            holds ids outside its vocabulary; the attention mask does not fit these blocks; or the trace is of a model
            of another shape.

    Example:
        >>> masks = outliers.masks(model, blocks, outliers.trace(model, blocks, alpha=3))
    """
    names, blocks = state_names(model, "transformerlens"), list(unpad(blocks, attention_mask))
    if not blocks:
        raise UserError("no blocks to mark; expected at least one")
    trace = trace or trace_of(model, blocks, STREAM, attention=False)
    expected, sizes = (len(layers_of(model)), features_of(model)), tuple(trace.statistics["residual.massive"].shape)
    if sizes != expected:
        raise UserError(f"a trace of (layers, features) {sizes} for a model of {expected}; trace this model")
    roles, outliers = [role for role in STREAM if role in trace.roles], trace.outlier_features()["feature"].tolist()
    ids = [ids_of(model, block)[0].cpu() for block in blocks]
    features: dict[str, torch.Tensor] = {}
    tokens: dict[str, torch.Tensor] = {}
    turn = 0

    def begin(number: int, _inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal turn
        turn = number

    def see(layer: int, role: str, x: torch.Tensor) -> None:
        name, size = names[layer, role], x.float().abs()
        marked = _massive_entries(size) if role == RESIDUAL else _outlier_entries(size, outliers, trace.alpha)
        features[name] = features.get(name, torch.tensor(False)) | marked.any(0).cpu()
        marked_tokens = tokens.setdefault(name, torch.zeros(len(ids), max(map(len, ids)), dtype=torch.bool))
        marked_tokens[turn, : len(x)] = marked.any(1).cpu()

    def hooks_on(changed: PreTrainedModel, only: int | None) -> AbstractContextManager:
        return hooks(changed, see, [*roles, RESIDUAL], None if only is None else [only])

    watched_pass(model, blocks, hooks_on, begin=begin)
    return Masks(features, tokens, _labels(model, ids, trace))


def _outlier_entries(magnitude: torch.Tensor, outliers: list[int], alpha: float) -> torch.Tensor:
    """Return which entries of outlier features have a magnitude (T, features) of at least alpha."""
    marked = torch.zeros_like(magnitude, dtype=torch.bool)
    marked[:, outliers] = magnitude[:, outliers] >= alpha
    return marked


def _massive_entries(magnitude: torch.Tensor) -> torch.Tensor:
    return (magnitude > MASSIVE) & (magnitude >= MASSIVE_RATIO * magnitude.median())


def _labels(model: PreTrainedModel, ids: list[torch.Tensor], trace: Trace) -> dict:
    """Return the labels of masks: model, text and weights, preferably as the trace names them, the hash of the tokens,
    and the criterion."""
    config = model.config
    model_labels = {"model": config._name_or_path, "revision": getattr(config, "_commit_hash", None)}
    if not is_streamed(model):
        model_labels["weights_hash"] = weights_hash(model)
    trace_labels = {
        name: trace.labels[name] for name in ("model", "revision", "weights_hash", "text") if name in trace.labels
    }
    token_labels = {"tokens_hash": tokens_hash(pad_sequence(ids, batch_first=True, padding_value=-1))}
    criterion = {"alpha": trace.alpha, "layers": LAYERS, "positions": POSITIONS}
    criterion |= {"massive": MASSIVE, "massive_ratio": MASSIVE_RATIO}
    return model_labels | trace_labels | token_labels | {"criterion": criterion}
