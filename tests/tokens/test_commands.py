"""What `cswe extract` says of what was asked and of what it did, and the commands of the experiments with it."""

import numpy as np
import pytest
import torch

from cswe.tokens import Item, TokenStore, commands
from cswe.tokens.backbones.identity import Identity
from cswe.tokens.inspection import inspect_store, render
from experiments import extract as experiment
from experiments import prepare


@pytest.mark.parametrize("size", [0, float("inf"), float("nan")])
def test_the_size_of_a_shard_is_a_number(tmp_path, size):
    with pytest.raises(ValueError, match=f"shard_mib: expected a positive number but got {size}"):
        commands.extract(tmp_path / "store", shard_mib=size, quiet=True)


def test_options_without_an_effect_are_refused(tmp_path):
    np.savez(tmp_path / "sets.npz", points=np.ones((20, 2, 2)))
    for name, value in (("labels", tmp_path / "none.csv"), ("multi_label", True), ("norm", "none")):
        with pytest.raises(ValueError, match=f"{name}: expected it to be left out"):
            commands.extract(tmp_path / "store", (tmp_path / "sets.npz",), quiet=True, **{name: value})


def test_items_left_out_are_counted(tmp_path, capsys, monkeypatch):
    class Lengths(Identity):
        """A backbone without a model: the one point of a sequence is its length."""

        def __init__(self):
            super().__init__(1)
            self.preparer.one = lambda text: type("Set", (), {"points": np.full((1, 1), len(text)), "weights": None})
            self.kind = "sequence"

    monkeypatch.setattr(commands, "open_backbone", lambda *_: Lengths())
    (tmp_path / "t.csv").write_text("sequence,label\nM,a\nMK,a|b\nMKL,b\n")
    with pytest.warns(UserWarning, match="no items for validation and test"):
        commands.extract(tmp_path / "store", (tmp_path / "t.csv",), quiet=True)
    assert "left out: 1 of 3 items, which do not have exactly one label; --multi-label" in capsys.readouterr().out
    (tmp_path / "p.fasta").write_text(">A\nMK\n>B\nML\n>C\nM\n")
    (tmp_path / "l.csv").write_text("id,label,split\nA,x,train\nB,y,test\n")
    with pytest.warns(UserWarning, match="no items for validation"):
        commands.extract(tmp_path / "other", (tmp_path / "p.fasta",), labels=tmp_path / "l.csv", quiet=True)
    assert "left out: 1 of 3 sequences" in capsys.readouterr().out


def test_experiments_without_their_data_say_what_is_missing(tmp_path, capsys):
    def told(name):
        with pytest.raises(SystemExit) as stop:
            experiment.main([name, "--assets", str(tmp_path), "--stores", str(tmp_path / "stores"), "--device", "cpu"])
        return str(stop.value)

    assert "images: " in told("images")
    assert "deeploc2_swissprot_5fold.csv.gz" in told("proteins")
    assert "make it with python -m experiments.prepare" in told("raw-0")
    for out in ("shapes", "shapes.npz"):  # a name that NumPy would change; and no data
        with pytest.raises(SystemExit):
            prepare.main(["--modelnet", str(tmp_path), "--out", str(tmp_path / out)])
        wanted = "ends in .npz" if out == "shapes" else "train_files.txt"
        assert wanted in capsys.readouterr().err


def test_class_numbers_without_names_may_be_codes_of_any_size(tmp_path):
    TokenStore.create(tmp_path, [Item(torch.ones(2, 3), label=label) for label in (7, 2**40, 7)])
    report = inspect_store(tmp_path)
    assert report["labels"] == {"kind": "class", "classes": {"7": 2, str(2**40): 1}}
    assert f"classes: 7 2, {2**40} 1" in render(report)


def test_what_is_wrong_is_named_as_it_was_given(tmp_path):
    TokenStore.create(tmp_path, [Item(torch.ones(2, 3))])
    with pytest.raises(ValueError, match="sample: expected at least 1 but got 0"):
        inspect_store(tmp_path, sample=0)
    with pytest.raises(ValueError, match="workers: expected 0 or more but got -1"):
        commands.extract(tmp_path / "new", workers=-1)
    assert not (tmp_path / "new").exists()
