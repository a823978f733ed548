"""The Triton kernels: by Triton's interpreter at small sizes, and on a GPU, where there is one, at real sizes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MATRIX = Path(__file__).with_name("gpu_matrix.py")


def run(how):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, str(MATRIX), how], capture_output=True, text=True, env=environment, timeout=900
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_agree_with_the_definition():
    run("interpret")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_agree_with_the_definition_on_a_gpu():
    run("gpu")
