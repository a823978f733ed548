"""Learning under constraints: a primal-dual method that fits into any training loop.

Minimise a loss subject to *any* differentiable values staying below their bounds, with a slack where a bound
may turn out to be out of reach (Algorithm 1 of the paper). Nothing here knows what the values are.

Four lines in a loop of your own: say what must stay below what, add it to the loss, and move the
multipliers after the weights.

>>> import torch
>>> from cswe.constrained import Constraint, PrimalDual
>>> weights = torch.tensor([2.0, 1.0], requires_grad=True)
>>> optimizer = torch.optim.SGD([weights], lr=0.1)
>>> duals = PrimalDual(Constraint(lambda: weights.square().sum(), bound=1.0, name="norm"), lr=0.1)
>>> for _ in range(200):
...     loss = duals.lagrangian((weights - 3.0).square().sum())
...     loss.backward(); optimizer.step(); optimizer.zero_grad(); duals.step()
>>> weights.detach()  # the point of the unit disc that is nearest to (3, 3)
tensor([0.7071, 0.7071])
>>> round(duals.record()["norm"]["dual"].item(), 3)
3.243

A lower bound is an upper bound on the negative; per-sample requirements are the mean of their positive parts,
bounded by 0.
"""

from cswe.constrained.bound import Fraction
from cswe.constrained.constraint import Constraint
from cswe.constrained.distributed import rank_weight
from cswe.constrained.primal_dual import PrimalDual
from cswe.constrained.rules import ProjectedAdam, ProjectedGradient
from cswe.constrained.watch import InfeasibleBoundWarning

__all__ = [
    "Constraint",
    "Fraction",
    "InfeasibleBoundWarning",
    "PrimalDual",
    "ProjectedAdam",
    "ProjectedGradient",
    "rank_weight",
]
