"""The house rules: who may import whom, and what a bare import loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "cswe"
# A room imports only from rooms above it.
ROOMS = [
    "ops",
    "constrained",
    "nn",
    "tokens",
    "training",
    "cluster",
    "report",
    "adapters",
    "compat",
    "bench",
    "cli",
    "demo",
]
ALONE = {"constrained"}  # imports nothing of ours
NOT_FOR_TRAINING = {"cluster", "report"}
OPTIONAL = {
    "numba", "triton", "transformers", "PIL", "h5py", "pandas", "pyarrow", "sklearn", "accelerate", "optuna",
    "tensorboard", "matplotlib", "jinja2", "ray", "fsspec", "s3fs", "huggingface_hub", "sentence_transformers",
    "torch_geometric", "lightning", "onnx", "onnxscript", "onnxruntime", "ot", "fswlib",
}  # fmt: skip


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: a relative import hides the room it comes from")
        for name in names:
            parts = name.split(".")
            if parts[0] == "cswe" and len(parts) > 1 and not parts[1].startswith("_"):
                yield parts[1]


FILES = sorted(path for path in SOURCE.rglob("*.py") if room_of(path) in ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_upwards(path):
    room = room_of(path)
    for other in imported_rooms(path):
        if other == room or other not in ROOMS:
            continue
        assert room not in ALONE, f"{room} imports {other}"
        assert ROOMS.index(other) < ROOMS.index(room), f"{room} imports {other}, which lies below it"
        assert not (room == "training" and other in NOT_FOR_TRAINING)


def test_the_check_sees_a_wrong_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from cswe.nn import SWEPool\nimport cswe.training.fit\n")
    assert list(imported_rooms(bad)) == ["nn", "training"]


def test_a_bare_import_loads_no_optional_dependency():
    code = "import sys, cswe, cswe.ops, cswe.constrained; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    # torch itself looks for some of these; only what cswe adds counts.
    code = "import sys, torch, numpy, safetensors; print(*sorted(m.split('.')[0] for m in sys.modules))"
    before = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not (set(loaded) - set(before)) & OPTIONAL
