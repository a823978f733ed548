"""Work on the memory of eager CPU tensors directly: when that is allowed, and on which threads."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cswe.ops._transforms import is_transforming


def has_memory(tensor: Tensor) -> bool:
    """Say whether a tensor is plain numbers in the CPU's memory, which numpy and compiled loops may read.

    Not so while torch traces (compile, export, fake tensors) or transforms (vmap, forward-mode derivatives).
    """
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not is_transforming()
    )


def share_out(
    function: Callable[..., None], tasks: Sequence[tuple[Any, ...]], room: Callable[[], Any] | None = None
) -> None:
    """Call a function with every tuple of arguments, on as many threads as torch would use.

    It pays for functions that let go of the interpreter while they work. With ``room``, every thread makes itself one
    working space, the first argument of its calls: fresh memory is slow, each page of it is a trap.
    """
    todo = list(reversed(tasks))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            own = () if room is None else (room(),)
            while True:
                try:
                    arguments = todo.pop()  # goes to one thread only: list methods are atomic
                except IndexError:
                    return
                function(*own, *arguments)
        except BaseException as failure:
            todo.clear()
            failures.append(failure)

    _run_on(min(torch.get_num_threads(), len(tasks)), work)
    if failures:
        raise failures[0]


def _run_on(threads: int, work: Callable[[], None]) -> None:
    if threads < 2:
        work()
        return
    team = _openmp_team()
    if team is not None:
        # Wrapped here, to live as long as the call. It runs once on every thread of the team, this one included.
        team(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: work()), None, threads, 0)
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for helper in helpers:
            helper.result()


@cache
def _openmp_team() -> Callable[..., None] | None:
    """Find the function that runs another on torch's own OpenMP threads, where torch has such threads.

    For milliseconds after each of torch's parallel operations its threads spin, waiting for the next. Threads of our
    own would share the cores with them: on two cores, two such threads are no faster than one.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        team = ctypes.CDLL(None).GOMP_parallel  # GNU's name, which LLVM's and Intel's libraries have too
    except (AttributeError, OSError, TypeError):
        return None
    team.argtypes = (ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.restype = None
    found: Callable[..., None] = team
    return found
