"""Several processes that train one model, as `torchrun` and `accelerate launch` start them.

Every process sees the same batches and takes its rows of each. Gradients are averaged in one message: the model is a
pool and a head, small beside the tokens, so there is nothing to hide behind the backward pass.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from cswe._devices import usable_device
from cswe.tokens import Batch
from cswe.training.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """Join the processes that a launcher started; alone if there was none."""
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or not dist.is_available():
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def rows(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch."""
        if self.world == 1:
            return batch

        def own(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[self.rank :: self.world]

        return replace(
            batch,
            tokens=batch.tokens[self.rank :: self.world],
            index=batch.index[self.rank :: self.world],
            mask=own(batch.mask),
            labels=own(batch.labels),
            weights=own(batch.weights),
            cls=own(batch.cls),
        )

    def average(self, tensors: Iterable[Tensor | None]) -> None:
        """Average tensors over all processes, in place."""
        present = [tensor for tensor in tensors if tensor is not None]
        if self.world == 1 or not present:
            return
        device = present[0].device
        flat = torch.cat([tensor.to(device).flatten() for tensor in present])
        dist.all_reduce(flat)
        flat /= self.world
        for tensor, mean in zip(present, flat.split([tensor.numel() for tensor in present]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def collect(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return what every process has under the same names, in their order, on all of them."""
        if self.world == 1:
            return [tensors]
        device = next(iter(tensors.values())).device
        # In the widest type there is, so that nothing is rounded.
        flat = torch.cat([tensor.to(device, torch.float64).flatten() for tensor in tensors.values()])
        every = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(every, flat)
        sizes = [tensor.numel() for tensor in tensors.values()]
        return [
            {
                name: part.view_as(own).to(own.device, own.dtype, copy=True)
                for (name, own), part in zip(tensors.items(), parts.split(sizes), strict=True)
            }
            for parts in every
        ]

    def agree(self, value: float) -> float:
        """Return the first process's number on all of them: decisions must be the same everywhere."""
        if self.world == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64)
        if "gloo" not in str(dist.get_backend_config()):
            told = told.cuda()
        dist.broadcast(told, src=0)
        return float(told)


def speaks() -> bool:
    """Say whether this process speaks to whoever started it: it is the only one, or the first of a launcher's."""
    return int(os.environ.get("WORLD_SIZE", "1")) <= 1 or os.environ.get("RANK", "0") == "0"


def default_device(name: str | None = None) -> torch.device:
    """Return the device asked for, or a GPU if there is one: this process's own, under a launcher."""
    try:
        return usable_device(name)
    except ValueError as error:
        raise UserError(str(error)) from None
