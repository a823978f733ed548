"""The definition: relaxed sorting matrices written out, differentiated by torch. Time and memory B·L·N²."""

import torch
from torch import Tensor

from cswe.ops.kernels.coupled import CoupledTargets
from cswe.ops.kernels.problem import Problem


def value(problem: Problem) -> Tensor:
    """Give S, ``(B, L)``; torch differentiates it with respect to everything."""
    matrix = _matrix(problem)
    sorted_squares = problem.squares[_samples(problem), problem.order]
    coupled = CoupledTargets(problem).rows(0, problem.points.shape[2])
    squares = ((matrix @ sorted_squares.unsqueeze(-1)).squeeze(-1) * problem.rank_mass()).sum(-1)
    return squares - 2 * ((matrix @ _sorted_vectors(problem)) * coupled).sum((-1, -2))


def ranks(problem: Problem) -> Tensor:
    """Give the softly sorted tokens, ``(B, L, N, d)``."""
    return _matrix(problem) @ _sorted_vectors(problem)


def _matrix(problem: Problem) -> Tensor:
    """Write the soft sorts out, ``(B, L, N, N)``, columns in rank order."""
    distance = (problem.points.unsqueeze(-1) - problem.points.unsqueeze(-2)).abs()
    if problem.lengths is not None:
        distance = distance.masked_fill((problem.present() == 0).unsqueeze(-2), torch.inf)
    return torch.softmax(-distance / problem.tau, dim=-1)


def _sorted_vectors(problem: Problem) -> Tensor:
    vectors = problem.tokens.to(problem.points.dtype) - problem.centre
    rows: Tensor = vectors[_samples(problem), problem.order]
    return rows


def _samples(problem: Problem) -> Tensor:
    return torch.arange(problem.tokens.shape[0], device=problem.order.device).reshape(-1, 1, 1)
