"""Handwritten digits, 1,797 pictures of 8 × 8 pixels that come with scikit-learn; a fifth of them is held out."""

from typing import NamedTuple

import numpy as np

from outliers.errors import UserError

SIDE, CLASSES = 8, 10
BRIGHTEST = 16
HELD_OUT = 360


class Digits(NamedTuple):
    """Pictures, uint8 (pictures, 8, 8, 3) with three equal channels, and the digits that they show, int64
    (pictures,)."""

    pictures: np.ndarray
    digits: np.ndarray


def digits(held_out: bool) -> Digits:
    """Return the held-out pictures, chosen with seed 0, or all others.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits come with scikit-learn; install it (pip install scikit-learn)") from None
    data = load_digits()
    grey = np.rint(data.images * (255 / BRIGHTEST)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(grey))
    part = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    return Digits(grey[part, :, :, None].repeat(3, 3), data.target[part].astype(np.int64))
