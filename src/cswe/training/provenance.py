"""What a result was computed with: versions, commit, machine, memory."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cswe import __version__
from cswe._process import peak_bytes

_PACKAGES = ("torch", "numpy", "safetensors", "numba", "triton", "scikit-learn", "optuna")


def versions(*others: str) -> dict[str, str]:
    """Return the versions of what computes, and of other packages that are installed.

    Examples
    --------
    >>> versions()["cswe"]
    '0.1.0'
    """
    found = {"cswe": __version__, "python": platform.python_version()}
    for package in (*_PACKAGES, *others):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the device is."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {"device": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


@cache
def commit() -> str | None:
    """Return the commit of this package's source, with a plus sign if files differ from it; None if nobody knows.

    What the environment variable ``CSWE_COMMIT`` says counts first: a copy of the source that was carried to another
    machine may lie in no repository, or in an older one.
    """
    if told := os.environ.get("CSWE_COMMIT"):
        return told
    here = Path(__file__).resolve().parent
    try:
        # Installed into somebody's environment, this file may lie in a repository that is not ours.
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+" if _git(here.parent, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of the largest memory used."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Return the most memory used: by tensors on a GPU since the last reset, or by this whole process so far."""
    if device.type == "cuda":
        return {"bytes": torch.cuda.max_memory_allocated(device), "of": "device"}
    return {"bytes": peak_bytes(), "of": "process"}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
