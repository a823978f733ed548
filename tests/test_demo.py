"""The demo's parts: the landscape's mathematics, the pictures, and an honest table."""

import math

import ot
import pytest
import torch

import cswe
from cswe import demo
from cswe.report.landscape import draw_landscape, example_pair, learn_in, measure_landscape


def test_landscape(tmp_path):
    landscape = measure_landscape(*example_pair(), steps=90)
    exact = math.sqrt(ot.emd2([], [], ot.dist(landscape.x.numpy(), landscape.y.numpy())))
    assert landscape.floor == pytest.approx(exact)
    assert float(landscape.distances.min()) >= exact
    assert 0 < landscape.open_share < 1
    path = learn_in(landscape, steps=300)
    assert abs(float(path.free[-1]) - path.wanted) < 2
    at_end = landscape.distances[int(float(path.bound[-1]) / 2)]
    assert float(at_end) < float(landscape.distances[int(path.wanted / 2)]), "the bound should lead to a better plan"
    png, svg = draw_landscape(landscape, path, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    again = draw_landscape(landscape, path, tmp_path / "again")
    assert again[1].read_bytes() == svg.read_bytes()


def test_training_learns_and_reports(monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 3)
    splits = demo.digit_splits()
    assert {name: len(split.labels) for name, split in splits.items()}["train"] == 1259
    result = demo.train("swe", lambda: cswe.SWEPool(3, 8, 16), splits, bound=0.9)
    assert result.size == 32
    assert result.accuracy > 0.3
    assert "ε + slack" in result.note


def test_main_prints_paths_and_a_line_per_method(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    torch.manual_seed(0)
    demo.main(tmp_path)
    printed = capsys.readouterr().out
    assert str(tmp_path / "swgg-landscape.png") in printed
    for method in ("mean (GAP)", "attention", "sliced Wasserstein (L-moments) ", "constrained"):
        assert method in printed
