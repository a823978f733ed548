"""The paper's Algorithm 1 on measures: slices that minimise an objective under SWGG bounds, for given pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cswe.constrained import Constraint, Fraction, PrimalDual
from cswe.nn.slicer import Slicer
from cswe.ops import LapSum, SoftSort, swgg
from cswe.ops._inputs import check_points, check_slices, whole


@dataclass(frozen=True)
class LearnedSlices:
    """What :func:`learn_slices` found, and how.

    Attributes
    ----------
    slices
        Θ, unit rows ``(L, d)``.
    duals, slacks
        λ and s, one for each constraint.
    values
        The relaxed D of each constraint at the end.
    bound
        ε, one for each constraint.
    record
        Per step, ``objective`` ``(T,)``, and ``slices`` ``(T, L, d)``, ``values``, ``slacks``, ``duals`` ``(T, K)``.
    """

    slices: Tensor
    duals: Tensor
    slacks: Tensor
    values: Tensor
    bound: Tensor
    record: dict[str, Tensor]


def learn_slices(
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    objective: Callable[[Tensor], Tensor],
    slices: int | Tensor,
    bound: float | Tensor | Fraction,
    slack: float | None = None,
    *,
    per: Literal["mean", "pair"] = "mean",
    relaxation: SoftSort | LapSum | None = None,
    steps: int = 1000,
    lr: float = 0.05,
    dual_lr: float = 0.05,
    slack_lr: float | None = None,
    seed: int = 0,
) -> LearnedSlices:
    r"""Minimise an objective of the slices while each slice's plan stays good in the whole space.

    .. math:: \min_{Θ,\, s ≥ 0} f(Θ) + \frac{α}{2} ‖s‖² \quad \text{s.t.} \quad D(μ, ν; θ_l) ≤ ε_l + s_l

    by primal descent on Θ (rows stay on the sphere), then slack, then dual ascent.

    Parameters
    ----------
    x, y
        Points ``(N, d)`` and ``(M, d)`` of one pair, or lists of such for several pairs; sizes may differ.
    objective
        f: takes the unit slices ``(L, d)``, returns a scalar that torch can differentiate.
    slices
        Number L of slices, or where they start, ``(L, d)``.
    bound
        ε: a number, one for each constraint, or a ``Fraction`` of the level at the start.
    slack
        α, the price of slack; ``None``: no slack, the bound is strict.
    per
        With several pairs: bound the ``"mean"`` over the pairs per slice, or every ``"pair"`` by itself (then there are
        pairs × L constraints, pair by pair).
    relaxation
        How sorting is relaxed; by default ``SoftSort(0.1, relative=True)``.
    steps, lr, dual_lr, slack_lr
        Number of steps and rates; ``slack_lr`` is ``dual_lr`` by default.
    seed
        For the directions, where only their number is given.

    Returns
    -------
    LearnedSlices
        Θ, λ, s and the record of every step.

    Examples
    --------
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([3.0, 0.3])
    >>> found = learn_slices(x, x + 1, lambda theta: theta[:, 0].square().sum(), slices=1, bound=2.0, steps=200)
    >>> found.slices.shape, bool(found.values <= 2.05)
    (torch.Size([1, 2]), True)
    """
    pairs = _pairs(x, y)
    if not callable(objective):
        raise TypeError(f"expected objective to be a function of the slices but got {type(objective).__name__}")
    if per not in ("mean", "pair"):
        raise ValueError(f"expected per 'mean' or 'pair' but got {per!r}")
    steps = whole(steps, "steps")
    width = pairs[0][0].shape[-1]
    dtype = torch.promote_types(pairs[0][0].dtype, torch.float32)
    if isinstance(slices, Tensor):
        check_slices(slices, width, validate=True)
        slicer = Slicer(width, slices.shape[0])
        start = slices
    else:
        # On the CPU, whatever the default device: its generator alone is seeded, and put back.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            slicer = Slicer(width, slices)
        start = slicer.weight
    slicer = slicer.to(device=pairs[0][0].device, dtype=dtype)
    with torch.no_grad():
        slicer.weight.copy_(start)
    soft = SoftSort(0.1, relative=True) if relaxation is None else relaxation

    def distances() -> Tensor:
        theta = slicer.directions()
        rows = torch.stack([swgg(a.unsqueeze(0), b, theta, soft)[0] for a, b in pairs])
        return rows.mean(0) if per == "mean" else rows.flatten()

    duals = PrimalDual(
        Constraint(distances, bound, name="swgg"),
        lr=dual_lr,
        slack_lr=None if slack is None else (dual_lr if slack_lr is None else slack_lr),
        slack_weight=slack,
    )
    optimizer = torch.optim.SGD(slicer.parameters(), lr=lr)
    history: dict[str, list[Tensor]] = {"objective": [], "slices": [], "values": [], "slacks": [], "duals": []}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = objective(slicer.directions())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("expected the objective to return a scalar tensor")
        duals.lagrangian(loss.reshape(())).backward()
        optimizer.step()
        with torch.no_grad():
            # The length of a slice has no meaning, but it divides its gradient: keep the step size what it says.
            slicer.weight.copy_(slicer.directions())
        duals.step()
        state = duals.record()["swgg"]
        for key, value in (
            ("objective", loss.detach().reshape(())),
            ("slices", slicer.weight.detach().clone()),
            ("values", state["values"]),
            ("slacks", state["slack"]),
            ("duals", state["dual"]),
        ):
            history[key].append(value)
    with torch.no_grad():
        values = distances()
    state = duals.record()["swgg"]
    if "bound" not in state:
        raise ValueError(f"{steps} steps were too few to measure the level for the bound {bound!r}")
    return LearnedSlices(
        slices=slicer.directions().detach(),
        duals=state["dual"],
        slacks=state["slack"],
        values=values,
        bound=state["bound"],
        record={key: torch.stack(rows) for key, rows in history.items()},
    )


def _pairs(x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    left = [x] if isinstance(x, Tensor) else list(x)
    right = [y] if isinstance(y, Tensor) else list(y)
    if len(left) != len(right) or not left:
        raise ValueError(f"expected as many point sets in x as in y but got {len(left)} and {len(right)}")
    width = left[0].shape[-1] if isinstance(left[0], Tensor) and left[0].ndim else None
    for name, points in (("x", left), ("y", right)):
        for one in points:
            check_points(one, name, (2,), width)
    return list(zip(left, right, strict=True))
