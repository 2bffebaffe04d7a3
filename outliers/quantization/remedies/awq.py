"""AWQ (Lin et al., 2023): weights that multiply large inputs are rounded more finely, feature by feature."""

import torch

from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.remedies.smoothing import LEAST, match_precision


def factors(weight: torch.Tensor, magnitudes: InputSummary, exponent: float) -> torch.Tensor:
    """Return the factors s_j = (mean|X_j| / mean|X|)^a: (features,), in float32 at least.

    This is equation 5 of the paper up to a common factor. A feature that was always zero keeps its scale.
    """
    sums = match_precision(magnitudes.sums, weight)
    return (sums / sums.mean()).pow(exponent).masked_fill(sums < LEAST, 1)
