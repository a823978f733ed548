"""Every Python example of the README runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.strip().splitlines()[-1][:30])
def test_example(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    exec(compile(code, str(README), "exec"), names)
    if "batch" in names:
        assert names["batch"].tokens.shape[::2] == (32, 16)
    if "vectors" in names:
        assert names["vectors"].shape == (32, 128)
    if "duals" in names:
        assert names["duals"].steps == 10
        assert torch.isfinite(names["loss"])


def test_there_are_examples():
    assert len(EXAMPLES) == 3


def test_the_first_screen_has_both_commands_and_a_short_example():
    first_screen = "\n".join(README.read_text().splitlines()[:32])
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 5
