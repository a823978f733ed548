"""The tables on proteins and on points."""

from cswe.training.choices import has_slices
from cswe.training.table import Row, grid
from experiments.lookup import (
    Results,
    choices_table,
    count_text,
    gain_text,
    mean_text,
    memory_text,
    only_seeds,
    rates_text,
    seconds_text,
    size_text,
)
from experiments.paper import PROTEINS_RESOURCES, TABLE1_SPLITS
from experiments.pools import NORMED, POINT_LAYERS, POOLS, PROTEIN_RIVALS, RAW, TOKENS, with_choices
from experiments.studies import POINT_SLICES
from experiments.tuning import PROTEIN_LAYER, PROTEINS


def proteins_table(results: Results) -> str:
    """Give the paper's form on proteins."""
    head = [
        "L",
        "Pooling",
        "Size",
        "Seeds",
        "Train",
        "Validation",
        "Test",
        "C-SWE − SWE",
        "Time",
        "Memory",
        "paper's run",
    ]
    paper = ", ".join(PROTEINS_RESOURCES)
    lines = []
    for key in ("cls", "gap"):
        row = results.row("proteins-table", POOLS[key].text, 6)
        scores = [mean_text(row, split) for split in TABLE1_SPLITS]
        label = "mean" if key == "gap" else "CLS"
        lines.append(
            ["", label, size_text(row), count_text(row), *scores, "", seconds_text(row), memory_text(row), paper]
        )
    for slices in (1, 4, 16, 64):
        plain, bounded = (results.row("proteins-table", pool, 6, slices) for pool in ("swe", "cswe"))
        for label, row in (("SWE", plain), ("C-SWE", bounded)):
            if row is None:
                continue
            scores = [mean_text(row, split) for split in TABLE1_SPLITS]
            difference = gain_text(bounded, plain) if label == "C-SWE" else ""
            own = [seconds_text(row), memory_text(row), paper]
            lines.append([str(slices), label, size_text(row), count_text(row), *scores, difference, *own])
    return grid(head, lines)


def proteins_literal(results: Results) -> str:
    """Take the paper's batches and epochs to the letter, one seed."""
    head = ["Pooling", "Batch, epochs", "Train", "Validation", "Test", "Time"]
    lines = []
    for key in ("swe", "cswe"):
        pool = POOLS[key].text
        ours = only_seeds(results.row("proteins-table", pool, 6, 16), {0})
        literal = results.row("proteins-table", with_choices(pool, "epochs=50"), 6, 16)
        if literal is None:
            continue
        for row, how in ((ours, "256, 20"), (literal, "32, 50 (paper)")):
            lines.append(
                [POOLS[key].label, how, *(mean_text(row, split) for split in TABLE1_SPLITS), seconds_text(row)]
            )
    return grid(head, lines)


def proteins_tuned(results: Results) -> str:
    """All poolings under the same regularisation on proteins."""
    rivals = ("attention-3", "statistics-1", "statistics-4")
    head = ["Pooling", "Size", "Seeds", "Test", *(f"− {POOLS[rival].label}" for rival in rivals), "Time", "Memory"]
    lines = []
    for key in PROTEIN_RIVALS:
        if (row := results.named("proteins-tuned", key, PROTEIN_LAYER)) is None:
            continue
        cells = ["mean" if key == "gap" else POOLS[key].label, size_text(row), count_text(row), mean_text(row)]
        for rival in rivals:
            other = results.named("proteins-tuned", rival, PROTEIN_LAYER)
            cells.append("" if rival == key else gain_text(row, other))
        lines.append([*cells, seconds_text(row), memory_text(row)])
    return grid(head, lines)


def proteins_tuning(results: Results) -> str:
    """Say what the search chose for every pooling."""
    return choices_table(results, PROTEINS, (PROTEIN_LAYER,), PROTEIN_RIVALS)


def _points(results: Results, layer: int) -> str:
    pools = POINT_LAYERS[layer]

    def row_of(key: str, slices: int | None) -> Row | None:
        return results.row("points-table", pools[key].text, layer, slices)

    # Against the better form of each rival.
    apart = "attention-directions" in pools
    rivals = ("attention-directions", "statistics-directions") if apart else ("attention-1", "statistics")
    told = " by direction" if apart else ""
    head = ["Pooling", "L", "Size", "Seeds", "Rates", "Accuracy", "Balanced"]
    head += [f"Balanced − attention{told}", f"− statistics{told}", "Time"]
    lines = []
    for key, named in pools.items():
        for slices in POINT_SLICES[layer] if has_slices(named.text) else (None,):
            if (row := row_of(key, slices)) is None:
                continue
            cells = [named.label, "" if slices is None else str(slices), size_text(row), count_text(row)]
            cells += [rates_text(row), mean_text(row), mean_text(row, metric="balanced")]
            for rival in rivals:
                other = row_of(rival, slices or 16)
                cells.append("" if rival == key else gain_text(row, other, metric="balanced"))
            lines.append([*cells, seconds_text(row)])
    return grid(head, lines)


def points_table(results: Results) -> str:
    """Tokens of the Point Cloud Transformer."""
    return _points(results, TOKENS)


def normed_table(results: Results) -> str:
    """Tokens of the Point Cloud Transformer, each normalised."""
    return _points(results, NORMED)


def raw_table(results: Results) -> str:
    """Pool the points themselves."""
    return _points(results, RAW)
