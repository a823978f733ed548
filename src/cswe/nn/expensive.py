"""Two poolings to measure ourselves against that cost more: a set transformer's, and transport in the full space."""

import torch
from torch import Tensor, nn

from cswe.nn.baselines import Pool
from cswe.ops._inputs import whole


class PMAPool(Pool):
    """Pooling by multihead attention, of the Set Transformer [1]_: learned seeds attend to the tokens.

    Parameters
    ----------
    dim
        Dimension of the tokens.
    seeds
        Number of seed vectors; the result has ``seeds · dim`` numbers.
    heads
        Attention heads; must divide ``dim``.

    References
    ----------
    .. [1] Lee, Lee, Kim, Kosiorek, Choi, Teh. Set Transformer: a framework for attention-based permutation-invariant
       neural networks. ICML 2019.

    Examples
    --------
    >>> PMAPool(dim=8, seeds=2, heads=4)(torch.randn(3, 7, 8)).shape
    torch.Size([3, 16])
    """

    def __init__(self, dim: int, seeds: int = 1, heads: int = 4) -> None:
        dim, seeds = whole(dim, "dim"), whole(seeds, "seeds")
        if dim % whole(heads, "heads"):
            raise ValueError(f"expected a number of heads that divides dim = {dim} but got {heads}")
        super().__init__(dim, seeds * dim)
        self.heads = heads
        self.seeds = nn.Parameter(torch.empty(seeds, dim))
        self.query, self.key, self.value, self.mix = (nn.Linear(dim, dim) for _ in range(4))
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        nn.init.xavier_uniform_(self.seeds)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        nn.init.xavier_uniform_(self.seeds)
        for module in self.children():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        batch = tokens.shape[0]
        query = _linear(self.query, self.seeds.to(tokens.dtype)).expand(batch, -1, -1)
        key, value = _linear(self.key, tokens), _linear(self.value, tokens)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        bias = _log_masses(mask, weights, tokens)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        hidden = _norm(self.first_norm, query + attended)
        result = _norm(self.second_norm, hidden + torch.relu(_linear(self.mix, hidden)))
        return result.flatten(1)


class WassersteinPool(Pool):
    r"""The linear Wasserstein embedding in the full space [1]_: how far a plan moves each reference point.

    .. math:: z_i[j] = \frac{1}{q_j} Σ_k γ_{kj} x_{ik} - u_j

    with γ the entropic plan between sample and reference. ``M·d`` numbers; time B·N·M per Sinkhorn step. The
    expensive yardstick for everything sliced: SWE approximates it by one-dimensional plans.

    Parameters
    ----------
    dim
        Dimension of the tokens.
    points
        Number M of reference points, learned.
    blur
        Entropic regularisation, relative to the set's mean squared distance from the reference.
    iterations
        Sinkhorn steps, in the log domain.

    References
    ----------
    .. [1] Kolouri, Naderializadeh, Rohde, Hoffmann. Wasserstein embedding for graph learning. ICLR 2021.

    Examples
    --------
    >>> WassersteinPool(dim=8, points=5)(torch.randn(3, 7, 8)).shape
    torch.Size([3, 40])
    """

    def __init__(self, dim: int, points: int, blur: float = 0.05, iterations: int = 50) -> None:
        dim, points = whole(dim, "dim"), whole(points, "points")
        if not blur > 0:
            raise ValueError(f"expected blur > 0 but got {blur}")
        iterations = whole(iterations, "iterations")
        super().__init__(dim, points * dim)
        self.points, self.blur, self.iterations = points, blur, iterations
        self.reference = nn.Parameter(torch.randn(points, dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the reference anew."""
        self.reference.normal_()

    def _pool(self, tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        reference = self.reference.to(tokens.dtype)
        plan = self.plan(tokens, mask, weights)
        # Columns are normalised by their own sums, so that the last Sinkhorn step's error does not scale the points.
        images = plan.transpose(-1, -2) @ tokens / plan.sum(-2).unsqueeze(-1)
        return (images - reference).flatten(1)

    def plan(self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Give the entropic plans between samples and reference, ``(B, N, M)``."""
        reference = self.reference.to(tokens.dtype)
        # One way to compute for every size, so that an exported graph holds for all of them.
        mode = "donot_use_mm_for_euclid_dist"
        costs = torch.cdist(tokens, reference.expand(tokens.shape[0], -1, -1), compute_mode=mode).square()
        log_mass = _log_masses(mask, weights, tokens)
        log_rows = (
            tokens.new_zeros(tokens.shape[:2]) if log_mass is None else log_mass.reshape(tokens.shape[:2])
        ).log_softmax(-1)
        present = log_rows > -torch.inf
        # Set by set: a vector must not depend on what else is in the batch.
        total = torch.where(present.unsqueeze(-1), costs.detach(), 0.0).sum((1, 2))
        scale = self.blur * total / (present.sum(-1) * self.points)
        scale = torch.where(scale > 0, scale, 1.0)  # 0 where all tokens lie on all reference points
        kernel = -costs / scale.reshape(-1, 1, 1)
        log_cols = -torch.log(torch.tensor(float(self.points), dtype=tokens.dtype, device=tokens.device))
        f, g = torch.zeros_like(log_rows), torch.zeros_like(costs[:, 0])
        rows = torch.where(present, log_rows, 0.0)
        for _ in range(self.iterations):
            f = rows - torch.logsumexp(kernel + g.unsqueeze(1), dim=-1)
            g = log_cols - torch.logsumexp(
                (kernel + f.unsqueeze(-1)).masked_fill(~present.unsqueeze(-1), -torch.inf), dim=1
            )
        plan = torch.exp(kernel + f.unsqueeze(-1) + g.unsqueeze(1))
        return torch.where(present.unsqueeze(-1), plan, 0.0)


def _linear(layer: nn.Linear, values: Tensor) -> Tensor:
    return nn.functional.linear(values, layer.weight.to(values.dtype), layer.bias.to(values.dtype))


def _norm(layer: nn.LayerNorm, values: Tensor) -> Tensor:
    weight, bias = layer.weight.to(values.dtype), layer.bias.to(values.dtype)
    return nn.functional.layer_norm(values, values.shape[-1:], weight, bias, layer.eps)


def _log_masses(mask: Tensor | None, weights: Tensor | None, like: Tensor) -> Tensor | None:
    """Give log masses to add to scores, ``(B, 1, 1, N)``, −∞ where a token does not count; ``None``: all equal."""
    if weights is not None:
        logs = torch.where(weights > 0, torch.where(weights > 0, weights, 1.0).log(), -torch.inf)
    elif mask is not None:
        logs = torch.where(mask, 0.0, -torch.inf)
    else:
        return None
    return logs.to(like.dtype)[:, None, None, :]
