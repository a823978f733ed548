r"""Sorting as a linear operator: ``P @ w``, ``P.T @ w``, ``P.dense()``.

A sort of N numbers is a permutation matrix P: row r picks the element of rank r, ascending. A *relaxed* sort
replaces it by a matrix that depends smoothly on the numbers. None of them is ever stored unless ``dense()`` asks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cswe.ops._inputs import as_mask, check_floating, looks_at_values, without_autocast, working_dtype
from cswe.ops.fast_sort import sort_rows, sorted_rows
from cswe.ops.laplace import laplace_sums
from cswe.ops.unit import check_temperature, given_unit, slice_unit


def sort_with_padding_last(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort ascending and stably along the last axis, padding behind everything else.

    In the result padding repeats the last valid value, so that its gaps are zero. (Infinity would not do:
    inf − inf is NaN.) The mask broadcasts.
    """
    if mask is None:
        return sort_rows(values)
    ordered, order = sort_rows(values.masked_fill(~mask, torch.finfo(values.dtype).max))
    return _repeat_last(ordered, mask), order


def sorted_with_padding_last(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sort likewise, without the order: faster where no gradient needs it."""
    if mask is None:
        return sorted_rows(values)
    return _repeat_last(sorted_rows(values.masked_fill(~mask, torch.finfo(values.dtype).max)), mask)


def _repeat_last(ordered: Tensor, mask: Tensor) -> Tensor:
    place = (mask.sum(-1, keepdim=True) - 1).clamp(min=0)  # a mask that was not looked at may leave nothing
    last = ordered.detach().gather(-1, place.expand(*ordered.shape[:-1], 1))
    return torch.where(filled_ranks(mask), ordered, last)


def filled_ranks(mask: Tensor) -> Tensor:
    """Flag the ranks that a valid element has after sorting, ``(…, N)``."""
    return torch.arange(mask.shape[-1], device=mask.device) < mask.sum(-1, keepdim=True)


class SortOperator(ABC):
    """A batch of (relaxed) permutation matrices ``(…, N, N)``, never stored.

    ``w`` is a batch of vectors ``(…, N)`` if it has no more axes than the sorted values have, and a batch of matrices
    ``(…, N, D)`` if it has one more; batch axes broadcast.
    """

    def __init__(self, values: Tensor, mask: Tensor | None) -> None:
        self._values = values
        self._mask = mask

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrices, ``(…, N, N)``."""
        return torch.Size((*self._values.shape, self._values.shape[-1]))

    @property
    def T(self) -> "_Transposed":
        """The transposed operator."""
        return _Transposed(self)

    def __matmul__(self, w: Tensor) -> Tensor:
        return self._multiply(w, self._apply, self._mask)

    @abstractmethod
    def dense(self) -> Tensor:
        """Give the matrices themselves, ``(…, N, N)``: the definition."""

    @abstractmethod
    def _apply(self, w: Tensor) -> Tensor:
        """Multiply matrices ``(…, N, D)`` of the full batch shape from the left."""

    @abstractmethod
    def _apply_transposed(self, w: Tensor) -> Tensor:
        """Multiply by the transposed matrix."""

    @without_autocast
    def _multiply(self, w: Tensor, apply: Callable[[Tensor], Tensor], read: Tensor | None) -> Tensor:
        check_floating(w, "the right-hand side of @")
        rank, count = self._values.ndim, self._values.shape[-1]
        is_vector = w.ndim <= rank
        matrix = w.unsqueeze(-1) if is_vector else w
        batch = self._values.shape[:-1]
        try:
            fits = torch.broadcast_shapes(matrix.shape[:-2], batch) == batch
        except RuntimeError:
            fits = False
        if w.ndim == 0 or w.ndim > rank + 1 or matrix.shape[-2] != count or not fits:
            form = ", ".join([*map(str, batch), str(count)])
            raise ValueError(f"expected a right-hand side of shape ({form}) or ({form}, D) but got {tuple(w.shape)}")
        matrix = matrix.to(working_dtype(self._values, w)).expand(*batch, *matrix.shape[-2:])
        if read is not None:
            # Padding is never read: not its value, not its gradient, not even if it is NaN.
            matrix = torch.where(read.unsqueeze(-1), matrix, 0.0)
        result = apply(matrix)
        return result.squeeze(-1) if is_vector else result

    def _without_empty_rows(self, ranked: Tensor) -> Tensor:
        """Zero the ranks behind the last valid element."""
        if self._mask is None:
            return ranked
        return torch.where(filled_ranks(self._mask).unsqueeze(-1), ranked, 0.0)


class _Transposed:
    def __init__(self, operator: SortOperator) -> None:
        self._operator = operator

    @property
    def T(self) -> SortOperator:
        return self._operator

    @property
    def shape(self) -> torch.Size:
        return self._operator.shape

    def __matmul__(self, w: Tensor) -> Tensor:
        operator = self._operator
        read = None if operator._mask is None else filled_ranks(operator._mask)
        return operator._multiply(w, operator._apply_transposed, read)

    def dense(self) -> Tensor:
        return self._operator.dense().transpose(-1, -2)


class _HardPermutation(SortOperator):
    def __init__(self, values: Tensor, mask: Tensor | None) -> None:
        super().__init__(values, mask)
        self._order = sort_with_padding_last(values, mask)[1]

    def dense(self) -> Tensor:
        eye = torch.eye(self._values.shape[-1], dtype=self._values.dtype, device=self._values.device)
        return self._without_empty_rows(eye[self._order])

    def _apply(self, w: Tensor) -> Tensor:
        return self._without_empty_rows(_take(w, self._order))

    def _apply_transposed(self, w: Tensor) -> Tensor:
        return _put(w, self._order)


class _SoftPermutation(SortOperator):
    def __init__(self, values: Tensor, mask: Tensor | None, tau: float) -> None:
        super().__init__(values, mask)
        self._tau = tau
        self._sorted, self._order = sort_with_padding_last(values, mask)
        if mask is not None:
            # Padding ties with the last valid point; it has weight 0, so all it must not do is count in Z.
            self._present = _take(mask.to(values.dtype).unsqueeze(-1), self._order)
        else:
            self._present = torch.ones_like(values).unsqueeze(-1)

    def dense(self) -> Tensor:
        distance = (self._sorted.unsqueeze(-1) - self._values.unsqueeze(-2)).abs()
        if self._mask is not None:
            distance = distance.masked_fill(~self._mask.unsqueeze(-2), torch.inf)
        return self._without_empty_rows(torch.softmax(-distance / self._tau, dim=-1))

    def _apply(self, w: Tensor) -> Tensor:
        ranked = torch.cat([_take(w, self._order), self._present.to(w.dtype)], dim=-1)
        sums = laplace_sums(self._sorted.to(w.dtype), ranked, self._tau)
        return self._without_empty_rows(sums[..., :-1] / sums[..., -1:])

    def _apply_transposed(self, w: Tensor) -> Tensor:
        s = self._sorted.to(w.dtype)
        normaliser = laplace_sums(s, self._present.to(w.dtype), self._tau)
        columns = laplace_sums(s, w / normaliser, self._tau) * self._present.to(w.dtype)
        return _put(columns, self._order)


def _take(w: Tensor, order: Tensor) -> Tensor:
    """Row r of the result is row ``order[r]`` of w."""
    return w.gather(-2, order.unsqueeze(-1).expand(*order.shape, w.shape[-1]))


def _put(w: Tensor, order: Tensor) -> Tensor:
    """Row ``order[r]`` of the result is row r of w."""
    return torch.zeros_like(w).scatter(-2, order.unsqueeze(-1).expand(*order.shape, w.shape[-1]), w)


def _checked(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    check_floating(values, "values")
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"expected values of shape (…, N) with N ≥ 1 but got {tuple(values.shape)}")
    mask = as_mask(mask, tuple(values.shape), "mask", looks_at_values(None, values))
    values = values.to(working_dtype(values))
    return (values if mask is None else torch.where(mask, values, 0.0)), mask


@dataclass(frozen=True)
class HardSort:
    """The sort itself: an exact permutation, with no gradient to the values.

    Examples
    --------
    >>> P = HardSort()(torch.tensor([3.0, 1.0, 2.0]))
    >>> P @ torch.tensor([30.0, 10.0, 20.0])
    tensor([10., 20., 30.])
    >>> P.T @ (P @ torch.tensor([30.0, 10.0, 20.0]))
    tensor([30., 10., 20.])
    """

    def __call__(self, values: Tensor, mask: Tensor | None = None) -> SortOperator:
        """Sort ``(…, N)`` values; elements under a False mask come last and count for nothing."""
        return _HardPermutation(*_checked(values, mask))


@dataclass(frozen=True)
class SoftSort:
    r"""The relaxed sort :math:`P_τ(x)_{rk} = e^{-|x_{(r)} - x_k|/τ} / Z_r` of Prillo and Eisenschlos [1]_.

    Products take linear time after the sort and never build the matrix: with the columns in rank order too, the matrix
    is a row-normalised Laplace kernel on sorted points, a pair of first-order recurrences. The result is exact.

    Parameters
    ----------
    tau
        Temperature τ > 0: the distance over which neighbours blend. Small is close to the hard sort.
    relative
        Measure τ in standard deviations of the projections of a slice, taken over the batch and held constant
        (no gradient flows through the scale). The axis before the last one counts the slices.
    unit
        With ``relative``: the unit of τ per slice, ``(L, 1)``, where it has been measured already.

    References
    ----------
    .. [1] Prillo, Eisenschlos. SoftSort: a continuous relaxation for the argsort operator. ICML 2020.

    Examples
    --------
    >>> P = SoftSort(tau=0.1)(torch.tensor([3.0, 1.0, 2.0]))
    >>> P @ torch.tensor([30.0, 10.0, 20.0])
    tensor([10.0005, 20.0000, 29.9995])
    """

    tau: float
    relative: bool = False
    unit: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_temperature(self.tau, "tau", self.relative, self.unit)

    def __call__(self, values: Tensor, mask: Tensor | None = None) -> SortOperator:
        """Sort ``(…, N)`` values softly; elements under a False mask come last and count for nothing."""
        values, mask = _checked(values, mask)
        if self.relative:
            values = values / self.scale(values, mask)
        return _SoftPermutation(values, mask, self.tau)

    def scale(self, projections: Tensor, mask: Tensor | None = None) -> Tensor:
        """Give the unit of τ per slice, ``(L, 1)`` (``(1,)`` for a plain vector): 1 unless ``relative``."""
        if self.unit is not None:
            return given_unit(self.unit, projections)
        return slice_unit(projections, mask, self.relative)
