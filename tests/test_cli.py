"""The command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cswe import __version__
from cswe.cli import COMMANDS, main
from cswe.tokens import TokenStore, commands

ROOT = Path(__file__).resolve().parents[1]


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cswe {__version__}\n"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main(["extrakt"]) == 2
    assert "expected one of extract" in capsys.readouterr().err


def test_as_a_module_and_as_a_script():
    done = subprocess.run([sys.executable, "-m", "cswe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"cswe {__version__}\n"
    assert 'cswe = "cswe.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_digits_from_end_to_end(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="needs the extra 'data'")
    out = str(tmp_path / "store")
    assert main(["extract", "--out", out, "--limit", "50", "--quiet"]) == 0
    assert "50 items" in capsys.readouterr().out
    assert main(["extract", "--out", out, "--limit", "50", "--quiet"]) == 1
    assert "use --resume" in capsys.readouterr().err
    assert main(["extract", "--out", out, "--limit", "50", "--quiet", "--resume"]) == 0
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    text = capsys.readouterr().out
    for word in ("items: 50", "lengths:", "classes", "norm", "checksums: all bytes", "digits"):
        assert word in text
    assert main(["inspect", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == 50


def test_progress_shows_items_and_tokens(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="needs the extra 'data'")
    assert main(["extract", "--out", str(tmp_path / "store")]) == 0
    bar = capsys.readouterr().err
    assert "1797/1797" in bar
    assert "tokens/s" in bar


def test_stopped_by_hand_it_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_extraction", stop)
    assert main(["extract", "--out", str(tmp_path / "digits")]) == 130
    assert "stopped; the same command with --resume goes on from here" in capsys.readouterr().err
    monkeypatch.setattr(commands, "inspect_store", stop)
    assert main(["inspect", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "cswe inspect: stopped\n"


def test_damage_is_an_error_and_can_be_skipped(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="needs the extra 'data'")
    out = tmp_path / "store"
    assert main(["extract", "--out", str(out), "--shard-mib", "0.01", "--quiet"]) == 0
    file = out / "shards" / "00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(out)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert main(["inspect", str(out), "--skip-bad"]) == 0
    report = capsys.readouterr()
    assert "dropped" in report.err
    assert "dropped shards: 1" in report.out
    assert len(TokenStore(out)) < 1797
    assert main(["extract", "--out", str(out), "--shard-mib", "0.01", "--quiet", "--resume"]) == 0
    assert len(TokenStore(out)) == 1797


def test_wrong_use_is_told_in_one_line(tmp_path, capsys):
    assert main(["extract", "--out", str(tmp_path), "--data", "nowhere.csv"]) == 2
    assert (
        capsys.readouterr().err
        == "cswe extract: nowhere.csv: expected a file or folder but there is none of that name\n"
    )
    assert main(["inspect", str(tmp_path)]) == 1
    assert "no manifest.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["extract", "--dtype", "int8"])
