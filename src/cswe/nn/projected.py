"""A batch of sets seen along slices: what a readout reads."""

from dataclasses import dataclass

from torch import Tensor

from cswe.ops._gpu import gpu_kernels
from cswe.ops._inputs import measure_weights
from cswe.ops.embedding import (
    Interpolation,
    Order,
    displacement,
    l_moments_of_sorted,
    quantile_function,
    quantiles_of_sorted,
)
from cswe.ops.sorting import filled_ranks, sort_with_padding_last, sorted_with_padding_last


@dataclass
class ProjectedSets:
    """Projections of B sets on L slices, with their masses; sorted once, however many weightings read them.

    Parameters
    ----------
    projections
        ``(B, L, N)``.
    mask
        ``(B, N)``, boolean, or ``None``.
    masses
        ``(B, H, N)``, summing to one, or ``None`` for the uniform measure on the valid tokens.
    reference
        Projections of the reference, ``(L, M)``, where there is one.
    """

    projections: Tensor
    mask: Tensor | None
    masses: Tensor | None
    reference: Tensor | None = None
    interpolation: Interpolation = "barycentric"
    order: Order = "rank"

    def means(self) -> Tensor:
        """Give the mean along every slice under every weighting, ``(B, H or 1, L)``. Needs no sort."""
        masses = self._all_masses()
        if masses is None:
            return self.projections.mean(-1).unsqueeze(1)
        return masses @ self.projections.transpose(-1, -2)

    def second_moments(self, about: Tensor) -> Tensor:
        """Give the mean squared distance from ``about`` ``(B, H, L)``, same shape. Needs no sort."""
        # E|x − a|² = E x² − 2 a E x + a², but that cancels where the mean is far from 0: centre on a common point
        # first.
        centre = about.mean(1).detach().unsqueeze(-1)
        near = self.projections - centre
        offset = about - centre.transpose(-1, -2)
        masses = self._all_masses()
        if masses is None:
            return near.square().mean(-1).unsqueeze(1) - 2 * offset * near.mean(-1).unsqueeze(1) + offset.square()
        square, first = (masses @ part.transpose(-1, -2) for part in (near.square(), near))
        return square - 2 * offset * first + offset.square()

    def ranked(self) -> tuple[Tensor, Tensor | None]:
        """Sort along every slice: values ``(B, 1, L, N)`` and masses in rank order ``(B, H, L, N)`` (or ``None``).

        Padding comes last, repeats the last value and has no mass.
        """
        row_mask = None if self.mask is None else self.mask.unsqueeze(1)
        if self.masses is None:
            values = sorted_with_padding_last(self.projections, row_mask)
            filled = (
                None if self.mask is None else filled_ranks(self.mask).to(values.dtype).reshape(-1, 1, 1, self.count)
            )
            return values.unsqueeze(1), filled
        values, order = sort_with_padding_last(self.projections, row_mask)
        batch, heads, _ = self.masses.shape
        shape = (batch, heads, values.shape[1], self.count)
        masses = self.masses.unsqueeze(2).expand(shape).gather(-1, order.unsqueeze(1).expand(shape))
        return values.unsqueeze(1), masses

    def higher_moments(self, k: int) -> Tensor:
        """Give the L-moments from the second to the k-th, ``(B, H or 1, L, k − 1)``."""
        if self.masses is not None:
            compiled = gpu_kernels("cuda_moments", self.projections, self.masses)
            if compiled is not None and compiled.fits(self.projections, k):
                moments: Tensor = compiled.higher_moments(self.projections, self.masses, self.mask, k)
                return moments
        return l_moments_of_sorted(*self.ranked(), k)[..., 1:]

    def displacements(self) -> Tensor:
        """Give the displacements to the reference, ``(B, H or 1, L, M)``."""
        if self.reference is None:
            raise ValueError("this readout compares with a reference, but the pool has none: give it points=M")
        points = self.reference.shape[-1]
        if self.masses is None or self.interpolation == "linear":
            quantiles = quantile_function(self.projections, points, self.mask, None, self.interpolation).unsqueeze(1)
        else:
            quantiles = quantiles_of_sorted(*self.ranked(), points)
        return displacement(quantiles, self.reference, self.order)

    @property
    def count(self) -> int:
        """Number of tokens, padding included."""
        return self.projections.shape[-1]

    def _all_masses(self) -> Tensor | None:
        """Masses of all tokens, padding included, ``(B, H or 1, N)``; ``None``: all equal."""
        if self.masses is not None or self.mask is None:
            return self.masses
        masses = measure_weights(self.projections, self.mask, None, self.projections.dtype)
        return None if masses is None else masses.unsqueeze(1)


def uniform_or_given(weights: Tensor | None) -> Tensor | None:
    """Normalise given weights ``(B, N)`` to masses ``(B, 1, N)``; ``None`` where there are none."""
    if weights is None:
        return None
    return (weights / weights.sum(-1, keepdim=True)).unsqueeze(1)
