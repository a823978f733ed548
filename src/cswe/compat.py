"""The names and the behaviour of the public SWE code, so that vendored copies can be deleted.

:class:`SWE_Pooling` computes exactly what the layer of that name in PSWE, PLM_SWE and their descendants computes, its
matching by ``argsort`` and its interpolation at i/(N + 1) included, and loads their checkpoints.
:meth:`SWE_Pooling.to_pool` is the way out of it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cswe.nn import MapPoints, SWEPool
from cswe.ops._inputs import as_mask, check_points, looks_at_values, whole, working_dtype
from cswe.ops.embedding import displacement


class SWE_Pooling(nn.Module):  # noqa: N801 - the name is the point
    r"""Sliced Wasserstein pooling as the public code does it: :math:`(B, N, d) → (B, L)`.

    Differs from :class:`cswe.SWEPool` in four ways, kept here on purpose: reference points have one coordinate per
    slice instead of living among the tokens; the sorted sample is gathered with ``argsort`` of the reference instead
    of its ranks (right only while the reference is sorted); quantiles are interpolated linearly at i/(N + 1) (beyond
    the outermost ones, extrapolated); and the sign is reference minus sample.

    Parameters
    ----------
    d_in
        Dimension of the tokens.
    num_slices, num_ref_points
        L and M.
    freeze_swe
        Do not train slices and reference.

    Notes
    -----
    Parameters are named as in the public checkpoints: ``reference`` ``(M, L)``, ``theta.weight_g``, ``theta.weight_v``,
    ``weight.weight``. The public code shifts padding to the right of the sample by 0.001 per padded token before it
    interpolates; that, too, is reproduced.

    Examples
    --------
    >>> pool = SWE_Pooling(d_in=8, num_slices=4, num_ref_points=10)
    >>> pool(torch.randn(3, 12, 8)).shape
    torch.Size([3, 4])
    """

    def __init__(self, d_in: int, num_slices: int, num_ref_points: int, freeze_swe: bool = False) -> None:
        super().__init__()
        for name, value in (("d_in", d_in), ("num_slices", num_slices), ("num_ref_points", num_ref_points)):
            whole(value, name)
        self.d_in, self.num_slices, self.num_ref_points = d_in, num_slices, num_ref_points
        line = torch.linspace(-1, 1, num_ref_points)
        self.reference = nn.Parameter(line.unsqueeze(1).repeat(1, num_slices), requires_grad=not freeze_swe)
        self.theta = _WeightNormalised(d_in, num_slices, trainable=not freeze_swe)
        self.weight = nn.Linear(num_ref_points, 1, bias=False)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool ``(B, N, d_in)`` with a mask ``(B, N)`` (1 = valid), giving ``(B, num_slices)``."""
        weighted: Tensor = self.weight(self.embeddings(X, mask)).sum(-1)
        return weighted

    def embeddings(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Give the displacements before they are mapped, ``(B, num_slices, num_ref_points)``."""
        check_points(X, "X", (3,), width=self.d_in)
        mask = as_mask(mask, tuple(X.shape[:2]), "mask", looks_at_values(None, X))
        if mask is not None:
            X = torch.where(mask.unsqueeze(-1), X, 0.0)  # padding may be NaN: its gradient must not be
        sliced = self.theta(X).transpose(1, 2)  # (B, L, N)
        # Half precision has no room for the numbers that stand for padding, nor for shifts of 0.001.
        exact = sliced.to(working_dtype(sliced))
        quantiles = self._quantiles(exact) if mask is None else self._masked_quantiles(exact, mask)
        reference = self.reference.T  # (L, M)
        # The public code's matching, argsort where the rank belongs, and its sign.
        return -displacement(quantiles.to(sliced.dtype), reference, "argsort")

    def get_slice(self, X: Tensor) -> Tensor:
        """Project ``(…, d_in)``, giving ``(…, num_slices)``."""
        projected: Tensor = self.theta(X)
        return projected

    def to_pool(self) -> SWEPool:
        """Make the :class:`cswe.SWEPool` that this layer should have been: matched by rank, barycentric.

        The reference moves among the tokens: with no more slices than dimensions, to points with exactly these
        projections. The result differs where this layer's matching was wrong; train it on. SWEPool's slices are of
        unit length: weights ``theta.weight_g`` other than 1, which the public code never has, are refused.
        """
        slices = self.theta.directions()
        lengths = self.theta.weight_g.detach().abs()
        if not torch.allclose(lengths, torch.ones_like(lengths), rtol=0, atol=1e-6):
            raise ValueError(
                "expected theta.weight_g to be 1, the length of SWEPool's slices, but its absolute values lie between "
                f"{float(lengths.min()):.4g} and {float(lengths.max()):.4g}; start SWEPool anew"
            )
        if self.num_slices > self.d_in:
            raise ValueError(
                f"{self.num_slices} reference coordinates a point do not fit in {self.d_in} dimensions: "
                "a reference among the tokens has no more slices than dimensions; start SWEPool anew"
            )
        readout = MapPoints(self.num_ref_points)
        pool = SWEPool(self.d_in, self.num_slices, self.num_ref_points, readout, order="reference").to(self.reference)
        with torch.no_grad():
            pool.slicer.weight.copy_(slices)
            assert pool.reference is not None
            dtype = working_dtype(slices)  # half precision has no singular value decomposition
            pool.reference.copy_(self.reference.to(dtype) @ torch.linalg.pinv(slices.to(dtype)).T)
            readout.map.weight.copy_(-self.weight.weight)  # sample minus reference, from here on
        pool.slicer.weight.requires_grad_(self.theta.weight_v.requires_grad)
        pool.reference.requires_grad_(self.reference.requires_grad)
        return pool

    def _quantiles(self, sliced: Tensor) -> Tensor:
        ordered = torch.sort(sliced, dim=-1).values
        count = ordered.shape[-1]
        if count == self.num_ref_points:
            return ordered
        positions = torch.linspace(0, 1, count + 2, device=sliced.device, dtype=sliced.dtype)[1:-1]
        return self._interpolate(positions.expand(ordered.shape), ordered)

    def _masked_quantiles(self, sliced: Tensor, mask: Tensor) -> Tensor:
        padding = ~mask.unsqueeze(1)
        valid = mask.sum(1, keepdim=True)
        if looks_at_values(None, sliced) and bool((valid < 2).any()):
            raise ValueError("the public code extrapolates from the two largest tokens: every set needs at least two")
        lifted = sliced.masked_fill(padding, -1e10)
        two = torch.topk(lifted, k=2, dim=-1).values
        # Padding lies on the line through the two largest tokens, beyond them.
        shift = 1e-3 * torch.cumsum(padding, dim=-1).to(sliced.dtype)
        slope = (two[..., :1] - two[..., 1:]) * (1 + valid).unsqueeze(1)
        # The shift counts padding so far, so valid tokens behind padding are shifted as well: kept as it is there.
        values = torch.where(padding, two[..., :1], sliced) + slope * shift
        ordered = torch.sort(values, dim=-1).values
        count = sliced.shape[-1]
        grid = torch.arange(1, count + 1, device=sliced.device, dtype=sliced.dtype) / (1 + valid)
        last = grid.masked_fill(~mask, -1e10).amax(1, keepdim=True)
        positions = torch.where(mask, grid, last).unsqueeze(1) + shift
        return self._interpolate(positions.expand(ordered.shape), ordered)

    def _interpolate(self, positions: Tensor, ordered: Tensor) -> Tensor:
        """Interpolate linearly at m/(M + 1), continuing the outermost pieces."""
        wanted = torch.linspace(0, 1, self.num_ref_points + 2, device=ordered.device, dtype=ordered.dtype)[1:-1]
        wanted = wanted.expand(*ordered.shape[:-1], -1).contiguous()
        if ordered.shape[-1] == 1:
            raise ValueError("the public code interpolates between tokens: every set needs at least two")
        index = (torch.searchsorted(positions.contiguous(), wanted) - 1).clamp(0, ordered.shape[-1] - 2)
        x0, x1 = positions.gather(-1, index), positions.gather(-1, index + 1)
        y0, y1 = ordered.gather(-1, index), ordered.gather(-1, index + 1)
        tiny = torch.finfo(ordered.dtype).eps
        return y0 + (y1 - y0) / (tiny + (x1 - x0)) * (wanted - x0)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"d_in={self.d_in}, num_slices={self.num_slices}, num_ref_points={self.num_ref_points}"


class _WeightNormalised(nn.Module):
    """A linear map with rows ``g · v/‖v‖``, under the parameter names of torch's old ``weight_norm``."""

    def __init__(self, dim: int, slices: int, trainable: bool) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(slices, 1), requires_grad=False)
        self.weight_v = nn.Parameter(torch.randn(slices, dim), requires_grad=trainable)

    def directions(self) -> Tensor:
        return self.weight_g * nn.functional.normalize(self.weight_v, dim=-1)

    def forward(self, X: Tensor) -> Tensor:
        return X @ self.directions().T

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # torch's new parametrization saves the same two tensors under other names.
        for new, old in (("original0", "weight_g"), ("original1", "weight_v")):
            key = f"{prefix}parametrizations.weight.{new}"
            if key in state_dict:
                state_dict[f"{prefix}{old}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
