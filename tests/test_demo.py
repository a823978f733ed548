"""The demo: the landscape's mathematics, the pictures, and the whole way from digits to an honest sentence."""

import contextlib
import html
import io
import json
import math
import shutil

import ot
import pytest

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


def test_the_digits_of_the_readme():
    splits = demo.digit_splits()
    assert {name: len(split.labels) for name, split in splits.items()}["train"] == 1259


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A small demo: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SLICES", (2,))
        patch.setattr(demo, "SEEDS", 1)
        patch.setattr(demo, "CHOICES", ("epochs=1", "points=8", "bound_batches=2"))
        patch.setattr("os.cpu_count", lambda: 1)
        patch.setattr(demo, "learn_in", lambda landscape: learn_in(landscape, steps=20))
        patch.setenv("CSWE_BACKEND", "scan")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            demo.main(folder)
    return folder, printed.getvalue()


def test_it_goes_the_whole_way_and_ends_with_the_page_and_a_sentence(told):
    folder, printed = told
    for word in ("swgg-landscape.png", "$ cswe extract", "$ cswe compare", "$ cswe report", "| GAP", "| C-SWE"):
        assert word in printed
    *_, place, _, sentence = printed.splitlines()
    assert place.endswith(f"The page: {folder / 'report' / 'index.html'}")
    assert sentence == demo.conclusion(folder / "study")
    page = (folder / "report" / "index.html").read_text()
    assert sentence in html.unescape(page)
    assert 'id="figure-landscape"' in page


def test_other_numbers_give_another_sentence(told, tmp_path):
    folder, _ = told
    shutil.copytree(folder / "study", tmp_path / "study")
    for winner, name in (("mean", "GAP"), ("attention-queries-32", "attention with 32 queries"), ("swe", "SWE with 2")):
        for file in (tmp_path / "study" / "cells").glob("*.json"):
            content = json.loads(file.read_text())
            for scores in content["scores"].values():
                scores["top1"] = 0.97 if file.name.startswith(f"{winner}.") else 0.5
            file.write_text(json.dumps(content))
        sentence = demo.conclusion(tmp_path / "study")
        assert sentence.startswith(f"With settings chosen by validation, {name}")
        assert "97.0 %" in sentence


def test_a_second_demo_starts_over(told, monkeypatch):
    folder, _ = told
    seen = []
    monkeypatch.setattr(demo, "learn_in", lambda landscape: learn_in(landscape, steps=2))
    monkeypatch.setattr(demo, "cswe", lambda words: seen.append((words[0], (folder / "digits").exists())) or 1)
    (folder / "digits" / "left over").touch()
    with pytest.raises(SystemExit):
        demo.main(folder)
    assert seen == [("extract", False)]
