"""Work on the memory of eager CPU tensors directly: when that is allowed, and on which threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def has_memory(tensor: Tensor) -> bool:
    """Say whether a tensor is plain numbers in the CPU's memory, which numpy and compiled loops may read.

    Not so while torch traces (compile, export, fake tensors) or transforms (vmap, forward-mode derivatives).
    """
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def share_out(
    function: Callable[..., None], tasks: Sequence[tuple[Any, ...]], room: Callable[[], Any] | None = None
) -> None:
    """Call a function with every tuple of arguments, on as many threads as torch would use.

    It pays for functions that let go of the interpreter while they work. The threads are made for this call: starting
    one is cheap beside the work, and a pool that is kept would not survive a fork. With ``room``, every thread makes
    itself one working space, the first argument of its calls: fresh memory is slow, each page of it is a trap.
    """
    todo = list(reversed(tasks))

    def work() -> None:
        own = () if room is None else (room(),)
        while True:
            try:
                arguments = todo.pop()  # goes to one thread only: list methods are atomic
            except IndexError:
                return
            function(*own, *arguments)

    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    if helpers < 1:
        work()
        return
    with ThreadPoolExecutor(helpers) as pool:
        running = [pool.submit(work) for _ in range(helpers)]
        work()
        for helper in running:
            helper.result()
