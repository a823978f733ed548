"""The poolings to compare with, behind the same interface."""

import torch
from torch import Tensor, nn

from cswe.nn._door import enter, result_dtype
from cswe.nn.ragged import Sets, as_padded, is_ragged, map_groups, without_mask
from cswe.nn.token_weights import TokenWeights
from cswe.ops._inputs import measure_weights, whole, without_autocast, working_dtype


class Pool(nn.Module):
    """A pooling of sets ``(B, N, dim)`` to vectors ``(B, out_dim)``."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.dim, self.out_dim = whole(dim, "dim"), out_dim

    def reset_parameters(self) -> None:
        """Draw all parameters anew; by default there are none."""

    def forward(self, tokens: Sets, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Pool sets of vectors.

        Parameters
        ----------
        tokens
            ``(B, N, dim)``, ``(values, ptr)``, or a nested tensor, as in :class:`~cswe.SWEPool`.
        mask
            ``(B, N)``, bool or 0/1, True = valid. What is masked is never read.
        weights
            Masses ``(B, N)``.

        Returns
        -------
        Tensor
            ``(B, out_dim)``.
        """
        if is_ragged(tokens):
            return map_groups(self, without_mask(tokens, mask), weights)
        tokens = as_padded(tokens)
        vector = self._enter_and_pool(tokens, mask, weights)
        return vector.to(result_dtype(tokens, next(self.parameters(), tokens)))

    @without_autocast
    def _enter_and_pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        return self._pool(*enter(tokens, mask, weights, self.dim, working_dtype(tokens, *self.parameters())))

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        """Pool what has been checked, with zeros under the mask."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"dim={self.dim}, out_dim={self.out_dim}"


class MeanPool(Pool):
    """The mean of the tokens (global average pooling), weighted if weights are given.

    Examples
    --------
    >>> MeanPool(dim=2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[2., 3.]])
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        masses = measure_weights(tokens, mask, weights, tokens.dtype)
        return tokens.mean(1) if masses is None else (masses.unsqueeze(1) @ tokens).squeeze(1)


class SumPool(Pool):
    """The sum of the tokens, weighted if weights are given: size counts.

    Examples
    --------
    >>> SumPool(dim=2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[4., 6.]])
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        return tokens.sum(1) if weights is None else (weights.unsqueeze(1) @ tokens).squeeze(1)


class MaxPool(Pool):
    """The largest value of every coordinate. Weights only say which tokens count: those above zero.

    Examples
    --------
    >>> MaxPool(dim=2)(torch.tensor([[[1.0, 4.0], [3.0, 2.0]]]))
    tensor([[3., 4.]])
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        if weights is not None:
            mask = weights > 0  # already zero under the mask
        if mask is not None:
            tokens = tokens.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return tokens.amax(1)


class CLSPool(Pool):
    """The first valid token: the CLS token, where a backbone puts it first. Weights have no say.

    Examples
    --------
    >>> CLSPool(dim=2)(torch.tensor([[[1.0, 4.0], [3.0, 2.0]]]), mask=torch.tensor([[0, 1]]))
    tensor([[3., 2.]])
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        if mask is None:
            return tokens[:, 0]
        first = mask.to(torch.uint8).argmax(1).reshape(-1, 1, 1).expand(-1, 1, self.dim)
        return tokens.gather(1, first).squeeze(1)


class AttentionPool(Pool):
    """Learned queries: a softmax over the tokens and a weighted mean for each query.

    The weightings are those of :class:`~cswe.nn.TokenWeights`, so ``SWEPool`` with the readout ``Moments(1)``
    contains this pooling.

    Parameters
    ----------
    dim
        Dimension of the tokens.
    queries
        Number of weighted means, each of size ``dim`` (or ``values``).
    values
        Project the tokens to this many dimensions first; by default they are averaged as they are.
    normalize_keys
        See :class:`~cswe.nn.TokenWeights`.

    Examples
    --------
    >>> pool = AttentionPool(dim=8, queries=3)
    >>> pool(torch.randn(4, 7, 8)).shape
    torch.Size([4, 24])
    """

    def __init__(self, dim: int, queries: int = 1, values: int | None = None, normalize_keys: bool = False) -> None:
        dim, queries = whole(dim, "dim"), whole(queries, "queries")
        values = None if values is None else whole(values, "values")
        super().__init__(dim, queries * (dim if values is None else values))
        self.token_weights = TokenWeights(dim, queries, normalize_keys)
        self.value = None if values is None else nn.Linear(dim, values)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.token_weights.reset_parameters()
        if self.value is not None:
            self.value.reset_parameters()

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        vector: Tensor = self.token_weights(tokens, mask, weights) @ tokens  # (B, H, d)
        if self.value is not None:
            # Linear in the tokens, and the masses sum to one: projecting the means is the same, and cheaper.
            weight, bias = self.value.weight.to(vector.dtype), self.value.bias.to(vector.dtype)
            vector = nn.functional.linear(vector, weight, bias)
        return vector.flatten(1)  # one query after the other
