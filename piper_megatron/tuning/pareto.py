"""The front of plans of which none is both quicker and smaller than another."""

import numpy as np


def front(points: np.ndarray) -> np.ndarray:
    """Points that no other one beats in both coordinates, ordered by the first.

    Args:
        points: [points, 2], less is better in both.

    Returns:
        int array of rows; of equal points one.
    """
    if not len(points):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((points[:, 1], points[:, 0]))
    second = points[order, 1]
    before = np.minimum.accumulate(np.concatenate([[np.inf], second[:-1]]))
    return order[second < before]
