"""Time and peak memory of one cell: in this process on a GPU, in a process of its own on the CPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from cswe._process import forget_peak, peak_bytes, resident_bytes
from cswe.bench.cells import OPERATIONS, Operation, Setting

Result = dict[str, Any]


def measure(operation: str, who: str, setting: Setting, device: str, seconds: float) -> Result:
    """Measure one cell: milliseconds (the best and the median), peak MiB beyond the inputs, and a number to compare.

    On the CPU the peak is that of the process's resident memory, so every cell gets a fresh process.
    """
    if device == "cuda":
        return measure_here(operation, who, setting, device, seconds)
    cell = {"operation": operation, "who": who, "setting": setting.as_dict(), "seconds": seconds}
    child = subprocess.run(
        [sys.executable, "-m", "cswe.bench", "--cell", json.dumps(cell)], capture_output=True, text=True
    )
    if child.returncode:
        return {"skipped": (child.stderr.strip().splitlines() or ["it was killed, for memory perhaps"])[-1]}
    result: Result = json.loads(child.stdout.splitlines()[-1])
    return result


def measure_here(operation: str, who: str, setting: Setting, device: str, seconds: float) -> Result:
    """Measure one cell in this process."""
    prepare = OPERATIONS[operation]
    # Libraries load and loops compile on a small problem, so that neither counts.
    small = replace(setting, batch=2, tokens=16, slices=2, shortest=8 if setting.shortest else None)
    prepare(small, who, device)()
    run = prepare(setting, who, device)
    try:
        result, peak = _with_peak_memory(run, device)
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    times = _times(run, device, seconds)
    captured = _captured(run) if device == "cuda" else None
    return {
        # The best: what lies above it is what else the machine was doing.
        "ms": 1e3 * min(times),
        "median_ms": 1e3 * median(times),
        "repeats": len(times),
        # Replayed, nothing waits for Python: what the device itself needs.
        **({} if captured is None else {"captured_ms": 1e3 * min(_times(captured, device, seconds))}),
        "peak_mib": peak,
        "check": float(result.double().norm()),
    }


def available_bytes(device: str) -> int:
    """Say how much memory could be used now."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _times(run: Operation, device: str, seconds: float) -> list[float]:
    if device == "cuda":
        return times_on_gpu(run, seconds)
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 100):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if times[0] > 4 * seconds:
            break  # slow enough for one to be enough
    return times


def times_on_gpu(run: Operation, seconds: float) -> list[float]:
    """Time runs one after another: as in a training loop the host may be ahead; where it cannot be, that counts."""
    times: list[float] = []
    count = 1
    while not times or (sum(times) < seconds and len(times) < 100):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + 1)]
        for start, stop in events:
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        # The first of them began with nothing in the queue.
        times += [start.elapsed_time(stop) / 1e3 for start, stop in events[1:]]
        count = max(1, min(20, int(seconds / max(times[0], 1e-6)) // 2))
    return times


def capture(run: Operation) -> Operation:
    """Capture an operation in a CUDA graph, as a training loop may; what comes back replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def _captured(run: Operation) -> Operation | None:
    """Capture an operation, if nothing in it stands against that."""
    try:
        return capture(run)
    except (RuntimeError, torch.OutOfMemoryError):
        return None


def _with_peak_memory(run: Operation, device: str) -> tuple[torch.Tensor, float | None]:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before: float = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return result, (torch.cuda.max_memory_allocated() - before) / 2**20
    reader = _peak_reader()
    result = run()
    return result, reader()


def _peak_reader() -> Callable[[], float | None]:
    """Start watching the resident memory; the function that comes back says by how many MiB it has peaked.

    Where the peak so far cannot be forgotten, what stays below it is not known, and ``None`` says so.
    """
    is_fresh = forget_peak()
    earlier = peak_bytes()
    before = resident_bytes() or earlier

    def risen() -> float | None:
        now = peak_bytes()
        if now is None or earlier is None or before is None or not (is_fresh or now > earlier):
            return None
        return (now - before) / 2**20

    return risen
