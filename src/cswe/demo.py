"""What ``make demo`` runs: the landscape behind the constraint, and four poolings on handwritten digits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cswe
from cswe.report.landscape import draw_landscape, example_pair, learn_in, measure_landscape
from cswe.tokens.sources.base import SPLITS
from cswe.tokens.sources.digits import Digits

SLICES, POINTS, EPOCHS, BATCH = 16, 32, 40, 128


@dataclass(frozen=True)
class Split:
    """Sets of inked pixels (column, row, ink), padded, with mask and label."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Result:
    """What a pooling reached."""

    name: str
    size: int
    accuracy: float
    seconds: float
    note: str = ""


def digit_splits() -> dict[str, Split]:
    """Load scikit-learn's digits as variable-size point sets, split into train, val and test."""
    source = Digits(ink="coordinate")
    sets = [torch.from_numpy(source.load(index).points) for index in range(len(source))]
    tokens = nn.utils.rnn.pad_sequence(sets, batch_first=True)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([len(points) for points in sets]).unsqueeze(1)
    labels = torch.as_tensor(source.labels.values)
    rows = {name: torch.from_numpy(source.splits == number) for number, name in enumerate(SPLITS)}
    return {name: Split(tokens[here], mask[here], labels[here]) for name, here in rows.items()}


def train(name: str, make: Callable[[], nn.Module], splits: dict[str, Split], bound: float | None = None) -> Result:
    """Train a pooling with a linear head; with a bound, under SWGG constraints at that fraction of the free level."""
    torch.manual_seed(0)
    start = perf_counter()
    pool, data = make(), splits["train"]
    head = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(10))
    head(pool(data.tokens[:8], data.mask[:8]))  # lets the head see its input's size
    duals = None
    if bound is not None:
        assert isinstance(pool, cswe.SWEPool)
        swgg = cswe.SWGGBound(pool, bound=cswe.Fraction(bound), wrt="slices")
        duals = cswe.PrimalDual(swgg, lr=1e-2, slack_lr=1e-2, slack_weight=1.0)
    optimizer = torch.optim.Adam([*pool.parameters(), *head.parameters()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            tokens, mask = data.tokens[rows], data.mask[rows]
            loss = F.cross_entropy(head(pool(tokens, mask)), data.labels[rows])
            if duals is not None:
                loss = duals.lagrangian(loss, tokens, mask)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if duals is not None:
                duals.step()
        schedule.step()
    head.eval()
    test = splits["test"]
    with torch.no_grad():
        accuracy = float((head(pool(test.tokens, test.mask)).argmax(1) == test.labels).double().mean())
    note = ""
    if duals is not None:
        record = duals.record()["swgg"]
        level, allowed = record["values"].mean(), (record["bound"] + record["slack"]).mean()
        note = f"D {level:.3f} {'≤' if level <= allowed else '>'} {allowed:.3f} = ε + slack"
    return Result(name, int(getattr(pool, "out_dim", 0)), accuracy, perf_counter() - start, note)


def compare_on_digits() -> list[Result]:
    """Train four poolings on the same digits."""
    splits = digit_splits()
    swe = "sliced Wasserstein (L-moments)"
    return [
        train("mean (GAP)", lambda: cswe.MeanPool(3), splits),
        train("attention, 20 queries", lambda: cswe.AttentionPool(3, queries=20), splits),
        train(swe, lambda: cswe.SWEPool(3, SLICES, POINTS), splits),
        train(f"{swe}, constrained", lambda: cswe.SWEPool(3, SLICES, POINTS), splits, bound=0.95),
    ]


def main(folder: Path = Path("build/demo")) -> None:
    """Run the demo and print what came out."""
    start = perf_counter()
    landscape = measure_landscape(*example_pair())
    path = learn_in(landscape)
    pictures = draw_landscape(landscape, path, folder)
    print("SWGG of a pair of point sets in the plane, over the direction of the slice")
    print(f"  D(θ) from {landscape.distances.min():.2f} to {landscape.distances.max():.2f}; W₂ = {landscape.floor:.2f}")
    print(f"  the bound {landscape.bound:.2f} leaves {landscape.open_share:.0%} of the directions open")
    print(f"  a slice that wants to point at {path.wanted:.0f}° ends at {path.free[-1]:.0f}°, under the bound", end=" ")
    print(f"(with slack) at {path.bound[-1]:.0f}°")
    print(f"  {pictures[0]}  {pictures[1]}")
    print("\nHandwritten digits as sets of inked pixels (column, row, ink): test accuracy, one seed")
    for result in compare_on_digits():
        line = f"  {result.name:43}{result.size:4} numbers  {result.accuracy:6.1%}  {result.seconds:5.1f} s"
        print(f"{line}  {result.note}".rstrip())
    print(f"\n{perf_counter() - start:.0f} seconds in all")


if __name__ == "__main__":
    main()
