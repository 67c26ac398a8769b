"""Curves through points: coefficients that are not negative, small errors in ratio."""

from collections.abc import Sequence
from itertools import product

import numpy as np

_ROUNDS = 8  # of reweighting
_LEAST_ERROR = 0.02  # below which an error counts as its square


def fit_nonnegative(
    columns: np.ndarray, seconds: np.ndarray, positive: Sequence[bool]
) -> np.ndarray:
    """Coefficients of `columns @ coefficients ~ seconds`, hardly moved by single outliers.

    What is made small is the sum of the ratios' logarithms, so that half and double weigh the same
    (iteratively reweighted least squares, doi:10.1080/03610927708827533).

    Args:
        columns: [points, coefficients], not negative.
        seconds: [points], positive.
        positive: the coefficients that may not vanish; of the others any may be left out.

    Returns:
        [coefficients]; the best among all choices of those to leave out.
    """
    relative = columns / seconds[:, None]
    scale = np.where(relative.any(axis=0), np.abs(relative).max(axis=0), 1.0)
    relative = relative / scale
    weights = np.ones(len(seconds))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        coefficients = _best_choice(relative, weights, positive)
        ratios = np.maximum(relative @ coefficients, _LEAST_ERROR)
        weights = np.maximum(np.abs(np.log(ratios)), _LEAST_ERROR)
        weights /= np.maximum(np.abs(ratios - 1), _LEAST_ERROR) ** 2
    return coefficients / scale


def _best_choice(relative: np.ndarray, weights: np.ndarray, positive: Sequence[bool]) -> np.ndarray:
    """Few coefficients: all choices of those that stay are tried."""
    root = np.sqrt(weights)
    best, least = np.zeros(relative.shape[1]), np.inf
    for kept in product(*((True,) if must else (True, False) for must in positive)):
        chosen = np.flatnonzero(kept)
        found = np.linalg.lstsq(relative[:, chosen] * root[:, None], root, rcond=None)[0]
        if (found <= 0).any():
            continue
        missed = float(weights @ (relative[:, chosen] @ found - 1) ** 2)
        if missed < least:
            best, least = np.zeros(relative.shape[1]), missed
            best[chosen] = found
    return best
