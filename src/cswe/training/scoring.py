"""The scores of a cell's best model on every split, those that are not known yet."""

from cswe.tokens import Batches, Manifest
from cswe.training.cells import Result
from cswe.training.data import TrainingData
from cswe.training.errors import UserError
from cswe.training.evaluate import nearest_accuracy, predict
from cswe.training.model import Model
from cswe.training.table import SPLITS
from cswe.training.task import NEAREST, SCORES, check_metric, scores_of, task_of

Scores = dict[str, dict[str, float]]


def check_scores(manifest: Manifest, metric: str | None = None, *, neighbors: bool = False) -> None:
    """Raise an error if there will be no such scores, before anything is computed."""
    task = task_of(manifest.spec.labels)
    if neighbors and task != "classification":
        raise UserError(f"neighbors: expected one class a set to compare but the labels are for {task}; leave it out")
    if metric == NEAREST and not neighbors and task == "classification":
        raise UserError(f"metric: {NEAREST} is computed with --neighbors only; add it")
    if metric is not None:
        check_metric(metric, [*SCORES[task], *([NEAREST] if neighbors else [])])


def lacks_scores(result: Result, *, test: bool, neighbors: bool) -> bool:
    """Say whether scores are wanted that a cell was not asked for when it was trained."""
    if result.error is not None:
        return False
    held_out = [scores for split, scores in result.scores.items() if split != "train"]
    return (test and "test" not in result.scores) or (neighbors and any(NEAREST not in scores for scores in held_out))


def score_splits(
    model: Model, data: TrainingData, test: Batches | None, known: Scores, *, seed: int, neighbors: bool
) -> Scores:
    """Return the scores of all splits.

    Parameters
    ----------
    model
        The best of a run.
    data
        Its training and validation set.
    test
        The test set, if it is to be scored.
    known
        Scores that need not be computed again, those on validation at least.
    seed
        Of the run: sums are rounded as the batches are put together.
    neighbors
        Score vectors by themselves, too.
    """
    scores = {split: dict(values) for split, values in known.items()}
    data.train.load_state_dict({"seed": seed, "epoch": 0, "step": 0})
    for split, batches in {"train": data.train, "test": test}.items():
        if batches is not None and split not in scores:
            scores[split] = scores_of(data.facts.task, *predict(model, batches))
    held_out = {"validation": data.validation} | ({} if test is None else {"test": test})
    asked = {split: batches for split, batches in held_out.items() if NEAREST not in scores[split]}
    if neighbors and asked:
        data.train.load_state_dict({"seed": seed, "epoch": 1, "step": 0})  # where scoring it leaves it
        for split, found in nearest_accuracy(model, data.train, asked).items():
            scores[split][NEAREST] = found
    return {split: scores[split] for split in SPLITS if split in scores}
