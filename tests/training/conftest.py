"""A small store of digits, tiny runs on it, and a process that forks runs which may be killed."""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cswe.cli import main
from cswe.tokens import Item, TokenStore
from cswe.training.compare import compare
from tests.training.comparing import PLAN

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("fork_server.py")

TINY = {"slices": 4, "points": 8, "batch-size": 32, "epochs": 3, "bound-batches": 2, "device": "cpu"}


def options(choices):
    return [word for name, value in choices.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def tiny():
    """Arguments that make a run short."""
    return [*options(TINY), "--quiet"]


@pytest.fixture(scope="session")
def full(tiny):
    """Arguments that use everything that draws random numbers, and everything that has a state."""
    return [*tiny, *options({"keep-tokens": 0.6, "dropout": 0.2, "save-steps": 2, "clip": 1})]


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    # Compiled kernels would be loaded anew by every process that is forked.
    monkeypatch.setenv("CSWE_BACKEND", "scan")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # As the processes that are forked have: more would sum in another order.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def full_disk():
    @contextmanager
    def full(room=0):
        """Let writes fail that make a file larger than so many bytes."""
        resource = pytest.importorskip("resource", reason="needs limits of a process")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


@pytest.fixture(scope="session")
def assets():
    folder = Path(os.environ.get("CSWE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip("no real data and weights: set CSWE_ASSETS to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    pytest.importorskip("sklearn", reason="needs the extra 'data'")
    folder = tmp_path_factory.mktemp("digits") / "store"
    assert main(["extract", "--out", str(folder), "--limit", "240", "--quiet"]) == 0
    return folder


@pytest.fixture(scope="session")
def trained(digits, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", str(digits), "--out", str(folder), *tiny]) == 0
    return folder


@pytest.fixture(scope="session")
def whole(digits, tmp_path_factory):
    """A comparison that was done at once: its folder, its results and what was told."""
    folder = tmp_path_factory.mktemp("compare") / "whole"
    told = []
    results = compare(digits, folder, PLAN, device="cpu", tell=told.append)
    return folder, results, told


@pytest.fixture(scope="session")
def make_store():
    def make(
        folder,
        labels,
        *,
        dim=3,
        kind=None,
        classes=None,
        splits=("train", "train", "validation", "test"),
        seed=0,
        cls=False,
    ):
        """Write a store whose tokens lie around a place that the label decides."""
        generator = torch.Generator().manual_seed(seed)

        def items():
            for number, label in enumerate(labels):
                place = torch.as_tensor(label, dtype=torch.float32).reshape(-1)
                centre = torch.zeros(dim)
                centre[: min(dim, len(place))] = place[:dim]
                count = 3 + int(torch.randint(6, (), generator=generator))
                tokens = centre + 0.3 * torch.randn(count, dim, generator=generator)
                yield Item(
                    tokens,
                    label,
                    f"item {number}",
                    splits[number % len(splits)],
                    cls=tokens.mean(0) if cls else None,
                )

        return TokenStore.create(folder, items(), classes=classes, label_kind=kind)

    return make


class ForkServer:
    """Asks a process that has everything imported to fork a command, and perhaps to end it early."""

    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CSWE_BACKEND": "scan"}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.modules = set(json.loads(self._process.stdout.readline()))

    def run(self, *arguments, after=None, when=None, touches=None, signal="KILL", environments=({},)):
        """Run a command once for each environment; return exit codes (negative: the signal) and what was said.

        It may be ended: `after` so many seconds, as soon as there is a file, `when`, or after so many `touches` of the
        files of a folder, ``(folder, number)``.
        """
        request = {
            "arguments": list(map(str, arguments)),
            "after": after,
            "when": when and str(when),
            "touches": touches and (str(touches[0]), touches[1]),
            "signal": signal,
            "environments": list(environments),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=10)


@pytest.fixture(scope="session")
def server():
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def launched():
    def environments(world=2):
        """Environments of processes that a launcher starts together, which meet at a port that is free."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
        return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]

    return environments


@pytest.fixture(scope="session")
def content():
    def read(run):
        """Every checkpoint file of a run, and its log without the times."""
        files = {
            f"{name}/{file.name}": file.read_bytes() for name in ("best", "last") for file in (run / name).iterdir()
        }
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        for line in lines:
            del line["seconds"]
        return files | {"log": lines, "folders": sorted(path.name for path in run.iterdir() if path.is_dir())}

    return read
