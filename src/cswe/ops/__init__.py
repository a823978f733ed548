"""Tensors in, tensors out: sorting as an operator, couplings, lifted plans, embeddings.

All operations are batched, differentiable, and independent of device and dtype. They compute in float32 at least
(half precision and autocast included) and return that precision.
"""

from cswe.ops.coupling import RankCoupling, rank_coupling
from cswe.ops.embedding import l_moments, swe
from cswe.ops.lapsum import LapSum
from cswe.ops.lifted import lifted_plan, swgg
from cswe.ops.sliced import sliced_wasserstein, wasserstein_1d
from cswe.ops.sorting import HardSort, SoftSort, SortOperator

__all__ = [
    "HardSort",
    "LapSum",
    "RankCoupling",
    "SoftSort",
    "SortOperator",
    "l_moments",
    "lifted_plan",
    "rank_coupling",
    "sliced_wasserstein",
    "swe",
    "swgg",
    "wasserstein_1d",
]
