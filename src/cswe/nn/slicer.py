"""The directions a set is projected on."""

from typing import Literal

import torch
from torch import Tensor, nn

from cswe.ops._inputs import looks_at_values, unit_slices

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
        for name, value in (("dim", dim), ("slices", slices)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"expected {name} ≥ 1 but got {value!r}")
        if init not in ("orthogonal", "normal"):
            raise ValueError(f"expected init 'orthogonal' or 'normal' but got {init!r}")
        self.dim, self.slices, self.init = dim, slices, init
        self.weight = nn.Parameter(torch.empty(slices, dim), requires_grad=trainable)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions anew."""
        if self.init == "normal":
            self.weight.normal_()
        else:
            for block in self.weight.split(self.dim):
                nn.init.orthogonal_(block)
        self.weight.copy_(nn.functional.normalize(self.weight, dim=-1))

    def directions(self) -> Tensor:
        """Give the unit directions, ``(L, d)``, in float32 at least."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return unit_slices(self.weight, self.dim, dtype, looks_at_values(None, self.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """Project ``(B, N, d)`` tokens, giving ``(B, L, N)``."""
        return (tokens @ self.directions().to(tokens.dtype).T).transpose(-1, -2)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"dim={self.dim}, slices={self.slices}, init={self.init!r}"
