"""Run studies: ``python -m experiments.run images-table1 --stores STORES --out experiments/results``."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from cswe.training.errors import UserError
from cswe.training.parallel import default_device
from experiments.records import RESULTS, add_known
from experiments.studies import STUDIES
from experiments.worker import BROKEN, Worker

_RESTARTS = 2  # for each worker
_COMMIT = 7  # digits that name one; fewer may name several


def main(arguments: list[str] | None = None) -> int:
    """Run the cells of some studies that are not known yet; return 1 if any of them failed, or is not what it was."""
    words = sys.argv[1:] if arguments is None else arguments
    names = ["all", *STUDIES]
    parser = argparse.ArgumentParser(prog="python -m experiments.run", description=__doc__)
    parser.add_argument("studies", nargs="+", choices=names, metavar="STUDY", help=", ".join(names))
    parser.add_argument("--stores", type=Path, required=True, help="folder of the token stores")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go, one JSON file a study")
    add_known(parser, "results")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cells with this in their name or their store's; several, or a list with commas: any of them",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run cells that are known once more, write nothing, and say whether every score is exactly the known one",
    )
    parser.add_argument(
        "--remake",
        action="append",
        default=[],
        metavar="COMMIT",
        help="cells that are known from this commit are run, too, and replaced; with --again only they are, without",
    )
    parser.add_argument("--list", action="store_true", help="say what would be run, and run nothing")
    parser.add_argument("--work", type=Path, help="folder for locks and runs; best in memory")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="JOBS",
        help="processes of other such commands that train on the same device, noted with every result",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell that would not end by then")
    parser.add_argument(
        "--pause",
        action="store_true",
        help="begin long cells, too, and break them off after those seconds; the same --work goes on with them",
    )
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time, where torch can")
    parser.add_argument("--rehearse", action="store_true", help="one epoch of one seed of everything; not for results")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.jobs < 1:
        parser.error(f"--jobs: expected at least 1 but got {chosen.jobs}")
    if chosen.beside < 0:
        parser.error(f"--beside: expected at least 0 but got {chosen.beside}")
    if chosen.rehearse and chosen.again:
        parser.error("a rehearsal cannot be held against results: choose --rehearse or --again")
    if chosen.rehearse and chosen.out.resolve() == RESULTS.resolve():
        parser.error("a rehearsal gives no results: choose another --out")
    if wrong := [commit for commit in chosen.remake if not re.fullmatch(f"[0-9a-f]{{{_COMMIT},}}", commit)]:
        parser.error(f"--remake: expected at least {_COMMIT} digits of a commit but got {wrong[0]!r}")
    if chosen.pause and (chosen.work is None or chosen.again):
        parser.error("--pause needs --work, a folder to go on from, and is not for --again")
    if chosen.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else all memory is filled before it is used, which is for finding mistakes, and takes its time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        device = default_device(chosen.device)
    except UserError as error:
        parser.error(str(error))
    if chosen.work is not None:
        return _run(chosen, chosen.work, device, words)
    # What is left there could not be gone on with: nobody was told where it lies.
    with tempfile.TemporaryDirectory(prefix="cswe-experiments-") as work:
        return _run(chosen, Path(work), device, words)


def _run(chosen: argparse.Namespace, work: Path, device: torch.device, words: list[str]) -> int:
    """Do what was chosen, or have others do it, and return the exit status."""
    if chosen.worker is None and chosen.jobs > 1 and not chosen.list:
        command = [sys.executable, "-m", "experiments.run", *words, "--work", str(work)]
        # One clock for all, also for those that are started later.
        failures = share([*command, "--until", str(time.monotonic() + chosen.seconds)], chosen.jobs)
        return 1 if failures else 0
    names = [name for name in STUDIES if name in chosen.studies]
    if "all" in chosen.studies:
        names = [name for name, study in STUDIES.items() if not study.alone or name in names]
    told = ["python", "-m", "experiments.run", *names, "--stores", "STORES", "--jobs", str(chosen.jobs)]
    worker = Worker(
        [STUDIES[name] for name in names],
        chosen.stores,
        chosen.out,
        chosen.known,
        work,
        device,
        chosen.worker or 0,
        chosen.jobs,
        time.monotonic() + chosen.seconds if chosen.until is None else chosen.until,
        shlex.join([*told, *(["--deterministic"] if chosen.deterministic else [])]),
        chosen.rehearse,
        chosen.deterministic,
        tuple(text for texts in chosen.only for text in texts.split(",") if text),
        chosen.again,
        tuple(chosen.remake),
        chosen.pause,
        chosen.beside,
        lambda line: print(line, flush=True),
    )
    if chosen.list:
        print("\n".join(worker.outlook()))
        return 0
    worker.run()
    return 1 if worker.failed else 0


def share(command: list[str], jobs: int) -> int:
    """Let several processes run a command, each with its number; return how many of them had a failure.

    One that says that it is broken is started again, a few times. Ended, this process takes the others with it.
    """
    # Threads of several processes would fight for the same cores.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--worker", str(number)], env=environment)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    workers = {number: start(number) for number in range(jobs)}
    restarts, failures = _RESTARTS * jobs, 0
    try:
        while workers:
            time.sleep(0.2)
            for number, worker in list(workers.items()):
                status = worker.poll()
                if status == BROKEN and restarts:
                    restarts -= 1
                    workers[number] = start(number)
                elif status is not None:
                    failures += status != 0
                    del workers[number]
        return failures
    finally:
        for worker in workers.values():
            worker.terminate()
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
