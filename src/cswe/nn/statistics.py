"""What a pool can learn from data before training: scale, principal directions, quantiles."""

from typing import Any

import torch
from torch import Tensor, nn

from cswe.ops._inputs import looks_at_values
from cswe.ops._transforms import is_transforming


class TokenStatistics(nn.Module):
    """Subtract the tokens' mean and divide by their common spread, both kept as buffers.

    One spread for all dimensions: directions keep their relative importance. A spread of 0 is one that was not
    measured: whether it was travels with the buffers, however they are loaded, copied or averaged.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("spread", torch.zeros(()))
        self._measured = False  # so that an accelerator need not be asked at every step

    @torch.no_grad()
    def measure(self, tokens: Tensor) -> Tensor:
        """Measure tokens ``(T, d)`` and give them standardised."""
        mean = tokens.mean(0)
        spread = (tokens - mean).square().mean().sqrt()
        if not bool(spread > 0):
            raise ValueError("the tokens given to measure their spread are all equal")
        self.mean.copy_(mean)
        self.spread.copy_(spread)
        self._measured = True
        return (tokens - mean) / spread

    def forward(self, tokens: Tensor) -> Tensor:
        """Standardise tokens ``(…, d)``."""
        self._check_measured()
        return (tokens - self.mean.to(tokens.dtype)) / self.spread.to(tokens.dtype)

    def shift_and_factor(self) -> tuple[Tensor, Tensor]:
        """Give what is subtracted from tokens, ``(d,)``, and what they are multiplied by then, both in float32."""
        self._check_measured()
        return self.mean.float(), self.spread.float().reciprocal()

    def _check_measured(self) -> None:
        if not self._measured and looks_at_values(True, self.spread) and not is_transforming():
            self._look()  # it may have come by a copy into the buffers, which nobody tells of
        if not self._measured:
            raise RuntimeError(
                "standardize=True needs statistics: call pool.init_from(tokens, mask) on training tokens first"
            )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._look()

    def _look(self) -> None:
        self._measured = not self.spread.is_meta and bool(self.spread > 0)


def principal_start(tokens: Tensor, slices: int, points: int | None, seed: int) -> tuple[Tensor, Tensor | None]:
    """Give L directions and M reference points that fit tokens ``(T, d)``.

    The directions are principal ones, followed by random ones where L > d. Along every principal direction the
    reference has the quantiles of the tokens, so that it covers them; which quantiles meet in one point is drawn.
    """
    count, dim = tokens.shape
    generator = torch.Generator(device="cpu").manual_seed(seed)
    mean = tokens.mean(0)
    centred = tokens - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred / count)
    principal = vectors.T.flip(0)  # descending variance
    extra = torch.randn(max(0, slices - dim), dim, generator=generator, dtype=torch.float64, device="cpu").to(tokens)
    directions = torch.cat([principal[:slices], nn.functional.normalize(extra, dim=-1)])
    if points is None:
        return directions, None
    levels = (torch.arange(points, dtype=torch.float64, device=tokens.device) + 0.5) / points
    coordinates = torch.quantile(_sample(centred @ principal.T, generator), levels, dim=0)  # (M, d)
    mixed = torch.stack([torch.randperm(points, generator=generator, device="cpu") for _ in range(dim)], dim=1)
    return directions, mean + coordinates.gather(0, mixed.to(tokens.device)) @ principal


def _sample(rows: Tensor, generator: torch.Generator, most: int = 100_000) -> Tensor:
    """Take some rows where there are too many: torch.quantile has a size limit, and more would not be seen."""
    if rows.shape[0] <= most:
        return rows
    return rows[torch.randperm(rows.shape[0], generator=generator, device="cpu")[:most].to(rows.device)]
