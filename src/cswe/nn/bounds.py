"""What slices can be bound to: constraints for :class:`cswe.PrimalDual`."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from cswe.constrained import Fraction
from cswe.constrained.bound import as_bound
from cswe.nn._door import enter
from cswe.nn.pool import SWEPool
from cswe.nn.ragged import Sets, all_values, as_padded, batch_size, is_ragged, map_groups, without_mask
from cswe.ops import LapSum, SoftSort, swgg, wasserstein_1d
from cswe.ops._inputs import check_points, measure_weights, without_autocast, working_dtype
from cswe.ops.measure import root
from cswe.ops.unit import slice_unit


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
        every data set. The spread is that of the batch at hand: micro-batches and processes each measure their own, so
        the mean of their D differs a little from D of all their samples at once, as it does not under ``SoftSort(τ)``.
    wrt
        ``"both"``: the bound moves slices and reference (the paper). ``"slices"``: the reference is held, because it
        can often meet the bound alone while the slices stay where they are.
    dual_on
        What the multiplier sees: ``"soft"``, the relaxed values that entered the loss, or ``"hard"``, the exact ones.
    name
        Name in records.
    per_sample
        Ask every sample, not only their mean, to keep to the bound: the values are then ε plus the mean excess
        :math:`[D_{il} - ε_l]_+`, which is ε exactly when nobody exceeds it. The bound must be a number or a vector.

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
        *,
        per_sample: bool = False,
    ) -> None:
        pool = _checked(pool, "SWGGBound", reference=True)
        if wrt not in ("both", "slices"):
            raise ValueError(f"expected wrt 'both' or 'slices' but got {wrt!r}")
        if dual_on not in ("soft", "hard"):
            raise ValueError(f"expected dual_on 'soft' or 'hard' but got {dual_on!r}")
        if per_sample and isinstance(bound, Fraction):
            raise ValueError("per_sample needs the bound itself, a number or one per slice, but got a Fraction")
        if relaxation is not None and not isinstance(relaxation, SoftSort | LapSum):
            raise TypeError(f"expected relaxation to be None, SoftSort or LapSum but got {relaxation!r}")
        given = as_bound(bound, "bound")
        if isinstance(given, Tensor) and len(given) != pool.slices:
            raise ValueError(f"expected bound, or one for each of {pool.slices} slices, but got {len(given)} numbers")
        self.pool, self.bound, self.name, self.per_sample = pool, bound, name, per_sample
        self.relaxation = SoftSort(1.0, relative=True) if relaxation is None else relaxation
        self.wrt, self.dual_on = wrt, dual_on
        if dual_on == "hard":
            self.dual_values = self.hard

    def __call__(self, tokens: Sets, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Give the relaxed D of every slice, averaged over the batch, ``(L,)``."""
        return self._values(tokens, mask, weights, self.relaxation)

    @torch.no_grad()
    def hard(self, tokens: Sets, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Give the exact D of every slice, averaged over the batch, ``(L,)``."""
        return self._values(tokens, mask, weights, None)

    def _values(
        self, tokens: Sets, mask: Tensor | None, weights: Tensor | None, relaxation: SoftSort | LapSum | None
    ) -> Tensor:
        if batch_size(tokens) == 0:
            return _of_nobody(self.pool, self.wrt)
        distances = self._distances(tokens, mask, weights, relaxation)
        if not self.per_sample:
            return distances.mean(0)
        assert not isinstance(self.bound, Fraction)
        level = torch.as_tensor(self.bound, dtype=distances.dtype, device=distances.device)
        return level + (distances - level).clamp(min=0).mean(0)

    def count(self, tokens: Sets, *others: object, **kwargs: object) -> int:
        """Give the number of samples that the values are a mean of."""
        return batch_size(tokens)

    @without_autocast
    @torch.no_grad()
    def _unit(self, tokens: Sets) -> Tensor:
        """Give the spread of all projections per slice, ``(L, 1)``."""
        values = all_values(tokens).unsqueeze(0)
        check_points(values, "tokens", (3,), width=self.pool.dim)
        values = self.pool.standardized(values.to(working_dtype(self.pool.slicer.weight)))
        return slice_unit(self.pool.slicer(values), None, relative=True)

    def _distances(
        self, tokens: Sets, mask: Tensor | None, weights: Tensor | None, relaxation: SoftSort | LapSum | None
    ) -> Tensor:
        """Give D of every sample and slice, ``(B, L)``."""
        if is_ragged(tokens):
            if relaxation is not None and relaxation.relative and relaxation.unit is None:
                # The unit is the spread over the whole batch, but a group would only see its own samples.
                relaxation = replace(relaxation, unit=self._unit(tokens))
            return map_groups(
                lambda part, valid, given: self._distances(part, valid, given, relaxation),
                without_mask(tokens, mask),
                weights,
            )
        tokens = as_padded(tokens)
        pool, reference = self.pool, self.pool.reference
        assert reference is not None
        reference_points = reference.detach() if self.wrt == "slices" else reference
        if pool.statistics is not None:
            values, valid, _ = enter(tokens, mask, None, pool.dim, working_dtype(tokens, reference))
            tokens, mask = pool.standardized(values), valid
        return swgg(tokens, reference_points, pool.slicer.weight, relaxation, x_mask=mask, x_weights=weights)


class Orthogonality:
    r"""Keep slices apart: :math:`‖ΘΘ^⊤ - I‖_F ≤ δ`, on the Gram matrix of the L unit slices.

    Parameters
    ----------
    pool
        The pool whose slices are bound.
    bound
        δ. With more slices than dimensions it cannot be less than :math:`\sqrt{L(L-d)/d}`.
    name
        Name in records.

    Examples
    --------
    >>> pool = SWEPool(dim=8, slices=4)
    >>> float(Orthogonality(pool, bound=0.1)().detach()) < 1e-5
    True
    """

    pool: SWEPool

    def __init__(self, pool: SWEPool, bound: float, name: str = "orthogonality") -> None:
        pool = _checked(pool, "Orthogonality", reference=False)
        number = as_bound(bound, "bound")
        if isinstance(number, Tensor | Fraction):
            raise TypeError(f"expected bound to be a number, δ, but got {bound!r}")
        least = max(0.0, pool.slices * (pool.slices - pool.dim) / pool.dim) ** 0.5
        if number < least:
            raise ValueError(
                f"{pool.slices} slices in {pool.dim} dimensions cannot be closer to orthogonal than {least:.4g}, "
                f"but the bound is {number}"
            )
        self.pool, self.bound, self.name = pool, number, name

    def count(self, *inputs: object, **kwargs: object) -> int:
        """Give 1: whatever the inputs are, the slices are the same."""
        return 1

    @without_autocast
    def __call__(self, *inputs: object, **kwargs: object) -> Tensor:
        """Give the distance from orthogonality, ``(1,)``. The inputs have no say."""
        slices = self.pool.slicer.directions()
        gram = slices @ slices.T
        difference = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return root(difference.square().sum()).reshape(1)


class MinSlicedWasserstein:
    r"""Keep samples and reference apart along every slice, as Max-SW does: :math:`\frac1B Σ_i W_2(θ_l) ≥ w_l`.

    Parameters
    ----------
    pool
        The pool whose slices are bound; it needs ``points``.
    bound
        The least distance w: a number or one per slice; or a ``Fraction`` of the unconstrained level (1.1 asks for 10 %
        more than that).
    wrt
        ``"both"`` moves slices and reference, ``"slices"`` holds the reference.
    name
        Name in records, where values and bounds are negative: the engine knows upper bounds only.

    Examples
    --------
    >>> pool = SWEPool(dim=8, slices=4, points=10)
    >>> MinSlicedWasserstein(pool, bound=0.5)(torch.randn(5, 7, 8)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        pool: SWEPool,
        bound: float | Tensor | Fraction,
        wrt: Literal["both", "slices"] = "both",
        name: str = "sliced_wasserstein",
    ) -> None:
        pool = _checked(pool, "MinSlicedWasserstein", reference=True)
        if wrt not in ("both", "slices"):
            raise ValueError(f"expected wrt 'both' or 'slices' but got {wrt!r}")
        self.pool, self.name, self.wrt = pool, name, wrt
        if not isinstance(bound, Fraction):
            vector = as_bound(bound, "bound")  # says what is wrong with it
            bound = -torch.as_tensor(vector, dtype=torch.float64, device="cpu")
        self.bound = bound

    def count(self, tokens: Sets, *others: object, **kwargs: object) -> int:
        """Give the number of samples that the values are a mean of."""
        return batch_size(tokens)

    @without_autocast
    def __call__(self, tokens: Sets, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Give minus the distance along every slice, averaged over the batch, ``(L,)``."""
        if batch_size(tokens) == 0:
            return _of_nobody(self.pool, self.wrt)
        if is_ragged(tokens):
            return -map_groups(self._distances, without_mask(tokens, mask), weights).mean(0)
        tokens = as_padded(tokens)
        return -self._distances(tokens, mask, weights).mean(0)

    def _distances(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        """Give the distance of every sample along every slice, ``(B, L)``."""
        pool, reference = self.pool, self.pool.reference
        assert reference is not None
        points = reference.detach() if self.wrt == "slices" else reference
        values, valid, given = enter(tokens, mask, weights, pool.dim, working_dtype(tokens, reference))
        projections = pool.slicer(pool.standardized(values))
        masses = measure_weights(values, valid, given)
        expanded = None if masses is None else masses.unsqueeze(1).expand(projections.shape)
        return wasserstein_1d(projections, pool.slicer(points.to(values.dtype).unsqueeze(0)), expanded)


def _checked(pool: object, name: str, *, reference: bool) -> SWEPool:
    """Return the pool, also out of ``torch.compile``, or raise."""
    inner = getattr(pool, "_orig_mod", pool)
    if not isinstance(inner, SWEPool):
        raise TypeError(
            f"expected {name} of a SWEPool but got {type(pool).__name__}; of a model that wraps it "
            "(DistributedDataParallel, say) give the pool inside"
        )
    if reference and inner.reference is None:
        raise ValueError(f"{name} compares with the pool's reference, but the pool has none: give it points=M")
    return inner


def _of_nobody(pool: SWEPool, wrt: Literal["both", "slices"]) -> Tensor:
    """Give the values of a batch without samples, ``(L,)``: zeros that can be differentiated, and count for nothing.

    By all that a batch with samples would be: other processes wait for a gradient of each parameter.
    """
    nothing = pool.slicer.weight.sum(-1) * 0.0
    if wrt == "slices" or pool.reference is None:
        return nothing
    return nothing + pool.reference.sum() * 0.0
