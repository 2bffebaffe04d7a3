"""Features in the order of their magnitudes, so that those which share a scale are alike."""

from outliers.quantization.transforms import Transform

REORDER = Transform(
    lambda weight, magnitudes: magnitudes.inputs.to(weight.device).argsort(descending=True, stable=True),
    lambda hidden_states, order: hidden_states[:, order],
    lambda weight, order: weight[:, order],
    calibrated=True,
    by_feature=True,
    label="reordered",
)
