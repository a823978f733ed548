"""Optimisers and rates: a rate is a function of the epoch, so that nothing about it needs saving."""

from math import cos, pi

import torch
from torch import nn

from cswe.constrained import Fraction, PrimalDual
from cswe.nn import SWEPool, SWGGBound
from cswe.ops import LapSum, SoftSort
from cswe.training.model import Model
from cswe.training.recipe import Bounding, Optimization


def rate_factor(choice: Optimization, epoch: int) -> float:
    """Return what multiplies the rate of pool and head in an epoch, counted from 0.

    Examples
    --------
    >>> step = Optimization(schedule="step", schedule_every=60, schedule_factor=0.1)
    >>> rate_factor(step, 59), rate_factor(step, 60)
    (1.0, 0.1)
    """
    if choice.schedule == "constant":
        return 1.0
    if choice.schedule == "step":
        return float(choice.schedule_factor ** (epoch // choice.schedule_every))
    period = choice.epochs if choice.schedule == "cosine" else choice.schedule_every
    return (1 + cos(pi * (epoch % period) / period)) / 2


def make_optimizer(model: Model, choice: Optimization) -> torch.optim.Optimizer:
    """Make the optimiser of pool and head; weight decay on the head alone, or on everything."""
    head = [parameter for parameter in model.head.parameters() if parameter.requires_grad]
    pool = [parameter for parameter in model.pool.parameters() if parameter.requires_grad]
    groups = [{"params": head, "weight_decay": choice.weight_decay}]
    if pool:
        groups.append({"params": pool, "weight_decay": choice.weight_decay if choice.decay == "all" else 0.0})
    kind = torch.optim.Adam if choice.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=choice.lr)


def set_rate(optimizer: torch.optim.Optimizer, choice: Optimization, epoch: int) -> float:
    """Set the rate of an epoch, and return it."""
    rate = choice.lr * rate_factor(choice, epoch)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def make_duals(pool: nn.Module, choice: Bounding) -> PrimalDual:
    """Make the primal-dual method that holds a pool's slices to their bound."""
    assert isinstance(pool, SWEPool)
    fraction = choice.bound_scale == "fraction"
    kind = SoftSort if choice.relaxation == "softsort" else LapSum
    bound = SWGGBound(
        pool,
        bound=Fraction(choice.bound, choice.bound_batches) if fraction else choice.bound,
        relaxation=kind(choice.temperature, relative=choice.temperature_scale == "relative"),
        wrt=choice.wrt,
        dual_on=choice.dual_on,
    )
    return PrimalDual(
        bound,
        lr=choice.dual_lr,
        slack_lr=None if choice.slack_weight is None else choice.slack_lr,
        slack_weight=choice.slack_weight,
        slack_optimizer=choice.slack_optimizer,
        schedule=lambda epoch: choice.dual_factor ** (epoch // choice.dual_every),
        slack_schedule=lambda epoch: choice.slack_factor ** (epoch // choice.slack_every),
        patience=choice.patience,
        look_every=None,  # the training loop knows when a look is cheap
    )
