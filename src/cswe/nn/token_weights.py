"""Learned masses of tokens."""

from math import sqrt

import torch
from torch import Tensor, nn

from cswe.ops._inputs import whole


class TokenWeights(nn.Module):
    r"""Give every token H learned masses: :math:`p_h = \mathrm{softmax}_n\big(q_h · W x_n · 4/\sqrt d\big)`.

    Two factors rather than one linear score, and a scale that lets scores leave zero quickly: with scores near zero
    the masses are uniform and learn slowly. (A bias would cancel in the softmax.)

    Parameters
    ----------
    dim
        Dimension d of the tokens.
    weightings
        Number H of weightings.
    normalize_keys
        Divide every token by its own root mean square for the scores, so that they see directions alone. Where a few
        tokens are many times as long as the others, inner products would put all mass on those.

    Examples
    --------
    >>> masses = TokenWeights(dim=3, weightings=2)(torch.randn(4, 7, 3))
    >>> masses.shape, bool(torch.allclose(masses.sum(-1), torch.ones(4, 2)))
    (torch.Size([4, 2, 7]), True)
    """

    def __init__(self, dim: int, weightings: int, normalize_keys: bool = False) -> None:
        super().__init__()
        dim, weightings = whole(dim, "dim"), whole(weightings, "weightings")
        self.dim, self.weightings, self.normalize_keys = dim, weightings, normalize_keys
        self.key = nn.Linear(dim, dim, bias=False)
        self.query = nn.Parameter(torch.empty(weightings, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.key.reset_parameters()
        # Scores of tokens with unit spread start with a deviation of about one.
        self.query.normal_(std=0.5)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Weigh tokens ``(B, N, d)``.

        Parameters
        ----------
        tokens
            ``(B, N, d)``.
        mask
            ``(B, N)``, boolean, True = valid.
        weights
            Given masses ``(B, N)``, which multiply in.

        Returns
        -------
        Tensor
            Masses that sum to one, ``(B, H, N)``, zero under the mask.
        """
        products = (tokens @ self.directions(tokens.dtype).T).transpose(-1, -2)
        length = torch.linalg.vector_norm(tokens, dim=-1) if self.normalize_keys else None
        return self.masses(products, length, mask, weights)

    def directions(self, dtype: torch.dtype) -> Tensor:
        """Give the vectors ``(H, d)`` whose products with a token decide its masses."""
        # (W x) · q = x · (Wᵀ q): one vector per weighting instead of a d×d product per token.
        return self.query.to(dtype) @ self.key.weight.to(dtype)

    def masses(self, products: Tensor, length: Tensor | None, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        """Give the masses ``(B, H, N)`` by the products with the directions; ``length`` ``(B, N)`` is the tokens'."""
        scores = products * (4 / sqrt(self.dim))
        if self.normalize_keys:
            assert length is not None
            # A token of length 0 has no direction: its score is 0, and so is its gradient.
            factor = torch.where(length > 0, sqrt(self.dim) / torch.where(length > 0, length, 1.0), 0.0)
            scores = scores * factor.unsqueeze(-2)
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
        if weights is not None:
            # In the exponent, so that a small product of both cannot underflow to a set without mass.
            weights = weights.unsqueeze(-2)
            scores = scores.masked_fill(weights == 0, -torch.inf) + torch.where(weights > 0, weights, 1.0).log()
        return torch.softmax(scores, dim=-1)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"dim={self.dim}, weightings={self.weightings}, normalize_keys={self.normalize_keys}"
