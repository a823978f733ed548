"""Batches hold every set once, in an order that can be had again."""

import numpy as np
import pytest
import torch

from cswe.tokens import Item, TokenStore, plan_batches
from cswe.tokens.prefetch import prefetched


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_a_batch_holds_the_sets_it_names(store, items, resident, layout):
    seen = []
    for batch in store.batches(7, seed=3, resident=resident, layout=layout):
        assert batch.tokens.dtype == torch.float32
        for row, index in enumerate(batch.index.tolist()):
            given = items[index]
            count = len(given.tokens)
            if layout == "padded":
                tokens, weights = batch.tokens[row], batch.weights[row]
                assert batch.mask is None or batch.mask[row].tolist() == [True] * count + [False] * (
                    batch.tokens.shape[1] - count
                )
                assert not tokens[count:].any()
                assert not weights[count:].any()
                tokens, weights = tokens[:count], weights[:count]
            else:
                here = slice(int(batch.ptr[row]), int(batch.ptr[row + 1]))
                tokens, weights = batch.tokens[here], batch.weights[here]
            assert torch.equal(tokens, given.tokens)
            assert torch.equal(weights, given.weights)
            assert torch.equal(batch.cls[row], given.cls)
            assert int(batch.labels[row]) == given.label
            seen.append(index)
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize("resident", [False, True])
def test_sets_of_one_length_have_no_mask(tmp_path, resident):
    store = TokenStore.create(tmp_path, [Item(torch.full((3, 2), float(n))) for n in range(10)])
    for batch in store.batches(4, resident=resident):
        assert batch.mask is None
        assert batch.tokens[:, 0, 0].tolist() == batch.index.tolist()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_types_of_a_batch(tmp_path, dtype):
    store = TokenStore.create(tmp_path, [Item(torch.ones(3, 2))], dtype="bfloat16")
    for resident in (False, True):
        batch = next(iter(store.batches(1, dtype=dtype, resident=resident)))
        assert batch.tokens.dtype == torch.bfloat16
        assert batch.tokens.sum() == 6


def test_the_order_is_decided_by_seed_and_epoch():
    lengths = np.arange(1, 1001) % 37
    one = plan_batches(lengths, 16, seed=1, epoch=2)
    again = plan_batches(lengths, 16, seed=1, epoch=2)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    for other in (plan_batches(lengths, 16, seed=1, epoch=3), plan_batches(lengths, 16, seed=2, epoch=2)):
        assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    # Fixed for ever: a checkpoint of today must find its place with the versions of tomorrow.
    assert plan_batches(np.ones(8, dtype=np.int64), 4, seed=0, epoch=0)[0].tolist() == PINNED


PINNED = [5, 4, 0, 3]


def test_like_lengths_are_together():
    lengths = np.random.Generator(np.random.PCG64(0)).integers(10, 1000, 5000)
    plan = plan_batches(lengths, 32)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in plan)
    assert padded < 1.1 * lengths.sum()
    assert sorted(np.concatenate(plan).tolist()) == list(range(5000))


def test_most_tokens_and_drop_last():
    lengths = np.arange(1, 101)
    plan = plan_batches(lengths, 32, max_tokens=200)
    assert all(int(lengths[batch].max()) * len(batch) <= 200 for batch in plan)
    assert sorted(np.concatenate(plan).tolist()) == list(range(100))
    assert [len(batch) for batch in plan_batches(lengths, 32, drop_last=True)] == [32] * 3


def test_too_few_sets_for_a_batch_make_none_if_the_last_is_dropped(store):
    for shuffle in (True, False):
        assert plan_batches(np.array([5, 1, 3]), 4, drop_last=True, shuffle=shuffle) == []
    assert list(store.batches(51, drop_last=True)) == []


def test_a_run_goes_on_where_it_was_broken_off(store):
    whole = store.batches(8, seed=5)
    expected = [batch.index.tolist() for _ in range(3) for batch in whole]
    first = store.batches(8, seed=5)
    found = [batch.index.tolist() for batch in first]
    for batch in first:
        found.append(batch.index.tolist())
        if first.step == 3:
            state = first.state_dict()
            break
    assert state == {"seed": 5, "epoch": 1, "step": 3}
    second = store.batches(8)
    second.load_state_dict(state)
    while second.epoch < 3:
        found += [batch.index.tolist() for batch in second]
    assert found == expected


def test_a_pass_that_is_broken_off_starts_again(store):
    batches = store.batches(8, shuffle=False)
    assert next(iter(batches)).index.tolist() == next(iter(batches)).index.tolist()


def test_prefetching_gives_the_same(store):
    batches = store.batches(8)
    order = batches.order(0)
    device = torch.device("cpu")
    ready = [
        batch.index.tolist()
        for batch in prefetched(order, lambda part: batches._gather(part, "padded"), device, torch.float32)
    ]
    assert ready == [part.tolist() for part in order]

    def broken(part):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(prefetched(order, broken, device, None))


def test_splits_and_indices(store):
    assert sorted(i for batch in store.batches(4, split="test") for i in batch.index.tolist()) == list(range(3, 50, 4))
    assert [i for batch in store.batches(4, indices=[7, 2], shuffle=False) for i in batch.index.tolist()] == [7, 2]
    with pytest.raises(ValueError, match="below 50 but got 50"):
        store.batches(4, indices=[50])
    with pytest.raises(ValueError, match="from 0 on and below 50 but got -1"):
        store.batches(4, indices=[-1, 0])
    for wrong, hint in ((np.arange(50) < 3, "np.flatnonzero"), ([0.9, 1.9], "got float64")):
        with pytest.raises(ValueError, match=f"indices: expected whole numbers.*{hint}"):
            store.batches(4, indices=wrong)
        with pytest.raises(ValueError, match=f"indices: expected whole numbers.*{hint}"):
            store.batches(4).narrowed(wrong)
    with pytest.raises(ValueError, match="batch_size"):
        store.batches(0)
    with pytest.raises(ValueError, match="layout"):
        store.batches(1, layout="square")


def test_narrowed_batches_are_dealt_anew(store):
    used = store.batches(4, seed=5)
    for _ in used:
        pass
    next(iter(used))
    few = used.narrowed(range(20), 3), store.batches(3, indices=range(20))
    one, other = ([batch.index.tolist() for batch in batches] for batches in few)
    assert one == other
    assert used.narrowed().state_dict() == {"seed": 0, "epoch": 0, "step": 0}


@pytest.mark.parametrize("resident", [None, False, True])
def test_a_device_that_is_not_there_is_told(store, resident):
    for name in ("cuda:99", torch.device("cuda", 99)):
        with pytest.raises(ValueError, match=r"device: expected one that torch can use here.*'cuda:99'"):
            store.batches(4, device=name, resident=resident)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_batches_on_the_gpu(store, resident, layout):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    here = store.batches(7, seed=1, layout=layout)
    there = store.batches(7, seed=1, layout=layout, device="cuda", resident=resident)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.tokens, other.tokens.cpu())
        assert torch.equal(one.labels, other.labels.cpu())
        assert (one.mask is None) == (other.mask is None)
        assert one.mask is None or torch.equal(one.mask, other.mask.cpu())
