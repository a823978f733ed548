"""The definition: relaxed sorting matrices written out, differentiated by torch. Time and memory B·L·N²."""

import torch
from torch import Tensor

from cswe.ops.kernels.coupled import CoupledTargets
from cswe.ops.kernels.problem import Problem


def value(problem: Problem) -> Tensor:
    """Give S, ``(B, L)``; torch differentiates it with respect to everything."""
    count = problem.points.shape[2]
    distance = (problem.points.unsqueeze(-1) - problem.points.unsqueeze(-2)).abs()
    if problem.lengths is not None:
        distance = distance.masked_fill((problem.present() == 0).unsqueeze(-2), torch.inf)
    matrix = torch.softmax(-distance / problem.tau, dim=-1)  # columns in rank order
    vectors = problem.tokens.to(problem.points.dtype) - problem.centre
    rows = torch.arange(problem.tokens.shape[0], device=problem.order.device).reshape(-1, 1, 1)
    sorted_vectors = vectors[rows, problem.order]
    sorted_squares = problem.squares[rows, problem.order]
    coupled = CoupledTargets(problem).rows(0, count)
    squares = ((matrix @ sorted_squares.unsqueeze(-1)).squeeze(-1) * problem.rank_mass()).sum(-1)
    return squares - 2 * ((matrix @ sorted_vectors) * coupled).sum((-1, -2))
