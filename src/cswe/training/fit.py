"""The training loop."""

import math
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cswe.constrained import PrimalDual
from cswe.constrained.distributed import is_parallel, rank_weight
from cswe.training.checkpoint import BEST, LAST, replace_folder, save_model, tidy
from cswe.training.clock import Clock
from cswe.training.data import TrainingData
from cswe.training.errors import TrainingError, UserError
from cswe.training.evaluate import exact_swgg, predict
from cswe.training.folder import begin, claimed
from cswe.training.logging import LOG, JsonLines, Logger, Record
from cswe.training.model import Facts, Model
from cswe.training.optim import set_rate
from cswe.training.origin import origin_of
from cswe.training.parallel import Ranks
from cswe.training.randomness import generator_for
from cswe.training.regularize import drop, keep_tokens
from cswe.training.state import State
from cswe.training.task import CHOSEN_BY, loss_of, scores_of

_LOOK_EVERY = 50  # steps between two looks at values on an accelerator, which has to wait for each


class NeverBoundWarning(UserWarning):
    """A run ends before the level is measured that its bound is a fraction of: nothing holds its slices."""


def fit(
    data: TrainingData,
    run: str | Path,
    *,
    seed: int = 0,
    resume: bool = False,
    save_steps: int | None = None,
    keep_last: bool = True,
    profile: bool = False,
    loggers: Sequence[Logger] = (),
    ranks: Ranks | None = None,
) -> Generator[Record, None, None]:
    """Train a model, yielding the record of each epoch.

    Being a generator lets several runs take turns in one process; each is what it would be alone.

    Parameters
    ----------
    data
        Training and validation set, with the recipe.
    run
        The run's folder: ``recipe.json``, ``log.jsonl``, and the checkpoints ``best`` and ``last``.
    seed
        Decides everything random.
    resume
        Go on from ``last``, or start if there is none; otherwise the folder must not hold a run.
    save_steps
        Write ``last`` every so many steps, too, and not only after each epoch.
    keep_last
        Write ``last`` at all; without it a run that was broken off starts anew, which for a short one is quicker than
        writing its state after every epoch.
    profile
        Measure where time goes.
    loggers
        Who else wants the records.
    ranks
        The processes that train this model together; by default those that a launcher started. ``Ranks()`` is this one
        alone, whatever others do.

    Yields
    ------
    dict
        ``epoch``, ``loss``, ``rate``, ``validation``, and for a bounded pool ``swgg`` with ``values``, ``bound``,
        ``slack`` and ``dual`` per slice.
    """
    run = Path(run)
    facts = replace(data.facts, seed=seed)
    data = data.drawn(seed)
    with torch.device("meta"):
        Model(facts)  # what is wrong with it should be told before a folder is claimed
    ranks = Ranks.join(data.train.device) if ranks is None else ranks
    if ranks.world == 1 and is_parallel():
        raise UserError(
            "this process would train alone, but torch.distributed is initialised for several, whose multipliers would "
            "be averaged: end it first (torch.distributed.destroy_process_group()), or let a launcher start `cswe`"
        )
    if ranks.world > 1 and max(map(len, data.train.order(0))) < ranks.world:
        size = facts.recipe.optimization.batch_size
        raise UserError(
            f"batch_size: expected at least {ranks.world}, one set for every process, but got {size}; take larger "
            "batches, or fewer processes"
        )
    if ranks.first:
        _check_bound(data, facts)
        begin(run, facts, origin_of(data.store.manifest), resume=resume)
    with claimed(run) if ranks.first else nullcontext():
        if resume and ranks.first:
            for name in (BEST, LAST):
                tidy(run / name)  # a run that was killed in its very last step writes neither of them again
        clock = Clock(profile, data.train.device)
        yield from _epochs(data, facts, run, ranks, resume, save_steps, keep_last, clock, loggers)


def _epochs(
    data: TrainingData,
    facts: Facts,
    run: Path,
    ranks: Ranks,
    resume: bool,
    save_steps: int | None,
    keep_last: bool,
    clock: Clock,
    loggers: Sequence[Logger],
) -> Iterator[Record]:
    recipe, device, seed = facts.recipe, data.train.device, facts.seed
    choice, regular = recipe.optimization, recipe.regularization
    state = State.start(data, facts, device)
    if resume:
        state.restore(run, ranks.rank)
    model, optimizer, duals, scaler = state.model, state.optimizer, state.duals, state.scaler
    progress = state.progress
    if ranks.first:
        loggers = [JsonLines(run / LOG, progress.epoch), *loggers]
    half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(choice.precision)

    while not progress.finished:
        started = time.perf_counter()
        rate = set_rate(optimizer, choice, progress.epoch)
        model.train()
        data.train.load_state_dict({"seed": seed, "epoch": progress.epoch, "step": progress.step})
        clock("loading")
        for whole in data.train:
            draw = (seed, progress.epoch, progress.step, ranks.rank)
            progress.step += 1
            if len(whole) < ranks.world:
                continue  # too few for every process to have one
            batch = keep_tokens(ranks.rows(whole), regular.keep_tokens, generator_for(device, "tokens", *draw))
            assert batch.labels is not None
            labels = batch.labels
            if facts.task == "regression":
                labels = (labels - model.output_mean) / model.output_spread

            with torch.autocast(device.type, half, enabled=half is not None):
                clock("pool")
                vectors = model.embed_batch(batch)
                clock("head")
                # Behind the normalisation: a zero is the average there. Before it, it would be far from anything for a
                # number that is never near zero, as spreads are, and count as that number's own spread.
                seen = drop(model.normalization(vectors), regular.dropout, generator_for(device, "dropout", *draw))
                outputs = model.decide(seen)
                loss = loss_of(facts.task, outputs, labels, regular.label_smoothing)
            clock("constraint")
            masses = batch.weights if recipe.bounding.weighted_bound else None
            total = loss if duals is None else duals.lagrangian(loss, batch.tokens, batch.mask, masses)
            clock.in_backward(loss, "head")
            clock.in_backward(vectors, "pool")
            scaler.scale(total * rank_weight(len(batch))).backward()

            clock("optimizer")
            saving = save_steps is not None and progress.step % save_steps == 0
            look = saving or device.type == "cpu" or progress.step % _LOOK_EVERY == 0
            if look:
                _check_loss(loss, total, run, progress.epoch, progress.step, rate)
            ranks.average(parameter.grad for parameter in model.parameters())
            skipped = _step(state, choice.clip, run)
            if duals is not None:
                _move_duals(state, run, skipped=skipped, look=look)
            progress.add("loss", loss * len(batch))
            progress.add("samples", torch.tensor(len(batch)))
            if saving:
                _check_model(model.state_dict(), run)
                _, *others = ranks.collect(state.own())
                if ranks.first:
                    state.save(run, {"epoch": progress.epoch}, others)
            clock("loading")

        clock("validation")
        ranks.average(buffer for buffer in model.buffers() if buffer.is_floating_point())
        sums, progress.sums, progress.step = progress.sums, {}, 0
        progress.epoch += 1
        if duals is not None:
            duals.next_epoch()
        record: Record = {"epoch": progress.epoch, "seed": seed, "rate": rate}
        ranks.average([sums["loss"], sums["samples"]])
        if duals is not None:
            _look_at_duals(duals, run)
        record["loss"] = float(sums["loss"] / sums["samples"])
        _check_loss(torch.tensor(record["loss"]), None, run, progress.epoch, 0, rate)
        outputs, answers = predict(model, data.validation)
        _check_model({**model.state_dict(), "outputs": outputs}, run)
        record["validation"] = scores_of(facts.task, outputs, answers)
        record |= _transport(state, sums)
        if (exact := exact_swgg(model, data.validation)) is not None:
            record["swgg_exact"] = exact
        record["seconds"] = clock.read() | {"all": time.perf_counter() - started}

        score = ranks.agree(record["validation"][CHOSEN_BY[facts.task]])
        # Where no score is a number, nothing says which epoch is best: then the last one stays.
        better = progress.best is None or math.isnan(progress.best) or score > progress.best
        if better:
            progress.best, progress.best_epoch = score, progress.epoch
        patience = choice.early_stop or choice.epochs
        progress.finished = progress.epoch >= choice.epochs or progress.epoch - progress.best_epoch >= patience
        if ranks.first:
            notes = {"epoch": progress.epoch, "validation": record["validation"]}
            if better:
                replace_folder(run / BEST, lambda folder, notes=notes: save_model(folder, model, notes))  # type: ignore[misc]
            for logger in loggers:
                logger.write(record)
            if keep_last:
                state.save(run, notes)
        yield record


def _check_bound(data: TrainingData, facts: Facts) -> None:
    """Warn where all steps go by while the level is measured that the bound is a fraction of."""
    choice = facts.recipe.bounding
    if facts.recipe.pooling.pool != "cswe" or choice.bound_scale != "fraction":
        return
    steps = facts.recipe.optimization.epochs * len(data.train.order(0))
    if steps <= choice.bound_batches:
        warnings.warn(
            f"the bound is never in force: its level is measured on the first {choice.bound_batches} batches, and this "
            f"run has {steps}; lower bound_batches, or take smaller batches or more epochs",
            NeverBoundWarning,
            stacklevel=2,
        )


def _step(state: State, clip: float | None, run: Path) -> bool:
    """Move the weights; return whether the step was skipped because half precision overflowed."""
    optimizer, scaler = state.optimizer, state.scaler
    if clip is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip)
    scale = scaler.get_scale()
    try:
        scaler.step(optimizer)
    except RuntimeError as error:  # torch's words for a rate that float32 cannot hold
        if "overflow" not in str(error):
            raise
        raise TrainingError(f"the weights ran away ({error}). {_kept(run)}; lower --lr") from None
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale() < scale


def _move_duals(state: State, run: Path, *, skipped: bool, look: bool) -> None:
    """Move slacks and multipliers, and stop a run whose multipliers have run away."""
    duals, limit = state.duals, state.model.facts.recipe.bounding.dual_limit
    assert duals is not None
    duals.step(skipped=skipped)
    if skipped:
        return
    if look:
        _look_at_duals(duals, run)
    entry = duals.record()["swgg"]
    state.progress.add("swgg", entry["values"])
    state.progress.add("steps", torch.tensor(1))
    if look and bool((entry["dual"] > limit).any()):
        worst = int(entry["dual"].argmax())
        bound = f" above {float(entry['bound'][worst]):.4g}" if "bound" in entry else ""
        raise TrainingError(
            f"the multiplier of slice {worst} ran away: {float(entry['dual'][worst]):.4g}, beyond the limit of "
            f"{limit:g}, while its SWGG is {float(entry['values'][worst]):.4g}{bound}. {_kept(run)}; raise --bound, "
            "give slack (--slack-weight 1), or lower --dual-lr"
        )


def _look_at_duals(duals: PrimalDual, run: Path) -> None:
    """Stop a run whose constraint has values that are not finite."""
    try:
        duals.check()
    except FloatingPointError as error:
        raise TrainingError(f"{error}. {_kept(run)}; lower --lr or --dual-lr, or set --clip 1") from None


def _check_loss(loss: Tensor, total: Tensor | None, run: Path, epoch: int, step: int, rate: float) -> None:
    worse = loss if total is None else torch.stack([loss.detach(), total.detach()])
    if bool(torch.isfinite(worse).all()):
        return
    what = "the loss" if not bool(torch.isfinite(loss)) else "the constraint's part of the loss"
    where = f"in epoch {epoch + 1}, step {step}" if step else f"in epoch {epoch}"
    raise TrainingError(
        f"{what} became {float(worse.sum())} {where}, at rate {rate:g}. {_kept(run)}; lower --lr, set --clip 1, or "
        "use --precision float32"
    )


def _check_model(tensors: dict[str, Tensor], run: Path) -> None:
    """Stop a run before it keeps a model whose numbers are not finite."""
    wrong = [name for name, values in tensors.items() if not bool(torch.isfinite(values).all())]
    if wrong:
        what = "the answers on the validation set" if wrong == ["outputs"] else f"values of {wrong[0]}"
        raise TrainingError(
            f"{what} are not finite any more. {_kept(run)}; lower --lr, set --clip 1, or use --precision float32"
        )


def _kept(run: Path) -> str:
    return f"The last good checkpoint is {run / LAST}" if (run / LAST).exists() else "There is no checkpoint yet"


def _transport(state: State, sums: dict[str, Tensor]) -> dict[str, Any]:
    """Return the record of the bound: SWGG averaged over the epoch, the rest as it is at its end."""
    if state.duals is None or "swgg" not in sums:
        return {}
    entry = {name: values.tolist() for name, values in state.duals.record()["swgg"].items()}
    return {"swgg": {**entry, "values": (sums["swgg"] / sums["steps"]).tolist()}}
