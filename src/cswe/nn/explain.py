"""Which tokens a pooled vector comes from."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from cswe.nn.pool import SWEPool
from cswe.nn.projected import ProjectedSets
from cswe.ops._inputs import check_floating, check_points, usable, without_autocast


@torch.inference_mode(False)
@without_autocast
def explain_slices(
    pool: SWEPool,
    tokens: Tensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    target: Tensor | None = None,
) -> Tensor:
    r"""Split a pooled vector among the tokens it comes from, slice by slice.

    Along a slice, every number that a readout keeps is a sum over tokens once the order and the masses of the tokens
    are given:

    * a displacement is the mean of :math:`s_n - u_m` over the tokens n that the plan sends to rank m;
    * an L-moment is :math:`Σ_n ω_n s_n` with weights of the rank; where they sum to zero (spread, skewness, …) values
      count from the set's mean, so that the result does not depend on the origin;
    * a deviation is :math:`Σ_n p_n (s_n - \bar s)² / σ`.

    The contributions are exact and complete: summed over slices and tokens they give :math:`⟨\mathrm{target}, z⟩`. What
    they leave out is how a token changes the order of the others, or their learned masses.

    Parameters
    ----------
    pool
        The pool.
    tokens, mask, weights
        As in its ``forward``, padded.
    target
        What is to be split: a direction in the space of pooled vectors, ``(out_dim,)`` or ``(B, out_dim)``; a row of a
        linear head, for the evidence for a class. By default the vector z itself: for the flat readout that gives
        every token's squared displacement along every slice.

    Returns
    -------
    Tensor
        ``(B, L, N)``, zero under the mask.

    Examples
    --------
    >>> pool = SWEPool(dim=3, slices=4, points=6, readout="flatten")
    >>> tokens = torch.randn(2, 6, 3)
    >>> shares, z = explain_slices(pool, tokens), pool(tokens).reshape(2, 4, 6)
    >>> bool(torch.allclose(shares.sum(-1), z.square().sum(-1), atol=1e-4))
    True
    """
    if not isinstance(getattr(pool, "_orig_mod", pool), SWEPool):
        raise TypeError(f"expected a SWEPool but got {type(pool).__name__}: explain_tokens takes other pools")
    check_points(tokens, "tokens", (3,), width=pool.dim)
    tokens, mask, weights, target = usable(tokens), usable(mask), usable(weights), usable(target)
    with torch.no_grad():
        sets = pool.project(tokens, mask, weights)
        centre = ProjectedSets.means(sets).mean(1).unsqueeze(-1)  # (B, L, 1)
    with torch.enable_grad():
        traced = _Traced.of(sets)
        vector = pool.read(traced)
        target = _checked(target, vector)
        given = traced.leaves()
        slopes = torch.autograd.grad(vector, given, target, retain_graph=True, allow_unused=True)
        location, shape, displaced = (
            torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(given, slopes, strict=True)
        )
        values = sets.projections
        shares = location * values + shape * (values - centre) + displaced * values
        for z, reference in traced.displaced:
            (pull,) = torch.autograd.grad(vector, [z], target, retain_graph=True)
            (back,) = torch.autograd.grad(z, [given[2]], pull * reference, retain_graph=True)
            shares = shares - back
    if sets.mask is not None:
        shares = torch.where(sets.mask.unsqueeze(1), shares, 0.0)
    return shares.detach()


@torch.inference_mode(False)
def explain_tokens(
    pool: nn.Module,
    tokens: Tensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    target: Tensor | None = None,
) -> Tensor:
    """Split a pooled vector of any pool among its tokens, ``(B, N)``.

    For :class:`~cswe.SWEPool` this is :func:`explain_slices` summed over the slices. For other pools it is the gradient
    times the token: exact for mean and max pooling, a first-order answer for attention, whose masses depend on the
    tokens too.

    Examples
    --------
    >>> from cswe.nn import MeanPool
    >>> explain_tokens(MeanPool(2), torch.tensor([[[1.0, 0.0], [3.0, 0.0]]]), target=torch.tensor([1.0, 0.0]))
    tensor([[0.5000, 1.5000]])
    """
    pool = getattr(pool, "_orig_mod", pool)  # out of torch.compile
    if isinstance(pool, SWEPool):
        return explain_slices(pool, tokens, mask, weights, target).sum(1)
    check_points(tokens, "tokens", (3,))
    mask, weights, target = usable(mask), usable(weights), usable(target)
    with torch.enable_grad():
        leaf = tokens.detach().clone().requires_grad_()
        vector = pool(leaf, mask, weights)
        (slope,) = torch.autograd.grad(vector, [leaf], _checked(target, vector))
    shares = (slope * leaf).sum(-1)
    if mask is not None:
        shares = torch.where(mask.bool(), shares, 0.0)
    return shares.detach()


def _checked(target: Tensor | None, vector: Tensor) -> Tensor:
    if target is None:
        return vector.detach()
    check_floating(target, "target")
    if target.shape not in (vector.shape, vector.shape[1:]):
        batch, size = vector.shape
        raise ValueError(f"expected target of shape ({size},) or ({batch}, {size}) but got {tuple(target.shape)}")
    return target.detach().to(vector).expand(vector.shape)


class _Traced(ProjectedSets):
    """Projected sets that tell apart what a readout asked for: location, shape, or displacement.

    Each question is answered from a copy of the projections of its own, so that each has a gradient of its own.
    """

    plain: ProjectedSets
    location: Tensor
    shape: Tensor
    moved: Tensor
    displaced: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, sets: ProjectedSets) -> "_Traced":
        traced = cls(**vars(sets))
        traced.plain = sets
        traced.location, traced.shape, traced.moved = (
            sets.projections.detach().clone().requires_grad_() for _ in range(3)
        )
        traced.displaced = []
        return traced

    def leaves(self) -> list[Tensor]:
        return [self.location, self.shape, self.moved]

    def means(self) -> Tensor:
        return replace(self.plain, projections=self.location).means()

    def second_moments(self, about: Tensor) -> Tensor:
        return replace(self.plain, projections=self.shape).second_moments(about)

    def ranked(self) -> tuple[Tensor, Tensor | None]:
        return replace(self.plain, projections=self.shape).ranked()

    def displacements(self) -> Tensor:
        z = replace(self.plain, projections=self.moved).displacements()
        reference = self.plain.reference
        assert reference is not None
        self.displaced.append((z, reference.sort(dim=-1).values if self.order == "rank" else reference))
        return z
