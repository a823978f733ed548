"""What slices can be bound to: constraints for :class:`cswe.PrimalDual`."""

from typing import Literal

import torch
from torch import Tensor

from cswe.constrained import Fraction
from cswe.nn._door import enter
from cswe.nn.pool import SWEPool
from cswe.ops import LapSum, SoftSort, swgg
from cswe.ops._inputs import working_dtype


class SWGGBound:
    r"""Keep the SWGG dissimilarity between samples and reference below a bound, per slice (the paper's constraint).

    .. math:: \frac1B Σ_i D_{il} ≤ ε_l + s_l, \qquad l = 1 … L

    D is the cost of the one-dimensional plan of slice l when it moves the tokens themselves. Slices with a small D
    transport in a way that makes sense in the whole space.

    Parameters
    ----------
    pool
        The pool whose slices and reference are bound; it needs ``points``.
    bound
        ε: a number, one per slice, or a ``Fraction`` of the unconstrained level.
    relaxation
        How sorting is relaxed so that D has a gradient with respect to the slices. The temperature is relative to the
        spread of the projections by default: an absolute one decides success or failure, and has to be found anew for
        every data set.
    wrt
        ``"both"``: the bound moves slices and reference (the paper). ``"slices"``: the reference is held, because it
        can often meet the bound alone while the slices stay where they are.
    dual_on
        What the multiplier sees: ``"soft"``, the relaxed values that entered the loss, or ``"hard"``, the exact ones.
    name
        Name in records.

    Examples
    --------
    >>> import cswe
    >>> pool = SWEPool(dim=8, slices=4, points=10)
    >>> duals = cswe.PrimalDual(SWGGBound(pool, bound=cswe.Fraction(0.9)), lr=1e-3, slack_lr=1e-3, slack_weight=0.1)
    >>> SWGGBound(pool, bound=3.0)(torch.randn(5, 7, 8)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        pool: SWEPool,
        bound: float | Tensor | Fraction,
        relaxation: SoftSort | LapSum | None = None,
        wrt: Literal["both", "slices"] = "both",
        dual_on: Literal["soft", "hard"] = "soft",
        name: str = "swgg",
    ) -> None:
        if pool.reference is None:
            raise ValueError("SWGGBound compares with the pool's reference, but the pool has none: give it points=M")
        if wrt not in ("both", "slices"):
            raise ValueError(f"expected wrt 'both' or 'slices' but got {wrt!r}")
        if dual_on not in ("soft", "hard"):
            raise ValueError(f"expected dual_on 'soft' or 'hard' but got {dual_on!r}")
        self.pool, self.bound, self.name = pool, bound, name
        self.relaxation = SoftSort(1.0, relative=True) if relaxation is None else relaxation
        self.wrt, self.dual_on = wrt, dual_on
        if dual_on == "hard":
            self.dual_values = self.hard

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Give the relaxed D of every slice, averaged over the batch, ``(L,)``."""
        return self._values(tokens, mask, weights, self.relaxation)

    @torch.no_grad()
    def hard(self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Give the exact D of every slice, averaged over the batch, ``(L,)``."""
        return self._values(tokens, mask, weights, None)

    def _values(
        self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None, relaxation: SoftSort | LapSum | None
    ) -> Tensor:
        pool, reference = self.pool, self.pool.reference
        assert reference is not None
        if self.wrt == "slices":
            reference_points: Tensor = reference.detach()
        else:
            reference_points = reference
        if pool.statistics is not None:
            values, valid, _ = enter(tokens, mask, None, pool.dim, working_dtype(tokens, reference))
            tokens, mask = pool.standardized(values), valid
        distances = swgg(tokens, reference_points, pool.slicer.weight, relaxation, x_mask=mask, x_weights=weights)
        return distances.mean(0)
