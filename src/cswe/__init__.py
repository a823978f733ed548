"""Pool sets of vectors by (constrained) sliced Wasserstein embedding.

Three names make a training loop: :class:`SWEPool` turns sets into vectors, :class:`SWGGBound` says what its slices must
keep to, and :class:`PrimalDual` sees to it. The operations below them are in :mod:`cswe.ops`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from cswe.constrained import Constraint, Fraction, PrimalDual
from cswe.nn import (
    AttentionPool,
    CLSPool,
    MaxPool,
    MeanPool,
    MinSlicedWasserstein,
    Orthogonality,
    PMAPool,
    SumPool,
    SWEPool,
    SWGGBound,
    TokenWeights,
    WassersteinPool,
    learn_slices,
)
from cswe.ops import HardSort, LapSum, SoftSort
from cswe.ops.kernels import backend

if TYPE_CHECKING:
    from cswe.training.model import Model

__version__ = "0.1.0"

__all__ = [
    "AttentionPool",
    "CLSPool",
    "Constraint",
    "Fraction",
    "HardSort",
    "LapSum",
    "MaxPool",
    "MeanPool",
    "MinSlicedWasserstein",
    "Orthogonality",
    "PMAPool",
    "PrimalDual",
    "SWEPool",
    "SWGGBound",
    "SoftSort",
    "SumPool",
    "TokenWeights",
    "WassersteinPool",
    "backend",
    "learn_slices",
    "load",
]


def load(path: str | Path, device: str = "cpu") -> "Model":
    """Load a model that ``cswe train`` made, ready for use.

    Parameters
    ----------
    path
        The folder of a run, for its best model; or the folder of a model, ``run/last`` say.
    device
        Where to put it.

    Returns
    -------
    Model
        In evaluation mode: ``model.embed(tokens, mask)`` gives vectors, ``model(tokens, mask)`` answers;
        ``model.pool`` and ``model.head`` are its parts, ``model.facts`` says what it was trained on.
    """
    # Imported here: a bare import of the package stays quick.
    from cswe.training.checkpoint import load as load_model

    return load_model(path, device)
