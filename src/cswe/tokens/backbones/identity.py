"""No backbone: sets that are tokens already."""

from collections.abc import Sequence
from typing import Any

import torch

from cswe.tokens.backbones.base import Backbone, Encoded, finite_items, stored_type
from cswe.tokens.backbones.point_batches import PointPreparer, join_units


class Identity(Backbone):
    """Keeps points as they are, as layer 0.

    Parameters
    ----------
    dim
        Coordinates of a point.
    weighted
        Whether points have weights.
    """

    kind = "points"

    def __init__(self, dim: int, *, weighted: bool = False) -> None:
        self.layers = {0: dim}
        self.device = torch.device("cpu")
        self.preparer = PointPreparer(dim, weighted=weighted)

    def encode(self, units: Sequence[Any], dtype: str) -> Encoded:
        """Return the points."""
        unit = join_units(units)
        stored = unit.points.to(stored_type(dtype))
        finite = finite_items(stored, torch.tensor(unit.lengths, dtype=torch.int64))
        weights = [] if unit.weights is None else [unit.weights]
        return Encoded({0: [stored]}, unit.lengths, finite, weights=weights)

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes."""
        return {"name": "identity"}
