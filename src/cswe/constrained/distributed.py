"""Means over the samples of several micro-batches and of several processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cswe.constrained._checks import number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Total:
    """The sums behind a sample-weighted mean, of one constraint."""

    weighted: Tensor | None = None
    count: float = 0.0

    def add(self, values: Tensor, count: float) -> None:
        """Add the mean ``values`` of ``count`` samples."""
        if count == 0:
            return  # the mean of an empty batch is NaN, and so would be 0 · NaN
        weighted = values * count
        self.weighted = weighted if self.weighted is None else self.weighted + weighted
        self.count += count

    def mean(self, name: str) -> Tensor:
        """Return the mean over all samples, or say that there are none."""
        if self.weighted is None:
            raise RuntimeError(
                f"step() has no values of constraint {name!r}: no lagrangian(...) was differentiated since "
                "the last step. Call lagrangian(loss, ...).backward() before step(), or step(*inputs) to "
                "evaluate the constraints anew"
            )
        return self.weighted / self.count


def is_parallel(group: "ProcessGroup | None" = None) -> bool:
    """Tell whether there are other processes to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def is_first(group: "ProcessGroup | None" = None) -> bool:
    """Tell whether this process speaks for the others."""
    return not is_parallel(group) or dist.get_rank(group) == 0


def sum_over_ranks(totals: Sequence[Total], names: Sequence[str], group: "ProcessGroup | None" = None) -> list[Total]:
    """Sum the totals of every rank; each rank gets the same, those that had no samples too.

    What every rank has to know before it can take part (the sizes) travels first, so that a disagreement is
    an error everywhere instead of a process that waits for ever.
    """
    if not is_parallel(group):
        return list(totals)
    device = _device(group)
    known = [0 if total.weighted is None else total.weighted.numel() for total in totals]
    unknown = torch.iinfo(torch.int64).max
    widths = [0 if total.weighted is None else total.weighted.element_size() for total in totals]
    facts = torch.tensor([known, [-(size or unknown) for size in known], widths], device=device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, widest = facts.tolist()
    for name, high, low in zip(names, largest, smallest, strict=True):
        if high and high != -low:
            raise ValueError(
                f"expected constraint {name!r} to have as many values on every rank but got {-low} to {high}"
            )
    parts = []
    for total, size in zip(totals, largest, strict=True):
        weighted = torch.zeros(size, device=device) if total.weighted is None else total.weighted
        parts += [torch.tensor([total.count], dtype=torch.float64, device=device), weighted]
    # Counts and values of all constraints in one message; float64 because sums grow with the ranks.
    message = torch.cat([part.to(device).to(torch.float64) for part in parts])
    dist.all_reduce(message, op=dist.ReduceOp.SUM, group=group)
    summed = []
    for total, size, width in zip(totals, largest, widest, strict=True):
        count, weighted, message = message[0].item(), message[1 : 1 + size], message[1 + size :]
        # In one precision everywhere, or ranks without samples of their own would round differently.
        weighted = weighted.to(torch.float64 if width == 8 else torch.float32)
        if total.weighted is not None:
            weighted = weighted.to(total.weighted.device)
        summed.append(Total(weighted, count) if size else Total())
    return summed


def rank_weight(count: float, group: "ProcessGroup | None" = None) -> float:
    """Return what to multiply a rank's loss with when ranks have batches of different sizes.

    ``DistributedDataParallel`` averages gradients over ranks with equal weights. With ``n_r`` samples on
    rank r of R that is the gradient of the mean over all samples only if every ``n_r`` is the same;
    otherwise multiply the loss (the Lagrangian, so that the constraints are weighted alike) by ``R n_r /
    sum(n)``. Every rank has to call it. Without ``torch.distributed`` it is 1.

    Parameters
    ----------
    count
        The number of samples on this rank.
    group
        The process group; the default one if None.

    Examples
    --------
    >>> rank_weight(32)
    1.0
    """
    own = number(count, "count", least=0)
    if not is_parallel(group):
        return 1.0
    every = torch.tensor(own, dtype=torch.float64, device=_device(group))
    dist.all_reduce(every, group=group)
    if every.item() == 0:
        raise ValueError("expected count to be positive on one rank at least but got 0 on every rank")
    return dist.get_world_size(group) * own / every.item()


def _device(group: "ProcessGroup | None") -> torch.device:
    # The values are few: they travel through host memory where the backend takes it. NCCL alone does not.
    devices = [pair.split(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
