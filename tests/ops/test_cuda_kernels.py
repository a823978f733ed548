"""The Triton kernels: by Triton's interpreter at small sizes, and on a GPU, where there is one, at real sizes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MATRIX = Path(__file__).with_name("gpu_matrix.py")
KERNELS = Path(__file__).parents[2] / "src" / "cswe" / "ops" / "kernels"


def run(how, *parts):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(MATRIX), how, part] for part in parts]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    said = [process.communicate(timeout=900)[0] for process in running]
    print("".join(said))
    assert all(process.returncode == 0 for process in running), "".join(said)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("part", ["1/2", "2/2"])
def test_interpreted_kernels_agree_with_the_definition(part):
    run("interpret", part)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("capability", "shared_bytes"), [(90, 232448), (89, 101376)])
def test_all_kernels_compile_for_gpus_that_are_not_here(capability, shared_bytes, tmp_path):
    command = [sys.executable, str(MATRIX.with_name("compile_kernels.py")), str(capability), str(shared_bytes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    passes = re.findall(
        r"^def (\w+_pass)\(", "".join(file.read_text() for file in KERNELS.glob("cuda_*.py")), re.MULTILINE
    )
    assert len(passes) > 20
    assert set(passes) <= set(done.stdout.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_agree_with_the_definition_on_a_gpu():
    run("gpu", *(f"{i + 1}/8" for i in range(8)))
