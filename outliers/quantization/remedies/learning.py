"""The learning of transforms with the whole model: the rotations of `outliers.quantization.remedies.rotation`."""

from dataclasses import replace
from functools import partial

import torch
from outlier_kernels import reference
from outlier_kernels.formats import Quantizer
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from outliers.criterion import STREAM
from outliers.errors import UserError
from outliers.models.anatomy import family_of, head_size, layers_of, projections
from outliers.models.anatomy.row import config_of_stack
from outliers.models.stream import is_streamed
from outliers.quantization.convert import quantize
from outliers.quantization.linear import QuantizedLinear, combine_products, in_float32, transform_input
from outliers.quantization.magnitudes import Calibration
from outliers.quantization.remedies.hadamard import random_rotation, rotate
from outliers.quantization.remedies.rotation import SEED
from outliers.quantization.schemes import Scheme
from outliers.terminal.progress import over

HEADS = "attn_out"  # the role that R2 rotates; R1 rotates the roles of the stream
ANGLE = 0.5  # the Frobenius norm of the first step's skew matrix; steps get smaller to 0 linearly


def learn(model: PreTrainedModel, scheme: Scheme, calibration: Calibration) -> None:
    """Learn the rotations of a scheme on the blocks of a calibration, and store them in it; once per scheme.

    Each step reads a block under the scheme with straight-through gradients, and turns every matrix against the
    gradient of the model's cross-entropy. Without blocks the matrices stay as they start. Attention and caches in few
    bits are left out, and so is GPTQ, which is applied afterwards.

    Raises:
        UserError: the model is not a causal one with all weights in memory, or the loss is not finite.
    """
    if not scheme.learns or scheme.learning in calibration.learned:
        return
    steps = next(int(remedy.number) for remedy in scheme.transforms if remedy.kind.learns)
    matrices = _first_matrices(model, scheme, calibration)
    if steps and len(calibration.blocks):
        check_learned(model.config, scheme)
        matrices = _learned(model, scheme, calibration, matrices, steps)
    calibration.learned[scheme.learning] = _with_matrices(calibration, matrices)


def check_learned(config: PretrainedConfig, scheme: Scheme) -> None:
    """Raise UserError if a scheme learns rotations and the model is not a causal one."""
    if family_of(config).name != "causal":
        raise UserError(f"'{scheme.name}' of '{config.model_type}'; expected a causal language model, or hadamard")


def _key(layer: int, role: str) -> object:
    """Return the key of inputs that share a learned matrix; None for inputs with a Hadamard matrix."""
    return "stream" if role in STREAM else layer if role == HEADS else None


def _with_matrices(calibration: Calibration, matrices: dict) -> Calibration:
    magnitudes = {
        place: known._replace(learned=matrices.get(_key(*place))) for place, known in calibration.magnitudes.items()
    }
    return replace(calibration, magnitudes=magnitudes, learned={})


def _first_matrices(model: PreTrainedModel, scheme: Scheme, calibration: Calibration) -> dict:
    """Return the random Hadamard matrices with which learning starts, float32, by `_key`."""
    matrices, layers = {}, layers_of(model)
    for (layer, role), magnitudes in calibration.magnitudes.items():
        key, width = _key(layer, role), len(magnitudes.inputs)
        if key is None or not scheme.at(role).learns:
            continue
        if key not in matrices:
            sizes = layers[layer], config_of_stack(model.config, layers[layer].anatomy)
            identity = torch.eye(head_size(*sizes) if role == HEADS else width)
            matrices[key] = rotate(identity, random_rotation(identity, SEED))
    return matrices


def _learned(
    model: PreTrainedModel, scheme: Scheme, calibration: Calibration, matrices: dict, steps: int
) -> dict[object, torch.Tensor]:
    """Return the matrices after some steps of learning, each on one block."""
    if is_streamed(model) or any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            f"scheme '{scheme.name}' learns with the whole model, whose weights are not in memory; expected "
            "outliers.calibrate of a model by outliers.load_model, or hadamard"
        )
    started = replace(calibration, learned={scheme.learning: _with_matrices(calibration, matrices)})
    with torch.inference_mode(False), torch.enable_grad():
        changed = quantize(model, replace(scheme.learning, name=scheme.name), calibration=started)
        changed.eval().requires_grad_(False)
        current: dict[object, torch.Tensor] = {}
        for projection in projections(changed):
            if isinstance(projection.module, QuantizedLinear):
                layer, key = projection.module, _key(projection.layer, projection.role)
                fitted, layer.made = layer.operand.fitted, None  # codes are recomputed in each step
                layer.forward = partial(_project, layer, fitted, current, key)
        exact = {key: matrix.double() for key, matrix in matrices.items()}
        blocks, generator = calibration.blocks.clone().to(model.device), torch.Generator().manual_seed(SEED)
        epochs = [torch.randperm(len(blocks), generator=generator) for _ in range(-(-steps // len(blocks)))]
        for step in over(range(steps), "learning a rotation"):
            block = blocks[torch.cat(epochs)[step], None]
            current |= {key: matrix.to(model.device, torch.float32).requires_grad_() for key, matrix in exact.items()}
            loss = changed(block, labels=block, use_cache=False).loss
            if not loss.isfinite():
                raise UserError(f"the loss under '{scheme.name}' is {loss:g} on calibration text; expected a number")
            gradients = torch.autograd.grad(loss, [current[key] for key in exact])
            angle = ANGLE * (1 - step / steps)
            turned = zip(exact.items(), gradients, strict=True)
            exact = {key: cayley_step(matrix, gradient.double().cpu(), angle) for (key, matrix), gradient in turned}
    return {key: matrix.float().contiguous() for key, matrix in exact.items()}


def cayley_step(matrix: torch.Tensor, gradient: torch.Tensor, angle: float) -> torch.Tensor:
    """Return an orthogonal matrix R, turned against a gradient G: (I + B/2)⁻¹ (I − B/2) R, float64 (n, n).

    B is the skew-symmetric (G Rᵀ − R Gᵀ) / 2, scaled to a Frobenius norm of `angle` (Li et al., 2020, equation 2 and
    algorithm 1, which bounds a step by its norm; they approximate the inverse, which is exact here).
    """
    skew = gradient @ matrix.T
    skew = skew - skew.T
    norm = skew.norm()
    half = skew * (angle / 2 / norm) if norm > 0 else skew
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    return torch.linalg.solve(identity + half, (identity - half) @ matrix)


def _project(
    layer: QuantizedLinear, fitted: tuple, current: dict, key: object, hidden_states: torch.Tensor
) -> torch.Tensor:
    """Compute the output of a layer under its scheme with the current matrices, differentiably.

    fitted: see `Operand`. current: the learned matrices, by `_key`. key: that of the layer. Intermediate results are
    recomputed in the backward pass, to save memory.
    """
    product = partial(checkpoint, partial(_product, layer, fitted, current.get(key)), use_reentrant=False)
    exact = partial(torch.nn.functional.linear, weight=layer.weight, bias=layer.projection.bias)
    outputs = combine_products(layer.here, hidden_states.flatten(0, -2), exact, product)
    return outputs.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1)


def _product(layer: QuantizedLinear, fitted: tuple, matrix: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    scheme, weight = layer.here, in_float32(layer.weight)
    if matrix is not None:
        places = {number: matrix for number, step in enumerate(scheme.transforms) if step.kind.learns}
        fitted = tuple(places.get(number, made) for number, made in enumerate(fitted))
    for step, made in zip(scheme.transforms, fitted, strict=False):  # `fitted` may end with a searched quantile
        weight = step.call("weight", weight, made)
    rows = in_float32(transform_input(rows, scheme, fitted))
    threshold = scheme.outlier_threshold
    kept = None if threshold is None else reference.outlier_columns(rows.detach(), threshold)
    rows, weight = (
        straight_through(*operand, kept) for operand in ((rows, scheme.activations), (weight, scheme.weights))
    )
    product = rows @ weight.T
    return product if layer.projection.bias is None else product + layer.projection.bias


def straight_through(matrix: torch.Tensor, quantizer: Quantizer | None, kept: torch.Tensor | None) -> torch.Tensor:
    """Quantize and dequantize a matrix (rows, features), with straight-through gradients; features in `kept` stay
    exact."""
    if quantizer is None:
        return matrix
    exact = matrix.detach() if kept is None else matrix.detach().masked_fill(kept, 0)
    return matrix + (reference.quantize(exact, quantizer).dequantize() - exact)
