"""Excerpts: the hidden states of the beginning of a text at the most relevant features, for visual inspection."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from outliers.errors import UserError, reason_of
from outliers.files import check_file, write_whole
from outliers.models.anatomy import state_readers
from outliers.models.anatomy.examples import Block, Example
from outliers.models.anatomy.stack_views import stack_view
from outliers.models.decoder import inference, run_decoder
from outliers.models.hooks import input_hooks
from outliers.tracing.result import Trace
from outliers.tracing.statistics import ON_STREAM

POSITIONS = 256  # at most, from the start of the text
FEATURES = 12  # at most, of each role
VALUES = 250_000  # at most, of all roles together: models with many layers have fewer features


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The inputs of projections over the first positions of a text, at some features of each role.

    tokens: ids, int64 (T,). features: by role, int64 (features,). values: by role, bfloat16 (layers, T, features).
    labels: its source, as in a trace.
    """

    tokens: torch.Tensor
    features: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    labels: dict = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the excerpt as one safetensors file.

        Raises:
            UserError: the file cannot be written.
        """
        tensors = {"tokens": self.tokens.contiguous()}
        tensors |= {f"{role}.features": features for role, features in self.features.items()}
        tensors |= {f"{role}.values": values.contiguous() for role, values in self.values.items()}
        write_whole(path, save(tensors, {"labels": json.dumps(self.labels)}))

    @classmethod
    def load(cls, path: Path) -> "Excerpt":
        """Read an excerpt that `save` wrote.

        Raises:
            UserError: the file is missing or damaged.
        """
        try:
            check_file(path)
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                labels = json.loads(metadata.get("labels") or metadata["about"])  # "about" up to version 0.2.0
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            roles = [name.removesuffix(".features") for name in tensors if name.endswith(".features")]
            parts = [{role: tensors[f"{role}.{part}"] for role in roles} for part in ("features", "values")]
            for features, values in zip(*map(dict.values, parts), strict=True):
                tokens, count = len(tensors["tokens"]), len(features)
                if features.dtype != torch.int64 or values.shape[1:] != (tokens, count):
                    raise ValueError(f"its values are {tuple(values.shape)} for {tokens} tokens and {count} features")
            return cls(tensors["tokens"], *parts, labels)
        except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            raise UserError(f"cannot read an excerpt from '{path}': {reason_of(error, 200)}; trace again") from None


def features_to_show(trace: Trace) -> dict[str, list[int]]:
    """Return the features to show of each role: the outlier features first, then those with the largest values.

    attn_in and ffn_in share the features of the residual stream, and so get the same ones.
    """
    positions = min(trace.block, POSITIONS)
    most = max(1, min(FEATURES, VALUES // (len(trace.roles) * trace.layers * positions)))
    stream = tuple(role for role in ON_STREAM if role in trace.roles)
    by_role = {role: _most_relevant(trace, stream if role in stream else (role,)) for role in trace.roles}
    return {role: features[:most] for role, features in by_role.items()}


def _most_relevant(trace: Trace, roles: tuple[str, ...]) -> list[int]:
    outliers = trace.outlier_features(roles=roles)["feature"].tolist()
    largest = trace.features(roles).sort_values("max", ascending=False, kind="stable")["feature"].tolist()
    return list(dict.fromkeys([*outliers, *largest]))


@inference
def excerpt(
    model: PreTrainedModel, block: Block, features: Mapping[str, list[int]], stack: str | None = None
) -> Excerpt:
    """Run the beginning of a block through a model and return the inputs of projections at some features.

    Args:
        model: a model of any family, which is not changed.
        block: token ids, int64 (T,), or an example of another family, which is read whole.
        features: by role, as from `features_to_show`.
        stack: as for `outliers.trace`.

    Raises:
        UserError: the block is longer than the model's context or has ids outside its vocabulary.
    """
    beginning = block if isinstance(block, Example) else block[:POSITIONS]
    view = stack_view(model, stack)
    ids = view.ids(model, block)[:POSITIONS].cpu()
    numbers = {role: torch.tensor(of_role) for role, of_role in features.items()}
    kept = {
        role: torch.zeros(len(view.layers), len(ids), len(of_role), dtype=torch.bfloat16)
        for role, of_role in features.items()
    }

    def keep(layer: int, role: str, x: torch.Tensor) -> None:
        exists = numbers[role] < x.shape[1]  # features that a layer lacks stay zeros
        kept[role][layer - view.layers[0], :, exists] = x[:POSITIONS, numbers[role][exists]].to("cpu", torch.bfloat16)

    with input_hooks(
        [
            reader
            for reader in state_readers(model)
            if reader.layer_state[1] in features and reader.layer in view.layers and reader.expert is None
        ],
        keep,
    ):
        for _ in run_decoder(model, [beginning]):
            pass
    return Excerpt(ids, numbers, kept)
