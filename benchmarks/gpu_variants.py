"""Time variants of the GPU passes on one machine: `python benchmarks/gpu_variants.py` prints a table per setting."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
import cswe.nn.pool as pool_module
import cswe.ops.kernels.cuda as way
from cswe import PrimalDual
from cswe.bench.meter import capture, times_on_gpu
from cswe.nn import SWEPool, SWGGBound
from cswe.ops import SoftSort, swgg
from cswe.ops.kernels import Problem, backend, cuda_sort
from cswe.ops.measure import Measure, centre_of


def problem_of(B, N, d, L, tau):
    g = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(B, N, d, device="cuda", generator=g).half()
    y = torch.randn(N, d, device="cuda", generator=g)
    slices = torch.nn.functional.normalize(torch.randn(L, d, device="cuda", generator=g), dim=-1)
    centre = centre_of(Measure(y, None, False, None))
    centred = x.float() - centre
    points, order = torch.sort((centred @ slices.T).transpose(1, 2).contiguous(), dim=-1, stable=True)
    ranked = (y - centre)[((y - centre) @ slices.T).argsort(0).T] / N
    return Problem(points, order, x, centred.square().sum(-1), ranked.contiguous(), centre, None, None, None, tau)


def median_ms(run):
    return 1e3 * median(times_on_gpu(run, seconds=1.0))


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


# Passes are timed one by one, so that a variant may change something of several of them.
VARIANTS = [
    {},
    {"chunk_registers": 120, "target_registers": 176},
    {"chunk_registers": 128, "target_registers": 160},
]


VARIED = ("vit fp16 0.01", "long fp16")


def kernel_times(run, repeats=5):
    """Device time per kernel and step, in ms."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / repeats / 1000 for e in trace.key_averages() if e.self_device_time_total}


def variants(setting, report, only=None):
    """Time every kernel of a step under other tunings."""
    for index, change in enumerate(VARIANTS):
        if only is not None and index != only:
            continue
        way.tuning = way.Tuning()._replace(**change)
        try:
            _, _, run = whole(**CASES[setting], dense_too=False)
            times = kernel_times(run)
            top = sorted(times.items(), key=lambda item: -item[1])[:14]
            parts = ", ".join(f"{name.split('_pass')[0][:14]} {time:.3f}" for name, time in top)
            report(f"{setting} {change} {sum(times.values()):.3f} = {parts}")
        except Exception as problem_met:
            report(f"{setting} {change}: {type(problem_met).__name__} {str(problem_met)[:80]}")
    way.tuning = way.Tuning()


def whole(B, N, d, L, tau, dtype, M=None, lengths=None, dense_too=True):
    g = torch.Generator(device="cuda").manual_seed(3)
    x = torch.randn(B, N, d, device="cuda", generator=g).to(dtype)
    y = torch.randn(M or N, d, device="cuda", generator=g, requires_grad=True)
    slices = torch.randn(L, d, device="cuda", generator=g, requires_grad=True)
    mask = None if lengths is None else torch.arange(N, device="cuda") < lengths[:, None]

    def run():
        y.grad = slices.grad = None
        value = swgg(x, y, slices, SoftSort(tau), x_mask=mask)
        value.sum().backward()
        return value

    def measured():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ms = median_ms(run)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        return ms, peak, [t.detach() for t in (run(), y.grad, slices.grad)]

    fast = measured()
    slow = None
    if dense_too:
        with backend("dense"):
            slow = measured()
    return fast, slow, run


def captured_ms(run, way="auto"):
    """Time of a step replayed from a CUDA graph: what the device needs, without waiting for the host."""
    try:
        with backend(way):
            replay = capture(run)
        return median_ms(replay)
    except Exception as problem_met:
        print(f"not captured: {type(problem_met).__name__} {str(problem_met)[:160]}")
        return math.nan


def whole_table(report, cases):
    for name, arguments in cases.items():
        try:
            fast, slow, run = whole(**arguments)
            pairs = [] if slow is None else zip(fast[2], slow[2], strict=True)
            errors = " ".join(f"{error(a, b):.1e}" for a, b in pairs)
            ratio = "" if slow is None else f"dense {slow[0]:8.2f} ms {slow[1]:6.2f} GiB  {slow[0] / fast[0]:6.1f}x"
            replayed = captured_ms(run), captured_ms(run, "dense")
            graph = f"captured {replayed[0]:6.3f} / {replayed[1]:7.2f} ms {replayed[1] / replayed[0]:5.1f}x"
            report(f"{name:14} {fast[0]:7.3f} ms {fast[1]:6.3f} GiB  {ratio}  {graph}  {errors}")
        except Exception as problem_met:
            report(f"{name}: {type(problem_met).__name__} {str(problem_met)[:160]}")
        torch.cuda.empty_cache()


def profile(report, arguments, rows=16):
    _, _, run = whole(**arguments, dense_too=False)
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    report(f"profile {arguments}: {sum(e.count for e in events) / 5:.0f} device operations a step")
    for e in events[:rows]:
        report(f"   {e.self_device_time_total / 5000:7.3f} ms  {e.count // 5:4d}x  {e.key[:90]}")


def counted(arguments):
    """Run one step between the marks that ``ncu --profile-from-start off`` looks for."""
    _, _, run = whole(**arguments, dense_too=False)
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def step_of(pool, head, N, bound=None, B=1024, d=192):
    """Make a training step on drawn tokens, 200 classes: pool, head, Adam, and multipliers if there is a bound."""
    x, labels = torch.randn(B, N, d, device="cuda").half(), torch.randint(200, (B,), device="cuda")
    optimizer = torch.optim.Adam([*pool.parameters(), *head.parameters()], lr=1e-3)
    duals = None if bound is None else PrimalDual(bound, lr=1e-3, slack_lr=1e-3, slack_weight=0.1)
    if pool.statistics is not None:
        pool.statistics.measure(x[:8].reshape(-1, d).float())

    def step():
        loss = torch.nn.functional.cross_entropy(head(pool(x)), labels)
        (loss if duals is None else duals.lagrangian(loss, x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if duals is not None:
            duals.step()

    return step


def paper_step(slices, bounded, N=196, d=192):
    """A step of SWE or C-SWE in the paper's form."""
    pool = SWEPool(d, slices, points=N, readout="flatten", order="reference", init="normal").cuda()
    bound = SWGGBound(pool, bound=21.0, relaxation=SoftSort(0.01)) if bounded else None
    return step_of(pool, torch.nn.Linear(pool.out_dim, 200).cuda(), N, bound)


def tuned_step(readout, weightings, slices, N, d=192):
    """A step of a pool of the tuned comparison: half of the tokens, standardised, a normalised head."""
    pool = SWEPool(d, slices, readout=readout, weightings=weightings, standardize=True).cuda()
    normalised = torch.nn.BatchNorm1d(pool.out_dim, affine=False)
    return step_of(pool, torch.nn.Sequential(normalised, torch.nn.Linear(pool.out_dim, 200)).cuda(), N)


TUNED = [
    ("moments:2", 2, 256, 98),
    ("moments:2", 2, 256, 100),
    ("moments:2", 1, 512, 98),
    ("statistics", 2, 256, 98),
    ("statistics", 2, 256, 100),
    ("moments:4", 0, 192, 98),
]


def steps(report):
    """Wall and device time of training steps, in deterministic mode, as experiments are run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for readout, weightings, slices, tokens in TUNED:
        told = []
        for name, kernels in (("as stored", pool_module.gpu_kernels), ("copied to float32", lambda *_, **__: None)):
            with patch.object(pool_module, "gpu_kernels", kernels):
                device = sum(kernel_times(tuned_step(readout, weightings, slices, tokens)).values())
            told.append(f"{name} {device:.2f} ms on the device")
        report(f"step of {readout}, {weightings} weightings, L = {slices}, N = {tokens}: tokens {', '.join(told)}")
    for slices, bounded in ((16, True), (64, True), (128, True), (128, False)):
        step = paper_step(slices, bounded)
        device = sum(kernel_times(step).values())
        name = "C-SWE" if bounded else "SWE"
        report(f"step of {name}, L = {slices}: {median_ms(step):.2f} ms, {device:.2f} ms on the device")
    torch.use_deterministic_algorithms(False)


def growth(report):
    """Time over N at fixed B, L and d, and its slope between the ends."""
    times = {}
    for count in (256, 512, 1024, 2048, 4096, 8192, 16384):
        fast, _, _ = whole(B=16, N=count, d=128, L=32, tau=0.01, dtype=torch.float16, dense_too=False)
        times[count] = fast[0]
        torch.cuda.empty_cache()
    slope = math.log(times[16384] / times[256]) / math.log(64)
    late = math.log(times[16384] / times[2048]) / math.log(8)
    report(f"growth {', '.join(f'{n}: {t:.2f}' for n, t in times.items())} ms; slope {slope:.2f}, from 2048 {late:.2f}")


def cpu_profile(arguments):
    """Where the host spends its time."""
    import cProfile
    import pstats
    import time

    _, _, run = whole(**arguments, dense_too=False)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        run()
    print(f"host time a step {(time.perf_counter() - began) * 50:.2f} ms")
    torch.cuda.synchronize()
    problem = problem_of(8, 100, 64, 4, 0.1)
    for name, call in {
        "one small launch of ours": lambda: way.normaliser(problem),
        "one small torch operation": lambda: problem.points + 1,
    }.items():
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(300):
            call()
        print(f"{name}: {(time.perf_counter() - began) / 300 * 1e6:.0f} µs of host time")
        torch.cuda.synchronize()
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(20):
        run()
    watch.disable()
    torch.cuda.synchronize()
    stats = pstats.Stats(watch)
    stats.sort_stats("tottime").print_stats(22)
    stats.sort_stats("cumulative").print_stats(45)


CASES = {
    "vit fp16 0.01": {"B": 1024, "N": 196, "d": 192, "L": 64, "tau": 0.01, "dtype": torch.float16},
    "vit fp16 10": {"B": 1024, "N": 196, "d": 192, "L": 64, "tau": 10.0, "dtype": torch.float16},
    "vit fp32 0.01": {"B": 1024, "N": 196, "d": 192, "L": 64, "tau": 0.01, "dtype": torch.float32},
    "long fp16": {"B": 128, "N": 512, "d": 256, "L": 32, "tau": 0.001, "dtype": torch.float16},
    "long fp32": {"B": 128, "N": 512, "d": 256, "L": 32, "tau": 0.001, "dtype": torch.float32},
    "wide fp16": {"B": 32, "N": 100, "d": 1280, "L": 64, "tau": 0.01, "dtype": torch.float16},
    "wide fp32": {"B": 32, "N": 100, "d": 1280, "L": 64, "tau": 0.01, "dtype": torch.float32},
}


def ragged_case():
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 1025, (32,), generator=g).cuda()
    return {"B": 32, "N": 1024, "d": 320, "L": 16, "tau": 0.01, "dtype": torch.float16, "M": 512, "lengths": lengths}


PARTS = {"warm", "variants", "sort", "whole", "growth", "cpu", "profile", "counted", "steps"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--warm", type=int)
    parser.add_argument("--do", default="warm,variants,sort,whole,profile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this times passes on a GPU, but there is no CUDA device")
    lines = []

    def report(line):
        lines.append(line)
        print(line, flush=True)

    if options.warm is not None:
        for setting in VARIED:
            variants(setting, report, only=options.warm)
        return
    do = options.do.split(",")
    if unknown := set(do) - PARTS:
        parser.error(f"--do: expected some of {', '.join(sorted(PARTS))} but got {', '.join(sorted(unknown))}")
    if "warm" in do:  # several processes compile at a time
        count = len(VARIANTS)
        command = [sys.executable, __file__, "--warm"]
        workers = [subprocess.Popen([*command, str(i)], stderr=subprocess.DEVNULL) for i in range(count)]
        for worker in workers:
            worker.wait()
    if "variants" in do:
        for setting in VARIED:
            variants(setting, report)
    if "sort" in do:
        for shape in [(1024, 196, 64), (128, 256, 64), (32, 100, 64)]:
            values = torch.randn(*shape, device="cuda").transpose(1, 2)
            a = median_ms(lambda v=values: torch.sort(v, dim=-1, stable=True))
            b = median_ms(lambda v=values: cuda_sort.sort_rows(v))
            same = torch.equal(torch.sort(values, dim=-1, stable=True)[1], cuda_sort.sort_rows(values)[1])
            report(f"sort {shape}: torch {a:.3f} ms, here {b:.3f} ms, same {same}")
    if "whole" in do:
        whole_table(report, {**CASES, "ragged fp16": ragged_case()})
    if "growth" in do:
        growth(report)
    if "cpu" in do:
        cpu_profile(CASES["wide fp16"])
    if "profile" in do:
        profile(report, CASES["vit fp16 0.01"])
        profile(report, CASES["wide fp16"])
        profile(report, CASES["long fp16"], 10)
        profile(report, {"B": 16, "N": 16384, "d": 128, "L": 32, "tau": 0.01, "dtype": torch.float16}, 10)
        profile(report, ragged_case(), 8)
    if "steps" in do:
        steps(report)
    if "counted" in do:
        counted(CASES["vit fp16 0.01"])
        counted(CASES["wide fp16"])
    out = os.environ.get("OUT")
    if out:
        Path(out, "variants.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main()
