"""What the checks of the Triton kernels share: how far apart results are, and what they are made from."""

import math

import torch

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def error(found, expected, least=0.0):
    """Relative, in norm; ``least``: the size below which a result is zero but for rounding."""
    found, expected = found.detach().double(), expected.detach().double()
    size = max(float(expected.norm()), least)
    result = float((found - expected).norm()) / size if size > 0 else float(found.norm())
    return math.inf if math.isnan(result) else result  # max() would pass over what is not a number


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()
