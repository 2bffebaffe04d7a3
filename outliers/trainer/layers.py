"""Models whose linear projections and attention are trained in int8 (LLM.int8(), appendix E)."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.models.anatomy import check_not_compiled, check_plain, experts_of, projections
from outliers.models.anatomy.experts import ExpertProjection, call_by_projection, restore
from outliers.models.anatomy.weights import check_in_memory
from outliers.models.attention import check_replaceable_attention
from outliers.quantization.attention import AttentionProducts, put_attention, take_attention_back
from outliers.quantization.linear import stored_weight
from outliers.quantization.products import ProductNumerics, product

FFN, LINEAR = ("ffn_in", "ffn_out"), ("attn_in", "attn_out")  # roles of the paper's "FFN" and "Linear"


class _Trained:
    """A mixin for projections that multiply by `products` in the forward pass."""

    products: ProductNumerics

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Project (..., features) to (..., outputs), in the dtype of the input or of autocast."""
        device = hidden_states.device.type
        if torch.is_autocast_enabled(device):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device))
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        projected = product(rows, stored_weight(self), self.products)
        if self.bias is not None:
            projected = projected + self.bias.to(projected.dtype)
        return projected.view(*hidden_states.shape[:-1], -1)


class TrainedLinear(_Trained, nn.Linear):
    """An `nn.Linear` that is trained in int8; its parameters and their names do not change."""


class TrainedConv1D(_Trained, Conv1D):
    """The `Conv1D` of GPT-2, trained in int8; its parameters and their names do not change."""


class TrainedExpert(_Trained, ExpertProjection):
    """A projection of one expert, trained in int8; its gradient is that of the parameter of all experts."""


TRAINED = {nn.Linear: TrainedLinear, Conv1D: TrainedConv1D, ExpertProjection: TrainedExpert}


def train_int8(
    model: PreTrainedModel,
    ffn: bool = True,
    linear: bool = True,
    attention: bool = False,
    decomposition: float = 0.0,
    outlier_threshold: float | None = None,
    stochastic: bool = False,
) -> PreTrainedModel:
    """Let a model compute its projections and their gradients in int8 from now on (LLM.int8(), appendix E, Table 7).

    The model is changed in place, and returned. Its parameters stay the same objects in their dtype, so that an
    existing optimizer remains valid, and it is saved as a plain checkpoint. `train_int8(model, ffn=False,
    linear=False)` undoes the change. Embeddings, norms, the head and the softmax stay exact.

    Args:
        model: a causal language model with its weights, on any device.
        ffn: whether the feed-forward projections, those of experts among them, are in int8.
        linear: whether the attention's projections q, k, v and output are in int8.
        attention: whether the products of queries with keys and of probabilities with values are in int8.
        decomposition, outlier_threshold, stochastic: see `outliers.quantization.products.ProductNumerics`.

    Raises:
        UserError: a number is out of range; the architecture is unknown, or its attention cannot be replaced; or a
            projection is more than a floating-point weight and a bias, such as one that is quantized already.

    Example:
        >>> trained = outliers.train_int8(outliers.load_model("pocket/gpt2-0.1m"), decomposition=0.02)
        >>> trained(blocks, labels=blocks).loss.backward()
    """
    products = ProductNumerics(decomposition, outlier_threshold, stochastic)
    roles = (FFN if ffn else ()) + (LINEAR if linear else ())
    if attention:
        check_replaceable_attention(model)
    _restore_plain(model)
    all_projections = list(projections(model))
    check_in_memory(model, "training in int8")
    check_not_compiled(model)
    for projection in all_projections:
        check_plain(projection)
    if ffn and experts_of(model):
        model.called_before = call_by_projection(model)
    for module in {projection.module for projection in all_projections if projection.role in roles}:
        module.__class__, module.products = TRAINED[type(module)], products
    if attention:
        put_attention(model, AttentionProducts(products, products))
    return model


def _restore_plain(model: PreTrainedModel) -> None:
    """Restore the plain projections and attention."""
    plain_class = {trained: plain for plain, trained in TRAINED.items()}
    for module in model.modules():
        if vars(module).pop("products", None):
            module.__class__ = plain_class.get(type(module), type(module))
    restore(vars(model).pop("called_before", ()))
    take_attention_back(model)
