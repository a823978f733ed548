"""Sharing work out over torch's threads."""

import threading

import pytest
import torch
from torch.autograd import forward_ad

from cswe.ops import _memory
from cswe.ops._memory import has_memory, share_out


@pytest.fixture(params=["torch's threads", "threads of our own"])
def threads(request, monkeypatch):
    if request.param == "threads of our own":
        monkeypatch.setattr(_memory, "_openmp_team", lambda: None)
    elif _memory._openmp_team() is None:
        pytest.skip("torch has no OpenMP threads here")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_every_task_is_done_once(threads):
    done = []
    share_out(lambda a, b: done.append((a, b)), [(i, -i) for i in range(100)])
    assert sorted(done) == [(i, -i) for i in range(100)]


def test_several_threads_work(threads):
    meeting = threading.Barrier(threads, timeout=20)  # passed only if they are there at the same time
    share_out(meeting.wait, [()] * threads)


def test_every_thread_has_its_own_room(threads):
    rooms, meeting = [], threading.Barrier(threads, timeout=20)

    def task(room):
        rooms.append(room)
        meeting.wait()

    share_out(task, [()] * threads, room=object)
    assert len(set(rooms)) == threads


def test_a_failure_is_raised_and_ends_the_rest(threads):
    done = []

    def task(i):
        if i == 0:
            raise ValueError("task 0")
        done.append(i)

    with pytest.raises(ValueError, match="task 0"):
        share_out(task, [(i,) for i in range(1000)])
    assert len(done) < 1000
    share_out(done.append, [(-1,)])
    assert done[-1] == -1


def test_one_thread_needs_no_team(monkeypatch):
    monkeypatch.setattr(_memory, "_openmp_team", None)  # not called
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    done = []
    share_out(done.append, [(1,), (2,)])
    torch.set_num_threads(before)
    assert done == [1, 2]


def test_has_memory():
    assert has_memory(torch.zeros(2))
    assert has_memory(torch.nn.Parameter(torch.zeros(2)))
    assert not has_memory(torch.zeros(2, device="meta"))
    seen = []
    torch.func.vmap(lambda row: seen.append(has_memory(row)) or row)(torch.zeros(2, 3))
    with forward_ad.dual_level():
        seen.append(has_memory(forward_ad.make_dual(torch.zeros(2), torch.ones(2))))
    assert seen == [False, False]
