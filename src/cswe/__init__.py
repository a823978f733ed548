"""Pool sets of vectors by (constrained) sliced Wasserstein embedding.

Three names make a training loop: :class:`SWEPool` turns sets into vectors, :class:`SWGGBound` says what its slices must
keep to, and :class:`PrimalDual` sees to it. The operations below them are in :mod:`cswe.ops`.
"""

from cswe.constrained import Constraint, Fraction, PrimalDual
from cswe.nn import (
    AttentionPool,
    CLSPool,
    MaxPool,
    MeanPool,
    MinSlicedWasserstein,
    Orthogonality,
    SWEPool,
    SWGGBound,
    TokenWeights,
    learn_slices,
)
from cswe.ops import HardSort, LapSum, SoftSort
from cswe.ops.kernels import backend

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
    "PrimalDual",
    "SWEPool",
    "SWGGBound",
    "SoftSort",
    "TokenWeights",
    "backend",
    "learn_slices",
]
