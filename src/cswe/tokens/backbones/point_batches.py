"""Point sets on their way to a backbone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cswe.tokens.errors import BadItemError
from cswe.tokens.sources.base import Points
from cswe.tokens.weights import faulty_weights


@dataclass
class PointUnit:
    """Some sets, flat: ``(T, d)`` points, their number in each set, and weights ``(T,)`` or None."""

    points: Tensor
    lengths: list[int]
    weights: Tensor | None


class PointPreparer:
    """Checks sets of points and lays them end to end.

    Parameters
    ----------
    dim
        Coordinates of a point.
    weighted
        Whether sets must bring weights.
    """

    def __init__(self, dim: int, *, weighted: bool) -> None:
        self.dim = dim
        self.weighted = weighted

    def one(self, raw: Points) -> Points:
        """Check one set."""
        if raw.points.ndim != 2 or raw.points.shape[1] != self.dim:
            raise BadItemError(f"expected points of shape (N, {self.dim}) but got {raw.points.shape}")
        if not len(raw.points):
            raise BadItemError("has no points")
        if self.weighted and (raw.weights is None or len(raw.weights) != len(raw.points)):
            raise BadItemError("expected a weight for every point")
        if self.weighted and raw.weights is not None and (fault := faulty_weights(raw.weights)):
            raise BadItemError(fault)
        return raw

    def pack(self, prepared: list[Points]) -> PointUnit:
        """Lay sets end to end."""
        points = [entry.points for entry in prepared]
        flat = np.concatenate(points) if points else np.empty((0, self.dim), dtype=np.float32)
        weights = None
        if self.weighted:
            parts = [entry.weights for entry in prepared if entry.weights is not None]
            weights = torch.from_numpy(np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32))
        return PointUnit(torch.from_numpy(flat.astype(np.float32, copy=False)), list(map(len, points)), weights)


def join_units(units: Sequence[Any]) -> PointUnit:
    """Put several units into one."""
    weights = [unit.weights for unit in units if unit.weights is not None]
    return PointUnit(
        torch.cat([unit.points for unit in units]),
        [length for unit in units for length in unit.lengths],
        torch.cat(weights) if weights else None,
    )
