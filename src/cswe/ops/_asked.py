"""Which way of computing was asked for by hand: by a block, or for the whole process."""

import os
from contextvars import ContextVar

BACKENDS = ("dense", "scan", "cpu", "cuda")
"""The definition; plain torch on any device; compiled by numba; compiled by Triton."""

chosen: ContextVar[str | None] = ContextVar("cswe_backend", default=None)


def asked() -> str:
    """Name the way that was asked for, ``"auto"`` if none was."""
    return chosen.get() or checked(os.environ.get("CSWE_BACKEND", "auto"), "CSWE_BACKEND")


def wants_compiled() -> bool:
    """Whether compiled code may take the place of plain torch, where there is any: unless a plain way was asked for."""
    return asked() not in ("dense", "scan")


def checked(name: str, source: str) -> str:
    """Give the name back if there is such a way, or raise."""
    if name not in (*BACKENDS, "auto"):
        expected = ", ".join(map(repr, (*BACKENDS, "auto")))
        raise ValueError(f"expected {source} to be one of {expected} but got {name!r}")
    return name
