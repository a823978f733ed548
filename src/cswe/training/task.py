"""What is learned: classes, sets of classes or numbers; with its loss and its scores."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cswe.tokens import LabelSpec
from cswe.training.errors import UserError
from cswe.training.metrics import balanced_accuracy, f_max, macro_f1, r_squared, top_k

Task = Literal["classification", "multi-label", "regression"]
_TASKS: dict[str, Task] = {"class": "classification", "multilabel": "multi-label", "real": "regression"}
# The score by which the best epoch is chosen; the more the better.
CHOSEN_BY: dict[Task, str] = {"classification": "top1", "multi-label": "f_max", "regression": "r2"}
# What a table can show of a task: the more the better, unlike the loss.
SCORES: dict[Task, tuple[str, ...]] = {
    "classification": ("top1", "top5", "macro_f1", "balanced"),
    "multi-label": ("f_max",),
    "regression": ("r2",),
}
NEAREST = "nearest"  # of classification, where it is asked for


def task_of(labels: LabelSpec) -> Task:
    """Return the task that labels of this kind pose.

    Examples
    --------
    >>> task_of(LabelSpec("class", ("cat", "dog")))
    'classification'
    """
    if labels.kind not in _TASKS:
        raise UserError("store: expected labels to learn from but it has none; extract it with labels")
    return _TASKS[labels.kind]


def check_metric(metric: str, known: Iterable[str]) -> None:
    """Raise an error unless a score is among the known ones, and one of which more is better.

    Examples
    --------
    >>> check_metric("loss", ["loss", "top1", "nearest"])
    Traceback (most recent call last):
    cswe.training.errors.UserError: metric: expected one of top1, nearest but got 'loss'
    """
    shown = [name for name in known if name == NEAREST or any(name in names for names in SCORES.values())]
    if metric not in shown:
        raise UserError(f"metric: expected one of {', '.join(shown)} but got {metric!r}")


def loss_of(task: Task, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean loss: cross-entropy, binary cross-entropy, or the squared error."""
    if task == "classification":
        return F.cross_entropy(outputs, labels, label_smoothing=smoothing)
    if task == "multi-label":
        return F.binary_cross_entropy_with_logits(outputs, labels * (1 - smoothing) + smoothing / 2)
    return F.mse_loss(outputs, labels)


def scores_of(task: Task, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the scores of all outputs.

    Examples
    --------
    >>> scores_of("regression", torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    {'loss': 0.0, 'r2': 1.0}
    """
    scores = {"loss": float(loss_of(task, outputs, labels))}
    if task == "classification":
        scores |= {"top1": top_k(outputs, labels), "top5": top_k(outputs, labels, 5)}
        return scores | {"macro_f1": macro_f1(outputs, labels), "balanced": balanced_accuracy(outputs, labels)}
    if task == "multi-label":
        return scores | {"f_max": f_max(torch.sigmoid(outputs.double()), labels)}
    return scores | {"r2": r_squared(outputs, labels)}
