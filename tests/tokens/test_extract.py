"""An extraction gives the same bytes however often it is broken off, and leaves nothing half done."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from cswe.tokens import TokenStore, TokenStoreError, drop_damaged
from cswe.tokens import writer as writer_module
from cswe.tokens.backbones import open_backbone
from cswe.tokens.extract import extract

ROOT = Path(__file__).resolve().parents[2]


class Setup:
    """A source and the identity, in small groups and small shards."""

    def __init__(self, source):
        self.source = source
        self.backbone = open_backbone("identity", source)
        self.backbone.group = self.backbone.unit = 16

    def __call__(self, out, **options):
        return extract(self.source, self.backbone, out, **{"shard_bytes": 4000, "progress": False, **options})


@pytest.fixture
def run(some_points):
    return Setup(some_points(300))


def test_tokens_are_the_source(run, tmp_path):
    store = run(tmp_path / "store", dtype="float32")
    assert len(store) == 300
    assert len(store.manifest.shards) > 5
    for index in (0, 123, 299):
        assert torch.equal(store[index].tokens, torch.from_numpy(run.source.load(index).points))
        assert store[index].id == run.source.ids[index]
    store.verify()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(run, tmp_path, content, workers):
    one = run(tmp_path / "one")
    other = run(tmp_path / "other", workers=workers)
    assert content(one.path) == content(other.path)


def test_the_next_group_is_encoded_while_a_shard_is_written(run, tmp_path, content, monkeypatch):
    whole = run(tmp_path / "whole")
    encode, write = run.backbone.encode, writer_module.write_shard
    threads, more = [], threading.Event()

    def encode_and_tell(units, dtype):
        threads.append(threading.current_thread())
        if writing.is_set():
            more.set()
        return encode(units, dtype)

    def write_late(*arguments, **named):
        writing.set()
        overlapped.append(more.wait(30))
        return write(*arguments, **named)

    writing, overlapped = threading.Event(), []
    monkeypatch.setattr(run.backbone, "encode", encode_and_tell)
    monkeypatch.setattr(writer_module, "write_shard", write_late)
    assert content(run(tmp_path / "store").path) == content(whole.path)
    assert overlapped
    assert all(overlapped)
    assert threading.current_thread() not in threads


KILLER = """
import json, os, random, shutil, signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from cswe.cli import main
import cswe.tokens.commands, sklearn.datasets
from cswe.tokens.backbones.identity import Identity

torch.set_num_threads(1)
Identity.group = Identity.unit = 100
folder = Path(sys.argv[2])
arguments = ["extract", "--shard-mib", "0.002", "--seed", "3", "--quiet", "--out"]

def start(out, *more):
    child = os.fork()
    if child:
        return child
    os._exit(main([*arguments, str(out), *more]))

def content(out):
    return {str(file.relative_to(out)): file.read_bytes() for file in sorted(out.rglob("*")) if file.is_file()}

began = time.monotonic()
assert os.waitpid(start(folder / "whole"), 0)[1] == 0
needed = time.monotonic() - began
whole = content(folder / "whole")
shards = sum(name.endswith(".safetensors") for name in whole)
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
random.seed(0)
kills, kept_counts = 0, []
while kills < 20:
    out = folder / f"killed-{kills}"
    child = start(out)
    if kills % 2:
        time.sleep(random.uniform(0, needed))
    else:
        # Under load a moment drawn from the time of another run may come before the first shard, each time.
        enough = random.randrange(1, shards)
        while len(list(out.rglob("*.safetensors"))) < enough and os.waitid(os.P_PID, child, ENDED) is None:
            time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        shutil.rmtree(out)  # it had ended before: this was no kill
        continue
    kills += 1
    kept = {name for name in (content(out) if out.exists() else {}) if name.endswith(".safetensors")}
    assert os.waitpid(start(out, "--resume"), 0)[1] == 0
    assert content(out) == whole, f"kill {kills} differs"
    kept_counts.append(len(kept))
print(json.dumps({"kills": kills, "shards": len(whole) - 1, "kept": sorted(kept_counts)}))
"""


def test_kill_nine_at_twenty_moments_then_resume_is_byte_identical(tmp_path):
    # Real processes and real SIGKILLs, forked from one that has its imports behind it; in memory where that is
    # possible, since the forty runs would otherwise wait for the disk most of their time.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        done = subprocess.run(
            [sys.executable, "-c", KILLER, str(ROOT / "src"), folder],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kills"] == 20
    assert report["shards"] >= 8
    # The moments were spread over the run: some kills came early, some when shards were there to be kept.
    assert len(set(report["kept"])) >= 3, report


def test_resume_makes_only_what_is_missing(run, tmp_path, content):
    store = run(tmp_path / "store")
    whole = content(store.path)
    files = [store.path / entry.file for entry in store.manifest.shards]
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-7])
    damaged = bytearray(files[3].read_bytes())
    damaged[-1] ^= 1
    files[3].write_bytes(damaged)
    untouched = files[4].stat().st_mtime_ns
    run(store.path, resume=True)
    assert content(store.path) == whole
    assert files[4].stat().st_mtime_ns == untouched
    drop = files[1].read_bytes()
    files[1].unlink()
    assert [entry.number for entry in drop_damaged(store.path)] == [1]
    assert len(run(store.path, resume=True)) == 300
    assert files[1].read_bytes() == drop
    assert content(store.path) == whole


def test_resume_does_not_overwrite_a_shard_of_another_store(run, some_points, tmp_path):
    store = run(tmp_path / "store")
    other = Setup(some_points(200))(tmp_path / "other")
    file = store.path / store.manifest.shards[0].file
    file.write_bytes((other.path / other.manifest.shards[0].file).read_bytes())
    with pytest.raises(TokenStoreError, match=rf"{file.name}: is a shard of another store.*move it away"):
        run(store.path, resume=True)


def test_resume_refuses_another_recipe(run, tmp_path):
    run(tmp_path / "store")
    with pytest.raises(TokenStoreError, match="dtype: 'float16' there, 'float32' now"):
        run(tmp_path / "store", resume=True, dtype="float32")
    with pytest.raises(TokenStoreError, match="holds a store already; use --resume"):
        run(tmp_path / "store")


def test_bad_items_are_named_or_listed(some_points, tmp_path, content):
    run = Setup(some_points(100, bad=(3, 50, 51)))
    with pytest.raises(TokenStoreError, match=r"set 3: is bad on purpose.*--skip-bad"):
        run(tmp_path / "store")
    store = run(tmp_path / "store", resume=True, skip_bad=True)
    assert len(store) == 97
    assert store.ids[3] == "set 4"
    listed = json.loads((store.path / "manifest.json").read_text())
    skipped = [entry for shard in listed["shards"] for entry in shard["skipped"]]
    assert skipped == [{"id": f"set {i}", "reason": "is bad on purpose"} for i in (3, 50, 51)]
    in_one_go = run(tmp_path / "again", skip_bad=True)
    assert content(in_one_go.path) == content(store.path)


def test_values_that_the_type_cannot_hold(some_points, tmp_path):
    class Large(some_points):
        def load(self, index):
            points = super().load(index)
            points.points[:] *= 1e6 if index == 20 else 1
            return points

    run = Setup(Large(40))
    with pytest.raises(TokenStoreError, match="set 20: gives values that float16 cannot hold"):
        run(tmp_path / "store")
    store = run(tmp_path / "store", resume=True, skip_bad=True)
    assert len(store) == 39
    assert [entry["id"] for entry in store.manifest.skipped] == ["set 20"]
    assert torch.equal(store[20].tokens, torch.from_numpy(run.source.load(21).points).half())
    assert len(run(tmp_path / "wide", dtype="bfloat16")) == 40


def test_a_full_disk(some_points, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        run = Setup(some_points(1000))
        with pytest.raises(
            TokenStoreError, match=r"(?s)store/.*could not be written \(No space left on device\).*resume"
        ):
            run(disk / "store", shard_bytes=20_000)
        kept = TokenStore(disk / "store", partial=True)
        kept.verify()
        assert len(kept) > 0
        assert not list(disk.rglob("*.partial"))
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        store = run(disk / "store", shard_bytes=20_000, resume=True)
        whole = run(tmp_path / "whole", shard_bytes=20_000)
        assert [entry.sha256 for entry in store.manifest.shards] == [entry.sha256 for entry in whole.manifest.shards]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


MEMORY = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
from cswe.tokens import Labels, TokenStore
from cswe.tokens.backbones import open_backbone
from cswe.tokens.extract import extract
from cswe.tokens.sources import Points, Source

class Made(Source):
    kind, name, dim = "points", "made", 64
    def __init__(self, count):
        super().__init__([str(i) for i in range(count)], np.zeros(count, np.uint8), Labels())
    def load(self, index):
        return Points(np.full((100, 64), index % 100, dtype=np.float32))

source = Made(int(sys.argv[3]))
extract(source, open_backbone("identity", source), sys.argv[2], shard_bytes=4 * 2**20, progress=False)
peak = lambda: int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) // 1024
writing = peak()
# Reading maps files, and mapped pages count as resident though the system may take them back: only what is not
# backed by a file is the program's own.
store = TokenStore(sys.argv[2])
for batch in store.batches(32):
    pass
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024
print(writing, own)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_flat_while_items_grow_tenfold(tmp_path):
    peaks = []
    for count in (2_000, 20_000):  # 26 MB and 256 MB of tokens
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(ROOT / "src"), str(tmp_path / str(count)), str(count)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        peaks.append([int(number) for number in done.stdout.split()])
    (small_write, small_read), (large_write, large_read) = peaks
    # There are 230 MB more of tokens; what the allocator keeps differs by some 30 MB from run to run.
    assert large_write - small_write < 80, peaks
    assert large_read - small_read < 80, peaks


def test_wrong_arguments(run, some_points, tmp_path):
    with pytest.raises(ValueError, match="limit"):
        run(tmp_path / "a", limit=0)
    with pytest.raises(ValueError, match="workers"):
        run(tmp_path / "b", workers=-1)
    assert len(run(tmp_path / "c", limit=20)) == 20
