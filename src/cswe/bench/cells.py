"""What is measured: settings, and the operations that run on them."""

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cswe.ops import LapSum, SoftSort, l_moments, swgg
from cswe.ops.kernels import backend

Operation = Callable[[], Tensor]
MOMENTS = 4
"""L-moments (or frequencies, of the rival) per slice."""


@dataclass(frozen=True)
class Setting:
    """Sizes of one measurement: B samples of N tokens of dimension d, L slices, as many reference points as tokens."""

    batch: int
    tokens: int
    dim: int
    slices: int
    tau: float = 0.01
    dtype: str = "float32"
    shortest: int | None = None
    """Ragged: lengths spread evenly from this to ``tokens``."""

    @property
    def label(self) -> str:
        """Say what it is in a few words."""
        count = f"{self.shortest}–{self.tokens}" if self.shortest else f"{self.tokens}"
        half = "" if self.dtype == "float32" else f", {self.dtype} tokens"
        return f"{self.batch}, {count}, {self.dim}, {self.slices}, {self.tau:g}{half}"

    def dense_bytes(self) -> int:
        """Estimate what the written-out form needs: matrices and gathered rows, forward and backward."""
        per_slice = self.tokens * (self.tokens + self.dim)
        return int(3.5 * 4 * self.batch * self.slices * per_slice)

    def as_dict(self) -> dict[str, Any]:
        """Give the sizes as plain data."""
        return asdict(self)


def settings(device: str, quick: bool) -> list[Setting]:
    """Choose the settings for a kind of device."""
    if quick:
        return [Setting(8, 64, 32, 4), Setting(8, 64, 32, 4, tau=10.0)]
    if device == "cpu":
        paper = Setting(32, 196, 192, 16)
        return [
            paper,
            replace(paper, tau=10.0),
            replace(paper, dtype="float16"),
            Setting(16, 512, 256, 8, tau=0.001),
            Setting(8, 100, 1280, 16),
            Setting(8, 1024, 320, 8, shortest=50),
        ]
    paper = Setting(1024, 196, 192, 64)
    large = [replace(paper, tau=tau, dtype=dtype) for dtype in ("float16", "float32") for tau in (0.01, 10.0)]
    return [
        *large,
        Setting(128, 512, 256, 32, tau=0.001),
        Setting(32, 100, 1280, 64),
        Setting(32, 1024, 320, 16, shortest=50),
    ]


def lapsum_settings(device: str, quick: bool) -> list[Setting]:
    """Choose the settings for LapSum, whose compiled way is of the CPU; the temperature is its α."""
    if device != "cpu":
        return []
    if quick:
        return [Setting(8, 64, 32, 4, tau=0.1)]
    paper = Setting(32, 196, 192, 16)
    return [paper, replace(paper, tau=1.0), Setting(16, 512, 256, 8, tau=0.1)]


def growth(device: str, quick: bool) -> list[Setting]:
    """Choose the settings of the growth curve: N alone changes."""
    sizes = [2**k for k in range(8, 15)]
    if quick:
        return [Setting(1, n, 16, 2) for n in sizes[:3]]
    return [Setting(2, n, 64, 4) if device == "cpu" else Setting(8, n, 64, 32) for n in sizes]


def relaxed(setting: Setting, way: str, device: str) -> Operation:
    """Prepare forward and backward of the relaxed SWGG, to slices and reference, computed in one way."""
    return _forward_and_backward(setting, SoftSort(setting.tau), way, device)


def lapsum(setting: Setting, way: str, device: str) -> Operation:
    """Prepare the same under LapSum."""
    return _forward_and_backward(setting, LapSum(setting.tau), way, device)


def _forward_and_backward(setting: Setting, relaxation: SoftSort | LapSum, way: str, device: str) -> Operation:
    x, y, slices, mask = _inputs(setting, device)
    y.requires_grad_()
    slices.requires_grad_()

    def run() -> Tensor:
        y.grad = slices.grad = None
        with backend(way):
            distance = swgg(x, y, slices, relaxation, x_mask=mask, validate=False)
            distance.sum().backward()
        return distance.detach()

    return run


def hard(setting: Setting, who: str, device: str) -> Operation:
    """Prepare the forward pass of the hard SWGG: ours, or POT's 1-D plans in a loop over samples and slices."""
    x, y, slices, mask = _inputs(setting, device)
    if who != "pot":
        return lambda: _without_grad(lambda: swgg(x, y, slices, x_mask=mask, validate=False))
    import ot

    def one(sample: Tensor, theta: Tensor) -> float:
        theta = theta / theta.norm()
        plan = ot.emd_1d((sample @ theta).numpy(), (y @ theta).numpy(), dense=False)
        cost = (sample[plan.row] - y[plan.col]).square().sum(-1)
        return float((cost * torch.from_numpy(plan.data)).sum().sqrt())

    return lambda: torch.tensor([[one(sample, theta) for theta in slices] for sample in x])


def moments(setting: Setting, who: str, device: str) -> Operation:
    """Prepare the forward pass of an embedding, for inference: our L-moments, or fswlib's Fourier coefficients.

    Both project on L slices, sort, and reduce every slice to the same number of coefficients.
    """
    x, _, slices, _ = _inputs(setting, device)
    if who != "fswlib":
        directions = torch.nn.functional.normalize(slices, dim=-1)
        return lambda: _without_grad(lambda: l_moments((x @ directions.T).transpose(-1, -2), MOMENTS, validate=False))
    from fswlib import FSWEmbedding

    module = FSWEmbedding(setting.dim, num_slices=setting.slices, num_frequencies=MOMENTS, device=device)
    return lambda: _without_grad(lambda: module(x))


OPERATIONS: dict[str, Callable[[Setting, str, str], Operation]] = {
    "relaxed": relaxed,
    "lapsum": lapsum,
    "hard": hard,
    "moments": moments,
}


def ways(device: str) -> list[str]:
    """List the ways to compute the relaxed SWGG on this machine, the yardstick first."""
    compiled = {"cpu": "numba", "cuda": "triton"}[device]
    return ["dense", "scan", *([device] if importlib.util.find_spec(compiled) else [])]


def rivals(device: str, quick: bool) -> list[tuple[str, str, Setting]]:
    """List the comparisons with other libraries: operation, rival, setting. POT's loop is of the CPU."""
    sizes = Setting(8, 64, 32, 4) if quick else Setting(32, 196, 192, 16)
    if device == "cuda" and not quick:
        sizes = Setting(1024, 196, 192, 64)
    found = [("moments", "fswlib", sizes)] if importlib.util.find_spec("fswlib") else []
    if device == "cpu" and importlib.util.find_spec("ot"):
        found.append(("hard", "pot", sizes))
    return found


def _inputs(setting: Setting, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(setting.batch, setting.tokens, setting.dim, generator=generator)
    y = torch.randn(setting.tokens, setting.dim, generator=generator)
    slices = torch.randn(setting.slices, setting.dim, generator=generator)
    mask = None
    if setting.shortest:
        lengths = torch.linspace(setting.shortest, setting.tokens, setting.batch).long()
        mask = (torch.arange(setting.tokens) < lengths.unsqueeze(-1)).to(device)
    return x.to(device, getattr(torch, setting.dtype)), y.to(device), slices.to(device), mask


def _without_grad(run: Operation) -> Tensor:
    with torch.no_grad():
        return run()
