"""The primal-dual method: constraints enter the loss, multipliers move after the weights."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cswe.constrained import saved
from cswe.constrained._checks import check_finite, count_or_none, number
from cswe.constrained.constraint import Constraint, as_constraint
from cswe.constrained.distributed import Total, is_first, sum_over_ranks
from cswe.constrained.multiplier import Multiplier
from cswe.constrained.report import summary, warning
from cswe.constrained.rules import ProjectedGradient, Rule, as_rule
from cswe.constrained.schedule import Schedule, as_schedule
from cswe.constrained.watch import InfeasibleBoundWarning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PrimalDual:
    r"""Constrained learning with slacks, in a training loop of your own.

    The Lagrangian of a loss f and constraints ``D <= ε + s`` with slacks ``s >= 0`` is

    .. math:: f + \tfrac{α}{2} \|s\|^2 + λ^\top [D - ε - s],

    and one step of Algorithm 1 [1]_ is, in this order::

        weights      your optimizer, on the Lagrangian's gradient
        slacks       s <- [s - slack_lr (α s - λ)]_+
        multipliers  λ <- [λ + lr (D - ε - s)]_+

    With slack an active constraint ends *beyond* its bound, at ``D = ε + s`` with ``s = λ/α``: the slack is a
    quadratic price on the violation, and a small α is a small price. Without slack (the default) it ends at
    the bound; if no weights meet the bound λ grows for ever, and :class:`InfeasibleBoundWarning` says so.

    Parameters
    ----------
    constraints
        One :class:`Constraint` or several, each with any number of values; all get the same inputs. Any
        callable with an attribute ``bound`` is a constraint, too.
    lr
        The rate of the multipliers.
    slack_lr
        The rate of the slacks; as ``lr`` if None.
    slack_weight
        The paper's α, the price of slack; None (or infinity) for no slack.
    dual_optimizer, slack_optimizer
        ``"projected"`` (gradient step and projection), ``"adam"``, or a rule such as
        ``ProjectedAdam(betas)``.
    schedule, slack_schedule
        What multiplies ``lr`` and ``slack_lr`` in each epoch (:meth:`next_epoch` counts them, from 0): a
        number that multiplies every epoch (0.95), a dictionary from the epoch at which it begins to the
        factor ({60: 0.1}), or a function of the epoch. They are independent of each other.
    patience
        The number of steps after which a growing multiplier without effect is reported; None for never.
    look_every
        Steps between two looks at whether values are finite. A look makes the host wait for an accelerator. Between
        looks values that are not finite spoil slacks and multipliers, which the next look tells; with 1, the default,
        nothing is spoilt. None: only :meth:`check` looks.
    process_group
        Under ``torch.distributed``, the processes that share this problem; the default group if None.

    Attributes
    ----------
    lr, slack_lr : float
        The base rates; they may be set at any time.
    epoch, steps : int
        The number of finished epochs, and of steps that were not skipped.

    Notes
    -----
    *What counts.* λ and s move in :meth:`step` and nowhere else. The values of a :meth:`lagrangian` count
    from the moment that it is differentiated, once. So evaluation never counts, in train mode or not, and
    neither does the second forward of activation checkpointing.

    *Gradient accumulation.* Divide as usual, ``(duals.lagrangian(...) / k).backward()``, and call
    :meth:`step` once per optimizer step: it uses the mean over all samples of the micro-batches.

    *Mixed precision.* Tell it when the scaler skipped the step; the values of that step are then discarded::

        scale = scaler.get_scale()
        scaler.step(optimizer); scaler.update()
        duals.step(skipped=scaler.get_scale() < scale)

    *Data parallelism.* :meth:`step` first averages over all samples of all ranks, however many each of them
    has, so every rank makes the same step and holds the same state; every rank has to call it, and with the
    same ``skipped``. The Lagrangian of a rank is ``f_r + λᵀ D_r`` with its own means, and
    ``DistributedDataParallel`` averages the gradients of the ranks with equal weights. With equal batches
    that is the gradient of ``f + λᵀ D`` over all samples; with unequal ones multiply the Lagrangian by
    :func:`rank_weight`. A parameter that a constraint alone uses is in use: leave ``find_unused_parameters`` off.

    *Several evaluations a step*, as LBFGS makes them: each one that is differentiated counts, and :meth:`step` uses
    their mean.

    *Not a module.* λ and s belong to the optimization and not to the model: as buffers they would be cast
    by ``model.half()`` and travel in every forward of ``DistributedDataParallel``, and the constraints'
    parameters would appear twice. So this is an object like an optimizer, with ``state_dict()``. Its tensors
    follow the values to their device, in their precision but float32 at least.

    References
    ----------
    .. [1] Constrained sliced Wasserstein embedding, Algorithm 1.

    Examples
    --------
    >>> angle = torch.zeros((), requires_grad=True)
    >>> optimizer = torch.optim.SGD([angle], lr=0.2)
    >>> near_zero = Constraint(lambda: 2 - angle.cos(), bound=1.1, name="near_zero")
    >>> duals = PrimalDual(near_zero, lr=0.2, slack_lr=0.2, slack_weight=1.0)
    >>> for _ in range(500):
    ...     duals.lagrangian(1 - (angle - 1.2).cos()).backward()
    ...     optimizer.step(); optimizer.zero_grad(); duals.step()
    >>> print(f"{angle.rad2deg().item():.1f}")
    54.1
    >>> print(duals.summary())
    500 steps, 0 epochs, lr 0.2, slack_lr 0.2
    near_zero: 1 value, 0 above bound + slack
        value  1.413
        bound  1.1
        slack  0.3132
        dual   0.3132
    """

    def __init__(
        self,
        constraints: Constraint | Callable[..., Tensor] | Iterable[Constraint | Callable[..., Tensor]],
        lr: float,
        slack_lr: float | None = None,
        slack_weight: float | None = None,
        *,
        dual_optimizer: Rule | str = "projected",
        slack_optimizer: Rule | str = "projected",
        schedule: Schedule | Mapping[int, float] | float | None = None,
        slack_schedule: Schedule | Mapping[int, float] | float | None = None,
        patience: int | None = 1000,
        look_every: int | None = 1,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        if isinstance(constraints, Iterable) and not hasattr(constraints, "bound"):
            self.constraints = tuple(as_constraint(constraint) for constraint in constraints)
        else:
            self.constraints = (as_constraint(constraints),)
        names = [constraint.name for constraint in self.constraints]
        if not names:
            raise ValueError("expected constraints to have at least one constraint but got none")
        if len(set(names)) != len(names):
            raise ValueError(f"expected the names of constraints to differ but got {names}")
        patience = count_or_none(patience, "patience", least=2)
        slack_weight = float("inf") if slack_weight is None else slack_weight
        weight = number(slack_weight, "slack_weight", least=0, infinite=True)
        dual_rule = as_rule(dual_optimizer, "dual_optimizer")
        slack_rule = as_rule(slack_optimizer, "slack_optimizer")
        self._multipliers = [
            Multiplier(c, dual_rule, slack_rule, weight if c.slack_weight is None else c.slack_weight, patience)
            for c in self.constraints
        ]
        if slack_lr is not None and not any(multiplier.has_slack for multiplier in self._multipliers):
            raise ValueError(f"expected slack_weight with slack_lr={slack_lr} but got None, which means no slack")
        self.schedule = as_schedule(schedule, "schedule")
        self.slack_schedule = as_schedule(slack_schedule, "slack_schedule")
        self.lr = lr
        self.slack_lr = lr if slack_lr is None else slack_lr
        self.look_every = count_or_none(look_every, "look_every", least=1)
        self.process_group = process_group
        self.epoch = 0
        self.steps = 0
        self._totals = self._no_totals()

    @property
    def lr(self) -> float:
        """The base rate of the multipliers."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = number(lr, "lr", least=0)

    @property
    def slack_lr(self) -> float:
        """The base rate of the slacks."""
        return self._slack_lr

    @slack_lr.setter
    def slack_lr(self, slack_lr: float) -> None:
        slack_lr = number(slack_lr, "slack_lr", least=0)
        for m in self._multipliers:
            rate = slack_lr if m.constraint.slack_lr is None else m.constraint.slack_lr
            # s <- (1 - slack_lr α) s + ...: beyond 2 it overshoots by more than it was off.
            if m.has_slack and isinstance(m.slack_rule, ProjectedGradient) and rate * m.slack_weight >= 2:
                raise ValueError(
                    f"expected slack_lr * slack_weight to be below 2, or the slack does not settle, but got "
                    f"{rate:g} * {m.slack_weight:g} for constraint {m.constraint.name!r}"
                )
        self._slack_lr = slack_lr

    def lagrangian(self, loss: Tensor, *inputs: object, **kwargs: object) -> Tensor:
        """Return ``loss + (α/2) ‖s‖² + λᵀ [D - ε - s]``, to be differentiated; s and λ are constants in it.

        Parameters
        ----------
        loss
            A scalar.
        *inputs, **kwargs
            What the constraints are called with.
        """
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"expected loss to be a scalar tensor but got {came}")
        total = loss
        batch: list[tuple[Tensor, float]] = []
        for multiplier in self._multipliers:
            values = multiplier.constraint.values(*inputs, **kwargs)
            total = total + multiplier.term(values).to(loss.device)
            if torch.is_grad_enabled():
                batch.append(multiplier.constraint.observe(inputs, kwargs, values))
        if total.requires_grad:

            def count(_: Tensor) -> None:
                for sums, (values, samples) in zip(self._totals, batch, strict=False):
                    sums.add(values, samples)
                batch.clear()  # a second backward through the same graph is the same batch

            # Counting in backward and not here is what tells training from evaluation, and the one forward
            # that matters from those that checkpointing repeats.
            total.register_hook(count)
        return total

    @torch.no_grad()
    def step(self, *inputs: object, skipped: bool = False, **kwargs: object) -> None:
        """Move the slacks, then the multipliers. Call it after the optimizer's step.

        Parameters
        ----------
        *inputs, **kwargs
            Usually none: the step uses the values that entered the loss, which were computed before the
            weights moved. With inputs the constraints are evaluated on them anew, at the weights as they
            are now (Algorithm 1 to the letter, for one more evaluation); those of the loss are dropped.
        skipped
            The optimizer's step was skipped. Nothing moves, and the values since the last step are discarded.

        Raises
        ------
        RuntimeError
            When there are no values: no Lagrangian was differentiated since the last step.
        FloatingPointError
            When this step looks (``look_every``) and a value is not finite. Slacks and multipliers stay as they
            are, and the values since the last step are discarded.
        """
        if len(inputs) == 1 and isinstance(inputs[0], bool):
            raise TypeError(f"expected skipped as a keyword, step(skipped={inputs[0]}), but got it as an input")
        totals, self._totals = self._totals, self._no_totals()
        if skipped:
            return
        if inputs or kwargs:
            totals = self._no_totals()
            for total, constraint in zip(totals, self.constraints, strict=True):
                total.add(*constraint.observe(inputs, kwargs))
        totals = sum_over_ranks(totals, [c.name for c in self.constraints], self.process_group)
        means = [total.mean(c.name) for total, c in zip(totals, self.constraints, strict=True)]
        if self.look_every is not None and (self.steps + 1) % self.look_every == 0:
            for mean, constraint in zip(means, self.constraints, strict=True):
                check_finite(mean, constraint.name, self._left())
            if self.look_every > 1:
                self.check()  # what was not looked at may be in slacks and multipliers
        # All or nothing: only when every constraint has moved without an error does any of them.
        moved = [
            multiplier.moved(mean, total.count, *self._rates(multiplier.constraint))
            for multiplier, mean, total in zip(self._multipliers, means, totals, strict=True)
        ]
        self.steps += 1
        for multiplier, (state, stuck) in zip(self._multipliers, moved, strict=True):
            multiplier.state = state
            if stuck and is_first(self.process_group):
                warnings.warn(warning(multiplier, stuck), InfeasibleBoundWarning, stacklevel=3)

    def check(self) -> None:
        """Look at the values of the last step, and at slacks and multipliers.

        For ``look_every=None``: before a checkpoint is written, say, and every hundredth step.

        Raises
        ------
        FloatingPointError
            When any of them is not finite.
        """
        for multiplier in self._multipliers:
            if (state := multiplier.state) is not None:
                for tensor in (state.values, state.dual, state.slack):
                    check_finite(tensor, multiplier.constraint.name, self._left())

    def next_epoch(self) -> None:
        """Count an epoch, for the schedules."""
        self.epoch += 1

    @property
    def rates(self) -> tuple[float, float]:
        """The rates of multipliers and slacks in this epoch: base rate times schedule."""
        factor, slack_factor = self._factors()
        return self.lr * factor, self.slack_lr * slack_factor

    def record(self) -> dict[str, dict[str, Tensor]]:
        """Return, by constraint, ``values`` (of the last step), ``bound``, ``slack`` and ``dual``: vectors.

        A constraint is missing before its first step, and ``bound`` while its level is being measured.
        """
        record = {}
        for multiplier in self._multipliers:
            if (state := multiplier.state) is not None:
                entry = {"values": state.values, "slack": state.slack, "dual": state.dual}
                if (bound := multiplier.bound(state)) is not None:
                    entry["bound"] = bound
                record[multiplier.constraint.name] = {key: tensor.clone() for key, tensor in entry.items()}
        return record

    def summary(self) -> str:
        """Return the record for a reader: means over the values of each constraint, and their extremes."""
        lr, slack_lr = self.rates
        head = f"{self.steps} steps, {self.epoch} epochs, lr {lr:g}"
        if any(multiplier.has_slack for multiplier in self._multipliers):
            head += f", slack_lr {slack_lr:g}"
        return "\n".join([head, *(summary(multiplier) for multiplier in self._multipliers)])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state as a flat dictionary of tensors: ``safetensors.torch.save_file`` takes it as it is.

        It has the base rates and the epoch, but not what was counted since the last step: that would be of
        no use without the gradients that belong to it, so save after a step. Bounds that were given are
        settings and not in it; a measured level is.
        """
        state = {
            "steps": saved.number(self.steps),
            "epoch": saved.number(self.epoch),
            "lr": saved.number(self.lr),
            "slack_lr": saved.number(self.slack_lr),
        }
        for multiplier in self._multipliers:
            for key, tensor in saved.save(multiplier).items():
                state[f"{multiplier.constraint.name}.{key}"] = tensor
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up a saved state; the run goes on as if it had never stopped.

        Parameters
        ----------
        state
            From :meth:`state_dict`, its tensors possibly as numbers and lists (after JSON). When it does
            not fit, nothing changes.
        """
        own = ("steps", "epoch", "lr", "slack_lr")
        missing = [key for key in own if key not in state]
        prefixes = tuple(f"{constraint.name}." for constraint in self.constraints)
        extra = [key for key in state if key not in own and not key.startswith(prefixes)]
        if missing or extra:
            names = [constraint.name for constraint in self.constraints]
            raise ValueError(
                f"expected a state of the constraints {names} but got one with missing {missing} and unexpected {extra}"
            )
        rates = [number(torch.as_tensor(state[key], dtype=torch.float64, device="cpu"), key, least=0) for key in own]
        states = []
        for multiplier, prefix in zip(self._multipliers, prefixes, strict=True):
            fields = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
            states.append(saved.load(multiplier, fields, int(rates[0])))
        self.slack_lr = rates[3]
        self.lr = rates[2]
        self.steps, self.epoch = int(rates[0]), int(rates[1])
        for multiplier, loaded in zip(self._multipliers, states, strict=True):
            multiplier.state = loaded
        self._totals = self._no_totals()

    def to(self, device: torch.device | str) -> "PrimalDual":
        """Move slacks and multipliers now; without it they follow the values at the next step."""
        for multiplier in self._multipliers:
            if multiplier.state is not None:
                multiplier.state = multiplier.state.to(torch.device(device), multiplier.state.dual.dtype)
        return self

    def __repr__(self) -> str:
        rates = f"lr={self.lr:g}"
        if any(multiplier.has_slack for multiplier in self._multipliers):
            rates += f", slack_lr={self.slack_lr:g}"
        inside = ", ".join(repr(constraint) for constraint in self.constraints)
        return f"PrimalDual([{inside}], {rates}, steps={self.steps})"

    def _no_totals(self) -> list[Total]:
        return [Total() for _ in self._multipliers]

    def _left(self) -> str:
        if self.look_every == 1:
            return "slacks and multipliers were left as they were"
        return "slacks and multipliers may be spoilt since the last look: go back to a checkpoint"

    def _rates(self, constraint: Constraint) -> tuple[float, float]:
        # A constraint's own rate replaces the base rate; the schedules apply to both.
        lr = self.lr if constraint.lr is None else constraint.lr
        slack_lr = self.slack_lr if constraint.slack_lr is None else constraint.slack_lr
        factor, slack_factor = self._factors()
        return lr * factor, slack_lr * slack_factor

    def _factors(self) -> tuple[float, float]:
        return (
            number(self.schedule(self.epoch), f"schedule({self.epoch})", least=0),
            number(self.slack_schedule(self.epoch), f"slack_schedule({self.epoch})", least=0),
        )
