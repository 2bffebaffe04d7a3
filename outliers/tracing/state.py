"""What is kept of one hidden state: reductions to fixed size."""

import torch

from outliers.errors import BrokenModel

IN_CACHE = 1 << 16  # entries of float64 at once on a CPU, two to three times as fast as all; a GPU takes all


def moments(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Power sums by feature and kurtosis of one hidden state (tokens, features), in float64.

    Returns:
        `sum` and `squares` (features,); `squares_rest`, the squares without position 0; `kurtosis_tensor` over all
        entries and `kurtosis_token`, over the features of a token and summed over tokens, each (2,): of all positions
        and without position 0.
    """
    rows = len(x) if x.is_cuda else max(1, IN_CACHE // x.shape[1])
    sums, sums_of_squares, by_token = 0, 0, []
    for part in x.split(rows):
        part = part.double()
        squares = part * part
        sums, sums_of_squares = sums + part.sum(0), sums_of_squares + squares.sum(0)
        powers = part.sum(1), squares.sum(1), torch.linalg.vecdot(squares, part), torch.linalg.vecdot(squares, squares)
        by_token.append(torch.stack(powers))
    by_token = torch.cat(by_token, 1)  # (4, tokens)
    of_tokens = kurtosis(by_token / x.shape[1])
    of_tensor = [kurtosis(by_token[:, first:].mean(1) / x.shape[1]) for first in (0, 1)]
    return {
        "sum": sums,
        "squares": sums_of_squares,
        "squares_rest": sums_of_squares - x[0].double().square(),
        "kurtosis_tensor": torch.stack(of_tensor),
        "kurtosis_token": torch.stack([of_tokens.sum(), of_tokens[1:].sum()]),
    }


def kurtosis(means: torch.Tensor) -> torch.Tensor:
    """E[(x − μ)⁴] / σ⁴ from the means of x, x², x³ and x⁴ (4, …); 1, the smallest there is, where x is constant."""
    mean, square, cube, fourth = means
    variance = square - mean**2
    central_fourth = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
    constant = variance <= 1e-14 * square
    return torch.where(constant, 1.0, central_fourth / torch.where(constant, 1.0, variance) ** 2)


def median(magnitudes: torch.Tensor) -> torch.Tensor:
    """The median of a tensor (the lower one of an even number), faster than by selection among all entries.

    A sample gives two bounds between which the median lies almost surely; what is below them is only counted.
    """
    flat = magnitudes.flatten()
    rank = (len(flat) - 1) // 2
    sample = flat[:: max(1, len(flat) // 4096) | 1].sort().values  # an odd stride meets every feature
    low, high = (sample[min(int(len(sample) * part), len(sample) - 1)] for part in (0.45, 0.55))
    under = flat < low
    between = flat[under != (flat <= high)]
    rank_between = rank - int(under.sum())
    if not 0 <= rank_between < len(between):
        return flat.median()
    return between.kthvalue(rank_between + 1).values


def check_finite(by_feature: torch.Tensor, layer: int, role: str) -> None:
    """Raise BrokenModel, naming the place, if the largest |x| of a feature (features,) is NaN or inf."""
    bad = ~torch.isfinite(by_feature)
    if bad.any():
        raise BrokenModel(
            f"NaN or inf in the hidden states of layer {layer}, role {role}, feature {int(bad.nonzero()[0])}; "
            "expected finite numbers: try another dtype (float32, bfloat16) or check the weights"
        )


def largest_entry(x: torch.Tensor, by_feature: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """|x|, x, feature, position and token id of the largest entry of x (tokens, features), float64 (5,).

    by_feature: the largest |x| of each feature (features,). ids: the tokens (tokens,), on any device.
    """
    ids = ids.to(x.device)
    feature = by_feature.argmax()
    position = x[:, feature].abs().argmax()
    entry = (by_feature[feature], x[position, feature], feature, position, ids[position])
    return torch.stack([value.double() for value in entry])
