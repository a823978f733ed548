"""How good answers are: numbers from outputs and labels, each a few lines of torch."""

import torch
from torch import Tensor


def top_k(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Return the share of samples whose class is among the k highest of ``(n, C)`` logits.

    Ties count against the model: a class must be beaten by fewer than k others, equal ones included. What is not a
    number beats any number, and is never right.

    Examples
    --------
    >>> top_k(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    0.5
    """
    own = logits.gather(1, labels.unsqueeze(1))
    rivals = (~(logits < own)).sum(1) - 1
    return float(((rivals < k) & ~own.isnan().squeeze(1)).double().mean())


def macro_f1(logits: Tensor, labels: Tensor) -> float:
    """Return the mean F1 over the classes that occur among labels or predictions.

    Examples
    --------
    >>> macro_f1(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 0]))
    1.0
    """
    classes = logits.shape[1]
    predictions = _predictions(logits)
    hits = torch.bincount(labels[predictions == labels], minlength=classes).double()
    total = torch.bincount(labels, minlength=classes) + torch.bincount(predictions, minlength=classes)[:classes]
    present = total > 0
    return float((2 * hits[present] / total[present]).mean())


def balanced_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of the share of their samples that are recognised: rare classes count alike.

    Examples
    --------
    >>> balanced_accuracy(torch.tensor([[0.9, 0.1]] * 4), torch.tensor([0, 0, 0, 1]))
    0.5
    """
    classes = logits.shape[1]
    hits = torch.bincount(labels[_predictions(logits) == labels], minlength=classes).double()
    total = torch.bincount(labels, minlength=classes)
    return float((hits[total > 0] / total[total > 0]).mean())


def _predictions(logits: Tensor) -> Tensor:
    """Return the class of the highest logit; of rows with one that is not a number, a class that there is not."""
    return torch.where(logits.isnan().any(1), logits.shape[1], logits.argmax(1))


def f_max(scores: Tensor, labels: Tensor) -> float:
    r"""Return the largest F-measure over all thresholds on ``(n, C)`` scores, centred on samples (as in CAFA [1]_).

    At a threshold, precision is averaged over the samples with at least one prediction and recall over all;
    :math:`F_{max} = \max_t 2 p_t r_t / (p_t + r_t)`. Samples without any label have no recall and are left out.
    Not a number if nothing is left, or if a score is none.

    References
    ----------
    .. [1] Radivojac et al. A large-scale evaluation of computational protein function prediction. Nature Methods 2013.

    Examples
    --------
    >>> f_max(torch.tensor([[0.9, 0.2], [0.6, 0.7]]), torch.tensor([[1, 0], [1, 1]]))
    1.0
    """
    kept = labels.sum(1) > 0
    scores, truth = scores[kept], labels[kept].double()
    count, classes = scores.shape
    if not count or bool(scores.isnan().any()):
        return float("nan")
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    hits = truth.gather(1, order).cumsum(1)
    precision = hits / torch.arange(1, classes + 1, device=scores.device)
    recall = hits / truth.sum(1, keepdim=True)
    # Lowering the threshold past a score adds one prediction of one sample: its averages change by a difference.
    zero = precision.new_zeros(count, 1)
    change = [torch.diff(part, dim=1, prepend=zero).flatten() for part in (precision, recall)]
    first = torch.zeros_like(precision)
    first[:, 0] = 1
    thresholds, by_score = ranked.flatten().sort(descending=True, stable=True)
    predicted = first.flatten()[by_score].cumsum(0)
    p = change[0][by_score].cumsum(0) / predicted
    r = change[1][by_score].cumsum(0) / count
    # Equal scores pass a threshold together: only the last of them is a threshold.
    last = torch.ones_like(thresholds, dtype=torch.bool)
    last[:-1] = thresholds[:-1] != thresholds[1:]
    f = 2 * p * r / (p + r).clamp(min=1e-12)
    return float(f[last].max())


def r_squared(outputs: Tensor, labels: Tensor) -> float:
    """Return the coefficient of determination of ``(n, width)`` outputs, averaged over their columns.

    Examples
    --------
    >>> r_squared(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    1.0
    """
    outputs, labels = outputs.double(), labels.double()
    residual = (labels - outputs).square().sum(0)
    total = (labels - labels.mean(0)).square().sum(0)
    # A column that does not vary can be right or wrong, nothing in between (scikit-learn's convention).
    scores = torch.where(total > 0, 1 - residual / total.clamp(min=1e-300), (residual == 0).double())
    return float(scores.mean())
