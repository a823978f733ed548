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
    rates_text,
    seconds_text,
    size_text,
)
from experiments.paper import POINTS_RESOURCES, PROTEINS_RESOURCES, TABLE1_SPLITS
from experiments.pools import LONGER, NORMED, POINT_LAYERS, POOLS, PROTEIN_RIVALS, RAW, TOKENS, with_choices
from experiments.studies import LITERAL, LONGER_SLICES, POINT_SLICES
from experiments.tuning import PROTEIN_LAYER, PROTEINS


def proteins_table(results: Results) -> str:
    """Give the paper's form on proteins, in large batches and to the letter."""
    head = ["L", "Pooling", "Batch, epochs", "Size", "Seeds", "Train", "Validation", "Test", "C-SWE − SWE"]
    head += ["Time", "Memory", "paper's run"]
    paper = ", ".join(PROTEINS_RESOURCES)

    def line(slices: str, label: str, how: str, row: Row, difference: str) -> list[str]:
        scores = [mean_text(row, split) for split in TABLE1_SPLITS]
        own = [seconds_text(row), memory_text(row), "" if label == "mean" else paper]
        return [slices, label, how, size_text(row), count_text(row), *scores, difference, *own]

    lines = []
    for key, label in (("cls", "CLS"), ("gap", "mean")):
        for how, text in _schedules(key):
            if (row := results.row("proteins-table", text, PROTEIN_LAYER)) is not None:
                lines.append(line("", label, how, row, ""))
    for slices in (1, 4, 16, 64):
        plain = {how: results.row("proteins-table", text, PROTEIN_LAYER, slices) for how, text in _schedules("swe")}
        bounded = {how: results.row("proteins-table", text, PROTEIN_LAYER, slices) for how, text in _schedules("cswe")}
        for label, rows in (("SWE", plain), ("C-SWE", bounded)):
            for how, row in rows.items():
                if row is not None:
                    difference = gain_text(row, plain[how]) if label == "C-SWE" else ""
                    lines.append(line(str(slices), label, how, row, difference))
    return grid(head, lines)


def _schedules(key: str) -> tuple[tuple[str, str], ...]:
    """Return how a pooling of the paper was trained on proteins, and how it is named then."""
    text = POOLS[key].text
    return ("256, 20", text), ("32, 50 (paper)", with_choices(text, LITERAL))


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
    head = ["Pooling", "L", "Size", "Seeds", "Rates"]
    for metric in ("Accuracy", "Balanced"):
        head += [metric, f"− attention{told}", f"− statistics{told}"]
    head += ["Time", "Memory", *(["paper's run"] if layer == TOKENS else [])]
    lines = []
    for key, named in pools.items():
        for slices in POINT_SLICES[layer] if has_slices(named.text) else (None,):
            if (row := row_of(key, slices)) is None:
                continue
            cells = [named.label, "" if slices is None else str(slices), size_text(row), count_text(row)]
            cells.append(rates_text(row))
            for metric in ("top1", "balanced"):
                cells.append(mean_text(row, metric=metric))
                for rival in rivals:
                    other = row_of(rival, slices or 16)
                    cells.append("" if rival == key else gain_text(row, other, metric=metric))
            cells += [seconds_text(row), memory_text(row)]
            if layer == TOKENS:
                cells.append(", ".join(POINTS_RESOURCES) if key in ("gap", "swe", "cswe") else "")
            lines.append(cells)
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


def longer_points_table(results: Results) -> str:
    """SWE and C-SWE on tokens of the Point Cloud Transformer, with the paper's epochs and with a quarter of them."""
    head = ["L", "Pooling", "Epochs", "Seeds", "Accuracy", "C-SWE − SWE", "200 − 50"]
    head += ["Balanced", "C-SWE − SWE", "200 − 50", "− mean", "Time"]
    pools, mean = POINT_LAYERS[TOKENS], results.row("points-table", POINT_LAYERS[TOKENS]["gap"].text, TOKENS)
    lines = []
    for slices in LONGER_SLICES:
        short = {key: results.row("points-table", pools[key].text, TOKENS, slices) for key in ("swe", "cswe")}
        long = {key: results.row("points-longer", named.text, TOKENS, slices) for key, named in LONGER[TOKENS].items()}
        rows: list[tuple[str, str, Row | None, Row | None, Row | None]] = [
            ("50", pools[key].label, row, short["swe"], None) for key, row in short.items()
        ]
        rows += [
            ("200", LONGER[TOKENS][key].label, row, long["swe-long"], short.get(key.removesuffix("-long")))
            for key, row in long.items()
        ]
        for epochs, label, row, plain, before in rows:
            if row is None:
                continue
            cells = [str(slices), label, epochs, count_text(row)]
            for metric in ("top1", "balanced"):
                cells.append(mean_text(row, metric=metric))
                cells.append("" if row is plain else gain_text(row, plain, metric=metric))
                cells.append("" if before is None else gain_text(row, before, metric=metric))
            lines.append([*cells, gain_text(row, mean, metric="balanced"), seconds_text(row)])
    return grid(head, lines)
