"""Which speeds runs tell, and by least squares how much faster or slower each of them is."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# what the resource model misses of a single layout, whatever its constants: the median over
# published runs (docs/resource_model.md)
MODEL_ERROR = 0.05
# one speed is fitted when this much of a step hangs on it
LEAST_SHARE = 0.2
# a further one when the runs at least halve the doubt about it: 1 / sqrt(1 + 3)
_ENOUGH = 3.0
# no speed moves further than to its so-many-fold or so-manieth part
FURTHEST = 20.0
_NUDGE = 0.02
_ROUNDS = 30
_SETTLED = 1e-6

# log speeds [constants] -> seconds [runs]
Predict = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Fit:
    """Corrections of speeds.

    Attributes:
        speeds: [constants] over what they were; 1 where the runs tell nothing.
        shares: [runs, constants] of the step that each speed decides, before the fit.
        fitted: constants in the order in which they were chosen.
        errors: [constants] standard error of the speed's logarithm; nan where it is not fitted.
    """

    speeds: np.ndarray
    shares: np.ndarray
    fitted: tuple[int, ...]
    errors: np.ndarray


def fit_speeds(
    predict: Predict, measured_s: np.ndarray, noise: np.ndarray, doubts: np.ndarray
) -> Fit:
    """Fits as many speeds as the runs tell apart.

    Args:
        predict: step times at given speeds.
        measured_s: [runs]
        noise: [runs] standard deviation of the logarithm of a measured over a predicted time.
        doubts: [constants] standard deviation of each speed's logarithm before the fit.
    """
    start = np.zeros(len(doubts))
    shares = _shares(predict, start)
    fitted = _identified(shares, doubts / noise[:, None])
    at = start
    if fitted:
        at = _least_squares(predict, np.log(measured_s), noise, list(fitted), start)
    errors = np.full(len(doubts), np.nan)
    if fitted:
        columns = _shares(predict, at)[:, list(fitted)] / noise[:, None]
        errors[list(fitted)] = np.sqrt(np.diag(np.linalg.pinv(columns.T @ columns)))
    return Fit(np.exp(at), shares, fitted, errors)


def _shares(predict: Predict, at: np.ndarray) -> np.ndarray:
    """[runs, constants] by how much a step's logarithm falls as a speed's grows."""
    columns = []
    for constant in range(len(at)):
        nudge = np.zeros(len(at))
        nudge[constant] = _NUDGE
        slower, faster = np.log(predict(at - nudge)), np.log(predict(at + nudge))
        columns.append((slower - faster) / (2 * _NUDGE))
    return np.stack(columns, axis=1)


def _identified(shares: np.ndarray, weights: np.ndarray) -> tuple[int, ...]:
    """Constants that the runs tell apart, the most telling first (QR with column pivoting).

    Args:
        shares: [runs, constants]
        weights: [runs, constants] doubt of a speed over the noise of a run's time.
    """
    left = shares * weights
    fitted: list[int] = []
    while len(fitted) < min(shares.shape):
        lengths = (left**2).sum(axis=0)
        lengths[fitted] = 0.0
        best = int(lengths.argmax())
        enough = lengths[best] >= _ENOUGH if fitted else shares[:, best].max() >= LEAST_SHARE
        if not enough:
            break
        fitted.append(best)
        direction = left[:, best] / np.sqrt(lengths[best])
        left = left - np.outer(direction, direction @ left)
    return tuple(fitted)


def _least_squares(
    predict: Predict, target: np.ndarray, noise: np.ndarray, free: list[int], start: np.ndarray
) -> np.ndarray:
    """Gauss-Newton within bounds, with steps halved until they help."""
    bound = np.log(FURTHEST)

    def residuals(at: np.ndarray) -> np.ndarray:
        return (np.log(predict(at)) - target) / noise

    at, missed = start, residuals(start)
    for _ in range(_ROUNDS):
        slopes = -_shares(predict, at)[:, free] / noise[:, None]
        step = np.zeros(len(at))
        step[free] = np.linalg.lstsq(slopes, -missed, rcond=None)[0]
        while True:
            following = np.clip(at + step, -bound, bound)
            then = residuals(following)
            if then @ then < missed @ missed:
                break
            step /= 2
            if np.abs(step).max() < _SETTLED:
                return at
        at, missed = following, then
    return at
