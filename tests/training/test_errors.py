"""What goes wrong is told in a line that says what to do; the last good checkpoint stays; the exit code is right."""

import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import cswe
from cswe.cli import COMMANDS, main
from cswe.nn import SWGGBound
from cswe.tokens import Item, TokenStore
from cswe.training import TrainingError, UserError
from cswe.training.checkpoint import LAST, load
from cswe.training.data import check_store
from cswe.training.optim import make_duals

OPTIONAL = {
    "numba", "transformers", "PIL", "h5py", "pandas", "pyarrow", "sklearn", "accelerate", "optuna",
    "tensorboard", "matplotlib",
}  # fmt: skip


def error_of(capsys, code, *arguments):
    capsys.readouterr()
    assert main(list(map(str, arguments))) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_nan_loss(digits, tiny, tmp_path, capsys):
    run = tmp_path / "run"
    explode = ["--schedule", "step", "--schedule-every", "1", "--schedule-factor", "1e30", "--head", "mlp"]
    said = error_of(capsys, 1, "train", digits, "--out", run, *tiny, *explode, "--pool", "mean")
    assert "loss became" in said
    assert "in epoch 2" in said
    assert f"The last good checkpoint is {run / LAST}" in said
    assert "lower --lr" in said
    assert json.loads((run / LAST / "model.json").read_text())["epoch"] == 1
    assert all(bool(torch.isfinite(value).all()) for value in cswe.load(run / LAST).state_dict().values())


def test_a_model_that_is_not_finite_is_not_kept(digits, tiny, tmp_path, capsys):
    """Its loss is that of before the step, and so is finite in an epoch of one batch."""
    run = tmp_path / "run"
    words = ["train", digits, "--out", run, *tiny, "--batch-size", "240", "--pool", "mean", "--head", "mlp"]
    said = error_of(capsys, 1, *words, "--lr", "1e20")
    assert "not finite any more. There is no checkpoint yet; lower --lr" in said
    assert not [path for path in run.iterdir() if path.is_dir()]


def test_a_rate_beyond_all_numbers(digits, tiny, tmp_path, capsys):
    said = error_of(capsys, 1, "train", digits, "--out", tmp_path / "run", *tiny, "--pool", "mean", "--lr", "1e300")
    assert "the weights ran away" in said


def test_a_multiplier_that_runs_away(digits, tiny, tmp_path, capsys):
    run = tmp_path / "run"
    bound = ["--bound", "0.01", "--bound-scale", "absolute", "--slack-weight", "None"]
    away = ["--dual-lr", "5", "--dual-limit", "20", "--lr", "1e-6"]
    said = error_of(capsys, 1, "train", digits, "--out", run, *tiny, *bound, *away)
    assert "the multiplier of slice" in said
    assert "ran away" in said
    assert "raise --bound" in said
    assert "no checkpoint yet" in said or str(run / LAST) in said


def test_values_that_are_not_finite_where_steps_do_not_look(digits, tiny, tmp_path, capsys, content, monkeypatch):
    words = ["train", digits, *tiny, "--pool", "cswe"]
    with monkeypatch.context() as patched:
        patched.setattr("cswe.training.state.make_duals", lambda *given: _looking(make_duals(*given)))
        assert main([*map(str, words), "--out", str(tmp_path / "looking")]) == 0
    assert main([*map(str, words), "--out", str(tmp_path / "not")]) == 0
    assert content(tmp_path / "looking") == content(tmp_path / "not")
    values, calls = SWGGBound.__call__, []

    def broken(self, *inputs):
        calls.append(1)
        return values(self, *inputs) * (math.nan if len(calls) == 2 else 1.0)

    monkeypatch.setattr(SWGGBound, "__call__", broken)
    monkeypatch.setattr(import_module("cswe.training.fit"), "_check_loss", lambda *_: None)
    said = error_of(capsys, 1, *words, "--out", tmp_path / "broken")
    assert "expected finite values of constraint 'swgg' but got nan" in said
    assert "lower --lr or --dual-lr" in said


def _looking(duals):
    duals.look_every = 1
    return duals


def test_a_bound_that_cannot_be_met(digits, tiny, tmp_path, capsys):
    bound = ["--bound", "0.01", "--bound-scale", "absolute", "--slack-weight", "None", "--patience", "4"]
    still = ["--lr", "1e-6", "--dual-lr", "1e-3"]
    said = error_of(capsys, 0, "train", digits, "--out", tmp_path / "run", *tiny, *bound, *still)
    assert "warning: the bound of constraint 'swgg' may be out of reach" in said
    assert "a larger bound" in said
    said = error_of(capsys, 2, "train", digits, "--out", tmp_path / "other", *tiny, "--bound", "-1")
    assert said == "cswe train: bound: expected more than 0 but got -1\n"


def test_a_bound_that_is_never_in_force(digits, tiny, tmp_path, capsys):
    words = ["train", digits, *tiny, "--batch-size", "1000"]  # three epochs of one batch
    for batches, told in ((3, True), (2, False)):
        said = error_of(capsys, 0, *words, "--out", tmp_path / f"{batches}", "--bound-batches", batches)
        assert ("warning: the bound is never in force: its level is measured on the first 3 batches" in said) is told
    said = error_of(capsys, 0, *words, "--out", tmp_path / "swe", "--bound-batches", 3, "--pool", "swe")
    assert "never in force" not in said


def test_a_class_missing_from_validation(make_store, tiny, tmp_path, capsys):
    labels = [2 if n % 4 == 0 else (n // 4) % 2 for n in range(40)]  # class 2 falls into training alone
    store = make_store(tmp_path / "store", labels, classes=["a", "b", "rare"])
    said = error_of(capsys, 0, "train", store.path, "--out", tmp_path / "run", *tiny, "--pool", "mean")
    assert "warning: no item of class 'rare' is in validation" in said


def test_a_store_of_another_width(trained, make_store, tmp_path, capsys):
    other = make_store(tmp_path / "store", [0, 1] * 8, dim=5, classes=["a", "b"])
    for command in (["evaluate"], ["embed", "--out", tmp_path / "v.npy"], ["neighbors", "--query", "0"]):
        said = error_of(capsys, 2, command[0], trained, other.path, *command[1:])
        assert "expected tokens of dimension 2, as the model was trained on, but got 5" in said
        assert "identity" in said
    with pytest.raises(UserError, match="expected tokens of dimension 2"):
        cswe.load(trained).embed(torch.randn(2, 4, 5))


def test_tokens_of_another_layer_or_backbone(tmp_path, tiny, capsys):
    for layer in (6, 12):
        items = [
            Item({layer: torch.randn(3, 4)}, n % 2, str(n), ("train", "validation", "test")[n % 3]) for n in range(24)
        ]
        TokenStore.create(tmp_path / f"{layer}", items, classes=["a", "b"])
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "6"), "--out", str(run), *tiny, "--pool", "mean"]) == 0
    for command in (["evaluate"], ["embed", "--out", tmp_path / "v.npy"], ["neighbors", "--query", "0"]):
        said = error_of(capsys, 2, command[0], run, tmp_path / "12", *command[1:])
        assert "expected tokens of layer 6, which the model was trained on, but got layer 12" in said
    store, known = TokenStore(tmp_path / "6"), {"name": "dino", "architecture": "ViT", "revision": "1"}
    facts = cswe.load(run).facts
    check_store(facts, store)
    told = replace(facts, tokens=replace(facts.tokens, backbone=known, preprocessing={"size": (224, 224)}))
    check_store(told, store)  # which does not say where its tokens come from
    for backbone, preprocessing, said in (
        (known | {"name": "here/dino"}, {"size": [224, 224]}, ""),
        (known | {"revision": "2"}, {"size": [224, 224]}, r"\(dino, revision 1\) but got revision 2"),
        (known, {"size": [384, 384]}, "items prepared like those"),
    ):
        spec = replace(store.spec, backbone=backbone, preprocessing=preprocessing)
        store.manifest = replace(store.manifest, spec=spec)
        with pytest.raises(UserError, match=said) if said else nullcontext():
            check_store(told, store)


def test_labels_out_of_range(make_store, tiny, tmp_path, capsys, monkeypatch):
    store = make_store(tmp_path / "store", [n % 3 for n in range(36)], dim=2)  # classes without names
    assert main(["train", str(store.path), "--out", str(tmp_path / "run"), *tiny, "--pool", "mean"]) == 0
    more = make_store(tmp_path / "more", [n % 5 for n in range(36)], dim=2)
    said = error_of(capsys, 2, "evaluate", tmp_path / "run", more.path)
    assert "expected class numbers from 0 to 2 but got 3 for item 'item 3'" in said
    named = make_store(tmp_path / "named", [n % 3 for n in range(36)], dim=2, classes=["a", "b", "c"])
    wrong = named.labels.clone()
    wrong[4] = 7
    monkeypatch.setattr(TokenStore, "labels", wrong)
    said = error_of(capsys, 2, "train", named.path, "--out", tmp_path / "other", *tiny)
    assert "expected class numbers from 0 to 2 but got 7 for item 'item 4'" in said


def test_labels_of_another_kind_or_none(trained, make_store, tiny, tmp_path, capsys):
    items = [Item(torch.randn(3, 2), id=str(number), weights=torch.ones(3)) for number in range(8)]
    bare = TokenStore.create(tmp_path / "bare", items)
    assert "expected labels to learn from" in error_of(capsys, 2, "train", bare.path, "--out", tmp_path / "run", *tiny)
    assert "expected labels of kind 'class', as in training, but got 'none'" in error_of(
        capsys, 2, "evaluate", trained, bare.path
    )
    real = make_store(tmp_path / "real", [[0.5]] * 8, kind="real", dim=2)
    assert "has no token weights" in error_of(capsys, 2, "evaluate", trained, real.path)


def test_labels_of_another_width(make_store, tiny, tmp_path, capsys):
    stores = [make_store(tmp_path / f"{width}", [[1.0] * width] * 16, kind="real") for width in (2, 3)]
    assert main(["train", str(stores[0].path), "--out", str(tmp_path / "run"), *tiny, "--pool", "mean"]) == 0
    said = error_of(capsys, 2, "evaluate", tmp_path / "run", stores[1].path)
    assert "expected 2 numbers a label, as in training, but got 3" in said


def test_a_score_that_is_no_number_is_json(make_store, tiny, tmp_path, capsys):
    store = make_store(tmp_path / "store", [[0, 0]] * 16, kind="multilabel")
    assert main(["train", str(store.path), "--out", str(tmp_path / "run"), *tiny, "--pool", "mean"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), str(store.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["f_max"] is None


def test_control_c(server, digits, tiny, tmp_path):
    run = tmp_path / "run"
    long = [*tiny, "--epochs", "100000", "--pool", "mean"]
    answer = server.run("train", digits, "--out", run, *long, when=run / "log.jsonl", after=0.2, signal="INT")
    assert answer["codes"] == [130]
    (said,) = answer["said"]
    assert f"cswe train: stopped; {run / LAST} has epoch" in said
    assert "--resume" in said
    assert "Traceback" not in said
    load(run)


def test_a_file_where_a_folder_should_be(trained, digits, tiny, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "space.json").write_text('{"lr": [0.01]}')
    said = error_of(capsys, 2, "train", digits, "--out", file, *tiny)
    assert said.endswith(f"cswe train: {file}: expected a folder but it is a file; choose another\n")
    below = file / "sub"
    for command in (
        ["train", digits, "--out", below, *tiny],
        ["compare", digits, "--out", below, "--pools", "mean"],
        ["sweep", digits, "--out", below, "--space", tmp_path / "space.json"],
        ["embed", trained, digits, "--out", below / "v.npy", "--quiet"],
        ["explain", trained, digits, "--item", "0", "--out", below / "x.csv"],
    ):
        assert f"{below}: expected a folder but {file} is a file" in error_of(capsys, 2, *command)


@pytest.mark.parametrize("choice", ["lr", "bound", "slack-weight", "temperature", "weight-decay", "slack-factor"])
def test_a_choice_without_end(digits, tiny, tmp_path, capsys, choice):
    said = error_of(capsys, 2, "train", digits, "--out", tmp_path / "run", *tiny, f"--{choice}", "inf")
    assert said == f"cswe train: {choice.replace('-', '_')}: expected a finite number but got inf\n"
    assert main(["train", str(digits), "--out", str(tmp_path / "run"), *tiny, "--clip", "inf", "--pool", "mean"]) == 0


def test_nothing_to_hold_out_for_validation(make_store, tiny, tmp_path, capsys):
    for kind, labels, each in (("class", list(range(6)), ", class by class,"), ("real", [[0.5]] * 4, "")):
        store = make_store(tmp_path / kind, labels, kind=None if kind == "class" else kind, splits=("train",))
        said = error_of(capsys, 2, "train", store.path, "--out", tmp_path / "run", *tiny)
        assert f"and a share of 0.1 of {len(labels)} training items{each} is none or all of them; give some the" in said


def test_other_wrong_uses(trained, digits, tiny, tmp_path, capsys):
    train = ["train", digits, "--out", tmp_path / "run"]
    said = error_of(capsys, 2, *train, "--recipe", "imges")
    assert "expected one of digits, images, points, proteins, tuned, or a file that ends in .json, but got" in said
    assert "expected CLS vectors but" in error_of(capsys, 2, *train, *tiny, "--pool", "cls")
    assert "seeds: expected at least 1" in error_of(capsys, 2, *train, *tiny, "--seeds", "0")
    assert "no manifest.json" in error_of(capsys, 1, "train", tmp_path / "nowhere", "--out", tmp_path / "run", *tiny)
    assert "found no model.json" in error_of(capsys, 2, "evaluate", tmp_path, digits)
    assert "split: expected one of" in error_of(capsys, 2, "evaluate", trained, digits, "--split", "holdout")
    said = error_of(capsys, 2, "embed", trained, digits, "--out", tmp_path / "v.txt", "--quiet")
    assert "ends in .npy, .parquet, .h5 but got 'v.txt'" in said
    assert "item: expected an id" in error_of(
        capsys, 2, "explain", trained, digits, "--item", "none", "--out", tmp_path / "x.csv"
    )
    assert "slice: expected a number below 4" in error_of(
        capsys, 2, "explain", trained, digits, "--item", "0", "--slice", "9", "--out", tmp_path / "x.csv"
    )
    assert "label: expected one of 0, 1" in error_of(
        capsys, 2, "explain", trained, digits, "--item", "0", "--label", "x", "--out", tmp_path / "x.csv"
    )
    assert "device: expected one that torch can use here" in error_of(capsys, 2, *train, "--device", "abacus")
    if not torch.cuda.is_available():
        for command in (train, ["evaluate", trained, digits], ["compare", digits, "--out", tmp_path / "s"]):
            assert "but got 'cuda'" in error_of(capsys, 2, *command, "--device", "cuda")
    for wrong in (["--pool", "median"], ["--slices", "abc"], ["--slices"]):
        with pytest.raises(SystemExit) as stop:
            main(["train", str(digits), "--out", str(tmp_path / "run"), *wrong])
        assert stop.value.code == 2
        assert "cswe train" in "".join(capsys.readouterr())  # and not the parser that looks for the recipe first


def test_digits_that_are_no_number(trained, digits, tmp_path, capsys):
    out = ["--out", tmp_path / "x.csv"]
    for words in (["neighbors", trained, digits, "--query", "²"], ["explain", trained, digits, "--item", "²", *out]):
        assert "item: expected an id or a position below 240 but got '²'" in error_of(capsys, 2, *words)
    said = error_of(capsys, 2, "explain", trained, digits, "--item", "0", "--label", "²", *out)
    assert "label: expected one of 0, 1" in said


def test_an_unknown_suffix_is_told_before_a_folder_is_made(trained, digits, tmp_path, capsys):
    said = error_of(capsys, 2, "explain", trained, digits, "--item", "0", "--out", tmp_path / "new" / "x.txt")
    assert "ends in .csv, .png, .ply but got 'x.txt'" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("raw", [False, True])
def test_no_sets_at_a_time(trained, digits, tmp_path, capsys, raw):
    words = ["--out", tmp_path / "v.npy", "--batch-size", "0", "--quiet"]
    said = error_of(capsys, 2, "embed", trained, "digits" if raw else digits, *words)
    assert "batch_size: expected at least 1 but got 0" in said


@pytest.mark.parametrize(
    ("part", "choice", "value", "said"),
    [
        ("optimization", "lr", "0.1", "lr: expected float but got '0.1'"),
        ("optimization", "lr", None, "lr: expected float but got None"),
        ("optimization", "epochs", 2.5, "epochs: expected int but got 2.5"),
        ("pooling", "pool", 5, "pool: expected text but got 5"),
        ("pooling", None, 5, "pooling: expected choices by name but got 5"),
    ],
)
def test_a_recipe_of_other_types(trained, digits, tmp_path, capsys, part, choice, value, said):
    content = json.loads((trained / "recipe.json").read_text())["recipe"]
    content[part] = {**content[part], choice: value} if choice else value
    (tmp_path / "recipe.json").write_text(json.dumps(content))
    words = ["train", digits, "--recipe", tmp_path / "recipe.json", "--out", tmp_path / "run"]
    assert f"{tmp_path / 'recipe.json'}: {said}" in error_of(capsys, 2, *words)


def test_damaged_checkpoints_are_named(trained, tmp_path, capsys, digits):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    weights = copy / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert f"{weights}: is damaged" in error_of(capsys, 2, "evaluate", copy, digits)
    for damage in ("{", '{"format": "cswe-model", "version": 1}'):
        (copy / "best" / "model.json").write_text(damage)
        assert "model.json: is damaged" in error_of(capsys, 2, "evaluate", copy, digits)


def test_a_full_disk_is_told(digits, tiny, tmp_path, capsys, full_disk):
    words = ["train", digits, "--out", tmp_path / "run", *tiny, "--pool", "mean", "--head", "mlp", "--hidden", "9999"]
    with full_disk(2**16):
        said = error_of(capsys, 1, *words)
    assert f"{tmp_path / 'run' / 'best.partial' / 'model.safetensors'}: cannot be written" in said
    assert "make room" in said
    assert main([*map(str, words), "--resume"]) == 0


@pytest.mark.parametrize("name", ["recipe.json", "last/training.json"])
def test_a_run_whose_files_lack_something_is_not_gone_on_with(trained, tiny, tmp_path, capsys, digits, name):
    shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "copy" / name).write_text("{}")
    said = error_of(capsys, 2, "train", digits, "--out", tmp_path / "copy", *tiny, "--resume")
    assert f"{tmp_path / 'copy' / name}: is damaged (KeyError" in said


def test_errors_have_their_kinds():
    assert issubclass(UserError, ValueError)
    assert issubclass(TrainingError, RuntimeError)


def test_every_command_has_help_with_an_example(capsys):
    for name in ("train", "evaluate", "embed", "neighbors", "explain"):
        assert name in COMMANDS
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code in (0, None)
        told = " ".join(capsys.readouterr().out.split())
        assert f"Example: cswe {name}" in told


def test_the_training_room_needs_hard_dependencies_alone(server):
    assert not server.modules & OPTIONAL
