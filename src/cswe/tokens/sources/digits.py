"""Handwritten digits as sets of points: small, embedded in scikit-learn, and enough to try everything on."""

from typing import Any, Literal, get_args

import numpy as np

from cswe._extras import require
from cswe.tokens.errors import BadItemError
from cswe.tokens.labels import Labels
from cswe.tokens.randomness import stratified_split
from cswe.tokens.sources.base import Points, Source

Ink = Literal["weight", "coordinate", "none"]


class Digits(Source):
    """The 1,797 digits of scikit-learn, 8 × 8 pixels, each the set of its inked pixels.

    A pixel is a point of the square from −1 to 1, x to the right and y up.

    Parameters
    ----------
    ink
        What becomes of a pixel's intensity: the ``"weight"`` of its point (weights of a digit sum to one), a third
        ``"coordinate"`` from 0 to 1, or ``"none"``.
    fractions
        Shares of validation and test, dealt class by class.
    seed
        Decides that split.

    Examples
    --------
    >>> digits = Digits()
    >>> digits.load(0).points.shape, round(float(digits.load(0).weights.sum()), 6)
    ((35, 2), 1.0)
    """

    kind = "points"
    name = "digits"
    licence = "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)"

    def __init__(self, *, ink: Ink = "weight", fractions: tuple[float, float] = (0.15, 0.15), seed: int = 0) -> None:
        if ink not in get_args(Ink):
            raise ValueError(f"ink: expected one of {get_args(Ink)} but got {ink!r}")
        digits = require("sklearn.datasets", "data").load_digits()
        self._images = np.asarray(digits.images, dtype=np.float32)
        labels = Labels.classes(digits.target, [str(number) for number in range(10)])
        splits = stratified_split(np.asarray(digits.target, dtype=np.int64), (1 - sum(fractions), *fractions), seed)
        super().__init__([f"digit-{number:04d}" for number in range(len(self._images))], splits, labels)
        self._ink, self._fractions, self._seed = ink, fractions, seed
        self.dim = 3 if ink == "coordinate" else 2
        self.has_weights = ink == "weight"

    def load(self, index: int) -> Points:
        """Return the inked pixels of a digit."""
        image = self._images[index]
        rows, columns = np.nonzero(image)
        if not len(rows):
            raise BadItemError("has no ink")
        ink = image[rows, columns]
        points = np.stack([(columns - 3.5) / 3.5, (3.5 - rows) / 3.5], axis=1).astype(np.float32)
        if self._ink == "coordinate":
            points = np.concatenate([points, ink[:, None] / 16], axis=1)
        return Points(points, ink / ink.sum() if self._ink == "weight" else None)

    def options(self) -> dict[str, Any]:
        """Return the choices made."""
        return {"ink": self._ink, "fractions": list(self._fractions), "seed": self._seed}
