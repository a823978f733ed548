"""The directions a set is projected on."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cswe.ops._inputs import looks_at_values, unit_slices, whole, working_dtype

Initialisation = Literal["orthogonal", "normal"]


class Slicer(nn.Module):
    r"""Project tokens on L unit directions: :math:`(B, N, d) → (B, L, N)`.

    ``weight`` is a plain parameter ``(L, d)``, normalised in forward: a slice's length has no effect and its gradient
    is tangent to the sphere.

    Parameters
    ----------
    dim
        Dimension d of the tokens.
    slices
        Number L of directions; more than d is allowed.
    init
        ``"orthogonal"`` (in blocks of d where L > d) or ``"normal"``: independent uniform directions.
    trainable
        Whether the directions are learned.

    Examples
    --------
    >>> Slicer(dim=3, slices=2)(torch.randn(4, 7, 3)).shape
    torch.Size([4, 2, 7])
    """

    def __init__(self, dim: int, slices: int, init: Initialisation = "orthogonal", *, trainable: bool = True) -> None:
        super().__init__()
        dim, slices = whole(dim, "dim"), whole(slices, "slices")
        if init not in ("orthogonal", "normal"):
            raise ValueError(f"expected init 'orthogonal' or 'normal' but got {init!r}")
        self.dim, self.slices, self.init = dim, slices, init
        self.weight = nn.Parameter(torch.empty(slices, dim), requires_grad=trainable)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions anew."""
        if self.init == "normal":
            weight = torch.empty_like(self.weight).normal_()
        else:
            # There is no QR decomposition in half precision.
            weight = torch.empty_like(self.weight, dtype=working_dtype(self.weight))
            for block in weight.split(self.dim):
                nn.init.orthogonal_(block)
        self.assign(nn.functional.normalize(weight, dim=-1))

    @torch.no_grad()
    def assign(self, directions: Tensor) -> None:
        """Take these directions ``(L, d)``, also where the weight is computed from others (a parametrisation)."""
        if parametrize.is_parametrized(self, "weight"):
            setattr(self, "weight", directions.to(self.weight))  # noqa: B010 - goes through the parametrisation
        else:
            self.weight.copy_(directions)

    def directions(self) -> Tensor:
        """Give the unit directions, ``(L, d)``, in float32 at least."""
        return unit_slices(self.weight, self.dim, working_dtype(self.weight), looks_at_values(None, self.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """Project ``(B, N, d)`` tokens, giving ``(B, L, N)``."""
        return (tokens @ self.directions().to(tokens.dtype).T).transpose(-1, -2)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"dim={self.dim}, slices={self.slices}, init={self.init!r}"
