"""Scores against scikit-learn, and against the definition where it has none."""

import numpy as np
import pytest
import torch

from cswe.training.metrics import balanced_accuracy, f_max, macro_f1, r_squared, top_k

sklearn = pytest.importorskip("sklearn.metrics", reason="needs the extra 'data'")


@pytest.mark.parametrize("seed", range(5))
def test_classification(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, 8, generator=generator)
    labels = torch.randint(6, (60,), generator=generator)  # two classes never occur
    logits[torch.arange(60), labels] += 0.5
    assert top_k(logits, labels) == pytest.approx(sklearn.accuracy_score(labels, logits.argmax(1)))
    expected = sklearn.top_k_accuracy_score(labels, logits, k=5, labels=np.arange(8))
    assert top_k(logits, labels, 5) == pytest.approx(expected)
    expected = sklearn.f1_score(labels, logits.argmax(1), average="macro", zero_division=0)
    assert macro_f1(logits, labels) == pytest.approx(expected)


def test_ties_and_few_classes():
    assert top_k(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])) == 0  # all alike is no answer
    assert top_k(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), 5) == 1


def test_what_is_no_number_is_never_right():
    labels, nan = torch.tensor([0, 1]), torch.full((2, 2), torch.nan)
    assert top_k(nan, labels) == top_k(nan, labels, 5) == macro_f1(nan, labels) == balanced_accuracy(nan, labels) == 0
    one_wrong = torch.tensor([[torch.nan, 0.0], [0.0, 1.0]])
    assert top_k(one_wrong, labels) == balanced_accuracy(one_wrong, labels) == 0.5
    assert np.isnan(f_max(nan, torch.ones(2, 2)))
    assert np.isnan(f_max(torch.rand(2, 2), torch.zeros(2, 2)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_f_max(seed, ties):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(30, 7, generator=generator)
    if ties:
        scores = (scores * 4).round() / 4
    labels = (torch.rand(30, 7, generator=generator) < 0.3).long()
    labels[0] = 0  # without a label: left out
    kept = labels.sum(1) > 0
    best = 0.0
    for threshold in scores[kept].unique():
        predicted = (scores[kept] >= threshold).long().numpy()
        truth = labels[kept].numpy()
        recall = sklearn.recall_score(truth, predicted, average="samples", zero_division=0)
        said = predicted.sum(1) > 0
        precision = sklearn.precision_score(truth[said], predicted[said], average="samples", zero_division=0)
        if precision + recall > 0:
            best = max(best, 2 * precision * recall / (precision + recall))
    assert f_max(scores, labels) == pytest.approx(best)


@pytest.mark.parametrize("width", [1, 3])
def test_r_squared(width):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randn(40, width, generator=generator)
    outputs = labels + 0.5 * torch.randn(40, width, generator=generator)
    assert r_squared(outputs, labels) == pytest.approx(sklearn.r2_score(labels, outputs), abs=1e-6)
    assert r_squared(labels.mean(0).expand(40, width), labels) == pytest.approx(0, abs=1e-6)


def test_balanced_accuracy_is_scikit_learns():
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 6, generator=generator)
    labels = torch.randint(4, (200,), generator=generator)  # classes 4 and 5 do not occur
    kept = sklearn.recall_score(labels, logits.argmax(1), labels=[0, 1, 2, 3], average="macro")
    assert balanced_accuracy(logits, labels) == pytest.approx(kept)
