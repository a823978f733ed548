"""What the weights of a set's tokens must be, wherever they come from."""

from typing import Any

import numpy as np
import numpy.typing as npt


def faulty_weights(weights: npt.NDArray[Any]) -> str:
    """Say what is wrong with the weights of a set; nothing, if nothing is.

    Examples
    --------
    >>> faulty_weights(np.array([0.5, 0.0])), faulty_weights(np.array([1.0, -1.0]))
    ('', 'expected weights that are not negative and not all zero')
    """
    if not np.isfinite(weights).all():
        return "expected finite weights but got NaN or infinity"
    if (weights < 0).any() or not weights.any():
        return "expected weights that are not negative and not all zero"
    return ""
