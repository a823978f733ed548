"""The page: whole, in the browser, on a phone, at a desk, on paper and in the dark, whatever the runs were like."""

import html
import io
import json
import math
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from cswe.cli import main
from cswe.nn import Moments
from cswe.report.gather import gather
from cswe.report.page import build_page
from cswe.report.slices import class_profiles, look_at, slice_weights
from cswe.tokens import Item, TokenStore
from cswe.training import load
from cswe.training.cells import Plan
from cswe.training.compare import compare
from cswe.training.errors import UserError
from cswe.training.model import Facts

TINY = ("batch_size=64", "points=8", "bound_batches=2")


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def ink(picture, box):
    """The share of pixels of a drawing that differ from its background."""
    left, top, width, height = (round(box[side]) for side in ("x", "y", "width", "height"))
    inner = picture[top + 12 : top + height - 12, left + 12 : left + width - 12]
    return float((np.abs(inner - inner[0, 0]).max(-1) > 24).mean())


def check_in_browser(browser, page, *, dark=(False,)):
    """Nothing sticks out, every drawing has ink, no text is cut off, nothing is fetched."""
    for width in (1280, 390):
        for scheme in dark if width == 390 else (False,):
            browser.requests.clear()
            browser.open(page, width, dark=scheme)
            assert browser.sticking_out() == []
            assert browser.cut_off() == []
            boxes = browser.drawings()
            assert boxes
            # Nearly as wide as the phone: a drawing beside another would be too small to read.
            assert width > 390 or all(box["width"] > 340 for box in boxes)
            picture = pixels(browser.screenshot())
            for box in boxes:
                assert ink(picture, box) > 0.004, f"no ink: {box['name']}"
            assert not [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))]


def report(runs, out, *options):
    assert main(["report", *map(str, runs), "--out", str(out), *map(str, options or ["--no-figures"])]) == 0
    return out / "index.html"


@pytest.fixture(scope="session")
def page(study, tmp_path_factory):
    return report([study], tmp_path_factory.mktemp("page"))


def test_the_page_has_everything_and_needs_nothing(page, study):
    text = page.read_text()
    for name in ("accuracy", "differences", "training", "evolution", "slices-cswe", "slices-swe"):
        assert f'id="figure-{name}' in text
    for word in ("C-SWE, ε = 0.9", "With settings chosen by validation", "dual lr", "torch"):
        assert word in text
    command = re.search(r"<pre>(.*?)</pre>", text).group(1)
    assert html.unescape(re.sub("<[^>]*>", "", command)) == json.loads((study / "compare.json").read_text())["command"]
    outside = re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', text) + re.findall(
        r"@import|https?://(?!www.w3.org)", text
    )
    assert outside == []
    assert "<script" not in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert not set(re.findall(r"#[0-9a-f]{6}", text.partition("</style>")[2])), "a colour that does not know the dark"


def test_in_the_browser(browser, page):
    check_in_browser(browser, page, dark=(False, True))


def test_dark_is_dark_and_paper_is_white(browser, page):
    def corner(**options):
        browser.open(page, 1280, **options)
        return pixels(browser.screenshot({"x": 0, "y": 0, "width": 20, "height": 20}))[5, 5].mean()

    assert corner() > 240
    assert corner(dark=True) < 60
    assert corner(dark=True, media="print") > 240
    lines = browser.evaluate("getComputedStyle(document.querySelector('svg.panel text')).fill")
    browser.open(page, 1280, dark=True)
    assert browser.evaluate("getComputedStyle(document.querySelector('svg.panel text')).fill") != lines
    assert browser.pdf().startswith(b"%PDF")


@pytest.mark.parametrize(("slices", "epochs"), [(1, 1), (128, 2)])
def test_few_and_many_slices_and_one_epoch(browser, digits, tmp_path, slices, epochs):
    plan = Plan(("swe", "cswe"), (slices,), seeds=1, choices=(*TINY, f"epochs={epochs}"))
    compare(digits, tmp_path / "study", plan, device="cpu")
    page = report([tmp_path / "study"], tmp_path / "page")
    check_in_browser(browser, page)
    assert ("There is one slice" in page.read_text()) == (slices == 1)
    assert ("Bands hold" in page.read_text()) == (slices == 128)


def test_numbers_that_are_none_and_runs_that_failed(browser, study, tmp_path):
    copy = tmp_path / "study"
    shutil.copytree(study, copy)
    for file in (copy / "cells").glob("cswe-bound-0.9*.json"):
        content = json.loads(file.read_text())
        for scores in content["scores"].values():
            scores["top1"] = None
        file.write_text(json.dumps(content))
        log = copy / "runs" / file.stem / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            line["loss"] = line["validation"]["top1"] = math.nan
            line["swgg"]["values"] = [math.nan] * len(line["swgg"]["values"])
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    failed = next((copy / "cells").glob("swe*slices-4*.json"))
    failed.write_text(json.dumps(json.loads(failed.read_text()) | {"error": "the loss became nan", "scores": {}}))
    page = report([copy], tmp_path / "page")
    text = page.read_text()
    assert ">nan<" in text
    assert "1 of 2 runs failed" in text
    check_in_browser(browser, page)


def test_layers_stand_side_by_side_and_names_are_escaped(browser, layered, tmp_path):
    page = report([layered], tmp_path / "page")
    text = page.read_text()
    assert '<th colspan="3">Layer 6</th><th colspan="3">Layer 12</th>' in text
    assert "at layer 12" in text
    assert "against the layer" in text
    assert "<b>nucleus" not in text
    check_in_browser(browser, page)


def test_runs_of_train_are_told_apart_by_their_choices(browser, digits, tmp_path):
    tiny = ["--slices", "4", "--points", "8", "--batch-size", "64", "--epochs", "2", "--bound-batches", "2"]
    tiny += ["--device", "cpu", "--quiet", "--seeds", "2"]
    for bound in ("0.9", "0.8"):
        out = str(tmp_path / bound)
        assert main(["train", str(digits), "--out", out, *tiny, "--bound", bound]) == 0
    page = report([tmp_path / "0.9", tmp_path / "0.8" / "seed-0"], tmp_path / "page", "--store", digits, "--no-figures")
    text = page.read_text()
    assert "C-SWE, ε = 0.9" in text
    assert "C-SWE, ε = 0.8" in text
    assert f"<span>{tmp_path / '0.8' / 'seed-0' / 'recipe.json'}</span>" in text
    assert "by class" in text
    check_in_browser(browser, page)


def test_comparisons_with_other_recipes_are_told_apart_and_the_same_one_counts_once(layered, tmp_path):
    longer = Plan(("mean",), seeds=2, choices=(*TINY, "epochs=3"))
    compare(layered.parent / "store", tmp_path / "longer", longer, device="cpu")
    material = gather([layered, tmp_path / "longer", layered])
    pools = [row.pool for row in material.table().at(12)]
    assert pools == ["mean:epochs=2", "swe", "mean:epochs=3"]
    assert all(len(row.results) == 2 for row in material.table().rows)
    with pytest.raises(UserError, match="slices: expected one of"):
        build_page(material, slices=7)


def test_runs_on_several_stores_are_told_apart(tmp_path):
    """Stores that are equal in all but their tokens; trained alone, or in a comparison."""
    for number in (0, 1):
        generator = torch.Generator().manual_seed(number)
        splits = ("train", "validation", "test")
        items = [Item(torch.randn(4, 3, generator=generator), n % 2, f"{n}", splits[n % 3]) for n in range(24)]
        TokenStore.create(tmp_path / f"store {number}", items, classes=["a", "b"])
    plan = Plan(("mean",), seeds=1, choices=("epochs=1",))
    for number in (0, 1):
        compare(tmp_path / f"store {number}", tmp_path / f"study {number}", plan, device="cpu")
    words = ["--pool", "mean", "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main(["train", str(tmp_path / "store 1"), "--out", str(tmp_path / "run"), *words]) == 0
    paths = [tmp_path / "study 0", tmp_path / "study 1", tmp_path / "run"]
    material = gather(paths)
    assert [run.label for run in material.runs] == ["GAP, store 1", "GAP, store 2"]
    assert [run.label for run in gather(paths[1:]).runs] == ["GAP"]
    assert build_page(material).html()


def test_the_score_shown_is_one_that_there_is_and_that_says_more_the_larger_it_is(layered, tmp_path):
    with pytest.raises(UserError, match="metric: expected one of top1, top5, macro_f1, balanced but got 'loss'"):
        build_page(gather([layered]), metric="loss")
    copy = tmp_path / "study"
    shutil.copytree(layered, copy)
    for file in (copy / "cells").glob("mean.*"):
        content = json.loads(file.read_text())
        for split in ("validation", "test"):
            content["scores"][split]["nearest"] = 0.4
        file.write_text(json.dumps(content))
    page = build_page(gather([copy]), metric="nearest")
    assert [cell["text"] for cell in page.sections[0].grid["rows"][1]["cells"]] == ["–"] * 6
    assert [cell["best"] for cell in page.sections[0].grid["rows"][0]["cells"]] == [False, True, True] * 2
    assert page.write(tmp_path / "page")


def test_without_the_store_the_rest_is_shown_and_said(study, tmp_path):
    copy = tmp_path / "study"
    shutil.copytree(study, copy)
    plan = json.loads((copy / "compare.json").read_text())
    (copy / "compare.json").write_text(json.dumps(plan | {"store": "gone"}))
    text = report([copy], tmp_path / "page").read_text()
    assert "give --store" in text
    assert "by class</text>" not in text
    shutil.rmtree(copy / "runs")
    assert 'id="slices"' not in report([copy], tmp_path / "bare").read_text()


def test_what_is_no_run_is_said(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "expected the folder of a run or of a comparison" in capsys.readouterr().err
    with pytest.raises(UserError):
        gather([tmp_path])


def test_the_page_is_the_same_every_time_and_its_figures_are_files(layered, tmp_path):
    page = build_page(gather([layered]))
    first, *figures = page.write(tmp_path)
    assert first.read_text() == build_page(gather([layered])).html()
    panels = [panel.name for section in page.sections for figure in section.figures for panel in figure.panels]
    assert {file.name for file in figures} == {f"{name}{kind}" for name in panels for kind in (".png", ".svg")}
    assert (tmp_path / "figures" / "accuracy-slices.png").read_bytes().startswith(b"\x89PNG")


def test_weights_and_profiles_are_what_they_say(study, digits):
    model = load(study / "runs" / "cswe-bound-0.9.layer-0.slices-4.seed-0")
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[0, 4:8] = 1.0  # the second slice's moments
    assert slice_weights(model, None).round(6).tolist() == [0, 1, 0, 0]
    model.pool.readout = Moments(3, means=2)
    model.head = torch.nn.Linear(2 + 4 * 2, 10)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[0, 0] = 3.0  # the first slice's mean
        model.head.weight[0, 8] = 1.0  # the last slice's spread
    assert slice_weights(model, None).round(6).tolist() == [0.9, 0, 0, 0.1]
    model = load(study / "runs" / "cswe-bound-0.9.layer-0.slices-4.seed-0")
    seen = look_at(model, TokenStore(digits))
    assert seen.angles.shape == (4, 4)
    assert np.allclose(np.diag(seen.angles), 0, atol=0.1)
    assert seen.profiles.shape == (4, 10, 4)
    moments = torch.tensor([[[0.0]], [[2.0]], [[10.0]], [[12.0]]])
    profile = class_profiles(moments, torch.tensor([0, 0, 1, 1]), 2)
    assert profile[0, :, 0].tolist() == [-5.0, 5.0]  # means 1 and 11, one standard deviation apart from each point


def head_of(model, *layers):
    model.head = torch.nn.Sequential(*layers) if len(layers) > 1 else layers[0]
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.zeros_(layer.weight)
    return model.head


@torch.no_grad()
def test_weights_are_of_the_answer_in_every_task_and_behind_a_hidden_layer(study, monkeypatch):
    model = load(study / "runs" / "cswe-bound-0.9.layer-0.slices-4.seed-0")
    hidden, out = head_of(model, torch.nn.Linear(16, 5), torch.nn.ReLU(), torch.nn.Linear(5, 10))[::2]
    hidden.weight[:, 4:8] = 1.0  # alike in all hidden units, which biases tell apart
    hidden.weight[4, 8:12] = 9.0
    out.weight[:3, :4] = torch.randn(3, 4)  # and nothing looks at the last unit
    assert slice_weights(model, None).round(6).tolist() == [0, 1, 0, 0]
    head = head_of(model, torch.nn.Linear(16, 2))
    head.weight[:, 0] = 2.0  # in both outputs alike: that decides between no classes, but it is most of two numbers
    head.weight[0, 4] = 2.0
    assert slice_weights(model, None).round(6).tolist() == [0, 1, 0, 0]
    monkeypatch.setattr(Facts, "task", "regression")
    assert slice_weights(model, None).round(6).tolist() == [0.666667, 0.333333, 0, 0]


def broken_off(run, epochs):
    """What a run leaves that was killed after so many epochs, or before the first."""
    (run / "result.json").unlink()
    if epochs:
        log = (run / "log.jsonl").read_text().splitlines(keepends=True)
        (run / "log.jsonl").write_text("".join(log[:epochs]))
    else:
        (run / "log.jsonl").unlink()
        shutil.rmtree(run / "best")
        shutil.rmtree(run / "last")


def train(store, out, *words):
    tiny = ["--points", "8", "--batch-size", "64", "--bound-batches", "2", "--device", "cpu", "--quiet"]
    assert main(["train", str(store), "--out", str(out), *tiny, *map(str, words)]) == 0
    return out


def test_what_is_unfinished_is_in_no_mean_beside_what_is_finished(digits, tmp_path):
    words = ("--pool", "mean", "--epochs", 2, "--seed")
    whole, part, none = (train(digits, tmp_path / f"{seed}", *words, seed) for seed in range(3))
    before = (part / "log.jsonl").read_text().count("\n")
    broken_off(part, 1)
    broken_off(none, 0)
    (row,) = gather([whole, part, none]).table().rows
    assert before == 2
    assert [result.error for result in row.results] == [None, "unfinished: 1 of 2 epochs", "no epoch was finished"]
    assert row.mean("validation", "top1").count == 1
    assert row.note == "1 of 3 runs failed, 1 of 3 runs unfinished"
    # Alone it is looked at while it is under way.
    assert gather([part]).table().rows[0].mean("validation", "top1").count == 1
    # The same run, finished elsewhere, is the one that counts, in any order.
    again = train(digits, tmp_path / "again", *words, 2)
    for paths in ([none, again], [again, none]):
        assert [run.result.error for run in gather(paths).runs] == [None]


def test_a_run_without_an_epoch_stands_at_its_layer(layered, tmp_path):
    run = train(layered.parent / "store", tmp_path / "run", "--pool", "mean", "--epochs", 1, "--layer", 12)
    broken_off(run, 0)
    (found,) = gather([run]).runs
    assert found.cell.layer == 12
    assert "--layer 12 --seed 0" in found.command


def test_commands_can_be_pasted_into_a_shell(digits, tmp_path):
    run = train(digits, tmp_path / "my runs <b>&" / "one", "--pool", "mean", "--epochs", 1)
    (command,) = gather([run]).commands
    assert shlex.split(command)[:5] == ["cswe", "train", "STORE", "--recipe", str(run / "recipe.json")]


def test_profiles_are_of_the_tokens_that_a_run_was_trained_on(digits, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    splits = ("train", "validation", "test")
    for name, dim in (("a", 2), ("b", 3)):
        items = [Item(torch.randn(4, dim, generator=generator), n % 2, f"{n}", splits[n % 3]) for n in range(24)]
        TokenStore.create(tmp_path / name, items, classes=["$x^$", "$5-$10"])
        compare(tmp_path / name, tmp_path / f"study {name}", Plan(("swe",), (2,), 1, choices=("epochs=1",)))
    # Each on its own, though they are of different dimensions; and a dollar in a name is no formula.
    text = report([tmp_path / "study a", tmp_path / "study b"], tmp_path / "page").read_text()
    assert text.count("mean by class</text>") >= 1
    assert "$5-$10" in text
    run = train(digits, tmp_path / "run", "--slices", 2, "--epochs", 1)
    for name, said in (("a", "none of these runs was trained on these tokens"), ("c", "no manifest.json")):
        assert main(["report", str(run), "--store", str(tmp_path / name), "--out", str(tmp_path / "wrong")])
        assert said in capsys.readouterr().err


def test_runs_that_differ_in_many_choices_are_told_apart_by_their_recipes(digits, tmp_path):
    words = ("--pool", "swe", "--slices", 4, "--epochs", 1)
    runs = [train(digits, tmp_path / name, "--recipe", name, *words) for name in ("digits", "proteins")]
    assert [run.label for run in gather(runs).runs] == ["SWE, recipe digits, L = 4", "SWE, recipe proteins, L = 4"]
    report(runs, tmp_path / "page")


def test_files_that_are_no_run_s_are_named(tmp_path, capsys):
    for name, content in (("recipe.json", {"name": "mine"}), ("compare.json", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(json.dumps(content))
        assert main(["report", str(tmp_path / name)]) == 2
        assert f"{tmp_path / name / name}: expected what" in capsys.readouterr().err
