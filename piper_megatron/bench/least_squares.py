"""Curves through points: coefficients that are not negative, small errors in ratio."""

from collections.abc import Sequence
from itertools import product

import numpy as np

_ROUNDS = 8  # of reweighting
_LEAST_ERROR = 0.02  # below which an error counts as its square
_OVER_BEST = 2.0


def fit_nonnegative(
    columns: np.ndarray, seconds: np.ndarray, positive: Sequence[bool]
) -> np.ndarray:
    """Coefficients of `columns @ coefficients ~ seconds`, hardly moved by single outliers.

    What is made small is the sum of the ratios' logarithms, so that half and double weigh the same
    (iteratively reweighted least squares, doi:10.1080/03610927708827533).

    Args:
        columns: [points, coefficients], not negative.
        seconds: [points], positive.
        positive: coefficients that are inverse rates. One that vanishes in the noise becomes that
            of twice the best rate seen at any point; the others may be 0.

    Returns:
        [coefficients]
    """
    relative = columns / seconds[:, None]
    scale = np.where(relative.any(axis=0), relative.max(axis=0), 1.0)
    relative = relative / scale
    weights = np.ones(len(seconds))
    best, least = np.zeros(columns.shape[1]), np.inf
    for _ in range(_ROUNDS):
        found = _best_choice(relative, weights)
        ratios = np.maximum(relative @ found, _LEAST_ERROR)
        missed = np.abs(np.log(ratios))
        if missed.sum() < least:
            best, least = found, missed.sum()
        weights = np.maximum(missed, _LEAST_ERROR)
        weights /= np.maximum(np.abs(ratios - 1), _LEAST_ERROR) ** 2
    # in these units, the best rate seen is 1
    best = np.where(np.array(positive) & (best < 1 / _OVER_BEST), 1 / _OVER_BEST, best)
    return best / scale


def _best_choice(relative: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Few coefficients: all choices of those that do not vanish are tried."""
    root = np.sqrt(weights)
    best, least = np.zeros(relative.shape[1]), np.inf
    for kept in product((True, False), repeat=relative.shape[1]):
        chosen = np.flatnonzero(kept)
        found = np.linalg.lstsq(relative[:, chosen] * root[:, None], root, rcond=None)[0]
        if (found <= 0).any():
            continue
        missed = float(weights @ (relative[:, chosen] @ found - 1) ** 2)
        if missed < least:
            best, least = np.zeros(relative.shape[1]), missed
            best[chosen] = found
    return best
