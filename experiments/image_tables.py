"""The tables on images."""

from collections.abc import Callable

from cswe.training.table import Row, grid
from experiments.lookup import (
    NOTHING,
    Results,
    choices_table,
    count_text,
    gain_text,
    mean_text,
    memory_text,
    only_seeds,
    seconds_text,
    size_text,
)
from experiments.paper import TABLE1, TABLE1_SPLITS, best_texts, image_resources
from experiments.pools import FEW_RIVALS, IMAGE_RIVALS, POOLS, SEARCHED_SHAPES, SHAPES, with_choices
from experiments.records import read_extractions
from experiments.studies import BEYOND, FEW, SHAPES_POINT, SOFT, STRONGEST
from experiments.tuning import IMAGES, LAYERS, read_choices

_YARDSTICKS = ("attention-5", "statistics-1")  # what everything is held against


def longest(results: Results, key: str, layer: int) -> tuple[Row | None, int]:
    """Return the runs of Table 1 with the paper's 80 epochs, if they are there, or else with 30; and their epochs."""
    pool = POOLS[key].text
    long = results.row("images-table1", with_choices(pool, "epochs=80"), layer)
    return (results.row("images-table1", pool, layer), 30) if long is None else (long, 80)


def table1(results: Results) -> str:
    """Table 1 of the paper, its numbers beside ours."""
    head = ["Layer", "Pooling", "Size", "Epochs", "Seeds"]
    head += [word for split in TABLE1_SPLITS for word in (split.capitalize(), "paper")] + ["Time", "Memory"]
    lines = []
    for layer in LAYERS:
        for key in ("gap", "cls", "swe", "cswe"):
            runs = [longest(results, key, layer)]
            if key == "swe" and runs[0][1] == 80:
                # More epochs make it worse: its better runs, too, since they are what the others are held against.
                runs.insert(0, (results.row("images-table1", POOLS[key].text, layer), 30))
            for row, epochs in runs:
                if row is None:
                    continue
                paper = TABLE1.get((POOLS[key].text, layer))
                cells = [str(layer), POOLS[key].label, size_text(row), str(epochs), count_text(row)]
                for number, split in enumerate(TABLE1_SPLITS):
                    cells += [mean_text(row, split), NOTHING if paper is None else str(paper[number])]
                lines.append([*cells, seconds_text(row), memory_text(row)])
    return grid(head, lines)


def epochs_check(results: Results) -> str:
    """Thirty epochs against the paper's eighty, the same seeds."""
    head = ["Layer", "Pooling", "Epochs", "Seeds", "Train", "Validation", "Test", "Test, 80 − 30"]
    pairs = []
    for layer in LAYERS:
        for key in ("gap", "cls", "swe", "cswe"):
            pool = POOLS[key].text
            long = results.row("images-table1", with_choices(pool, "epochs=80"), layer)
            label = f"{POOLS[key].label}, L = 128" if key in ("swe", "cswe") else POOLS[key].label
            pairs.append((layer, label, results.row("images-table1", pool, layer), long))
    short, long = (results.row("images-slices", pool, 12, 64) for pool in ("cswe", "cswe:epochs=80"))
    pairs.append((12, "C-SWE, L = 64", short, long))
    lines = []
    for layer, label, short, long in pairs:
        if short is None or long is None:
            continue
        both = {result.cell.seed for result in short.results} & {result.cell.seed for result in long.results}
        short, long = only_seeds(short, both), only_seeds(long, both)
        for row, epochs in ((short, "30"), (long, "80")):
            scores = [mean_text(row, split) for split in TABLE1_SPLITS]
            difference = gain_text(long, short) if epochs == "80" else ""
            lines.append([str(layer), label, epochs, count_text(row), *scores, difference])
    return grid(head, lines)


def slices_table(results: Results) -> str:
    """Accuracy against the number of slices at layer 12; C-SWE against SWE with as many epochs."""
    head = ["L", "Pooling", "Epochs", "Size", "Seeds", "Top-1", "Top-5", "C-SWE − SWE"]
    head += ["Time", "paper", "Memory", "paper"]
    lines = []
    for slices in (4, 8, 16, 32, 64, 128):
        study = "images-table1" if slices == 128 else "images-slices"
        plain, long = (results.row(study, pool, 12, slices) for pool in ("swe", "swe:epochs=80"))
        for label, epochs, row, twin in (
            ("SWE", "30", plain, None),
            ("SWE", "80", long, None),
            ("C-SWE", "30", results.row(study, "cswe", 12, slices), plain),
            ("C-SWE", "80", results.row(study, "cswe:epochs=80", 12, slices), long),
        ):
            if row is None:
                continue
            told = image_resources(slices) or (NOTHING, NOTHING)
            difference = gain_text(row, twin) if label == "C-SWE" else ""
            scores = [mean_text(row), mean_text(row, metric="top5")]
            own = [seconds_text(row), told[0], memory_text(row), told[1]]
            lines.append([str(slices), label, epochs, size_text(row), count_text(row), *scores, difference, *own])
    return grid(head, lines)


def map_table(results: Results) -> str:
    """Give the learned map M → 1: as many numbers as slices."""
    head = ["Layer", "Pooling", "Size", "Seeds", "Train", "Validation", "Test", "C-SWE − SWE", "against GAP"]
    head += ["Time", "Memory"]
    lines = []
    for layer in LAYERS:
        gap, _ = longest(results, "gap", layer)
        plain, bounded = (results.row("images-map", pool, layer) for pool in ("swe", "cswe"))
        for label, row in (("mean (GAP)", gap), ("SWE, M → 1", plain), ("C-SWE, M → 1", bounded)):
            if row is None:
                continue
            scores = [mean_text(row, split) for split in TABLE1_SPLITS]
            twins = gain_text(bounded, plain) if row is bounded else ""
            against = "" if row is gap else gain_text(row, gap)
            own = [seconds_text(row), memory_text(row)]
            lines.append([str(layer), label, size_text(row), count_text(row), *scores, twins, against, *own])
    return grid(head, lines)


def matching_table(results: Results) -> str:
    """Hold ranks against what public code gathers by, and against displacements listed by rank."""
    head = ["Layer", "Displacements", "Epochs", "Seeds", "Train", "Validation", "Test", "against the paper's form"]
    head += ["Time", "Memory"]
    lines = []
    for layer in LAYERS:
        plain, long = (results.row("images-table1", pool, layer, 128) for pool in ("swe", "swe:epochs=80"))
        for label, epochs, row, own in (
            ("by reference point (the paper)", 30, plain, plain),
            ("by argsort (public code)", 30, results.named("images-matching", "swe-argsort", layer), plain),
            ("by rank", 30, results.row("images-matching", "swe:order=rank", layer, 128), plain),
            ("by reference point, slices as drawn", 30, results.named("images-matching", "swe-fixed", layer), plain),
            ("by reference point (the paper)", 80, long, long),
            (
                "by argsort (public code)",
                80,
                results.row("images-matching", with_choices(POOLS["swe-argsort"].text, "epochs=80"), layer, 128),
                long,
            ),
        ):
            if row is not None:
                scores = [mean_text(row, split) for split in TABLE1_SPLITS]
                difference = "" if row is own else gain_text(row, own)
                cost = [seconds_text(row), memory_text(row)]
                lines.append([str(layer), label, str(epochs), count_text(row), *scores, difference, *cost])
    return grid(head, lines)


def temperature_table(results: Results) -> str:
    """Compare the paper's temperature with softer ones."""
    head = ["ε", "τ", "Seeds", "Train", "Test", "against SWE", "Time", "Memory"]
    plain = results.row("images-slices", "swe", 12, 32)
    lines = []
    for bound, temperature, study, pool in (
        ("no bound", "", "images-slices", "swe"),
        ("21 (paper)", "0.01 (paper)", "images-slices", "cswe"),
        ("21 (paper)", "1", "images-temperature", "cswe:temperature=1"),
        ("21 (paper)", "10", "images-temperature", "cswe:temperature=10"),
        ("26", "0.01 (paper)", "images-temperature", "cswe:bound=26"),
        ("26", "1", "images-temperature", "cswe:bound=26,temperature=1"),
        ("26", "10", "images-temperature", "cswe:bound=26,temperature=10"),
    ):
        if (row := results.row(study, pool, 12, 32)) is None:
            continue
        scores = [mean_text(row, "train"), mean_text(row), "" if row is plain else gain_text(row, plain)]
        lines.append([bound, temperature, count_text(row), *scores, seconds_text(row), memory_text(row)])
    return grid(head, lines)


def soft_table(results: Results) -> str:
    """C-SWE of Table 1 with a softer sort, against SWE and against the paper's temperature."""
    head = ["Layer", "Pooling", "τ", "Seeds", "Train", "Validation", "Test"]
    head += ["against SWE", "against the paper's τ", "Time"]
    lines = []
    for layer in LAYERS:
        plain, paper = (results.row("images-table1", pool, layer, 128) for pool in ("swe:epochs=80", "cswe:epochs=80"))
        for label, temperature, row in (
            ("SWE", "", plain),
            ("C-SWE", "0.01 (paper)", paper),
            ("C-SWE", "10", results.row("images-soft", SOFT, layer, 128)),
        ):
            if row is None:
                continue
            scores = [mean_text(row, split) for split in TABLE1_SPLITS]
            against = gain_text(row, plain) if label == "C-SWE" else ""
            softer = gain_text(row, paper) if temperature == "10" else ""
            lines.append([str(layer), label, temperature, count_text(row), *scores, against, softer, seconds_text(row)])
    return grid(head, lines)


def tuned_table(results: Results) -> str:
    """All poolings under the same regularisation and the same search."""
    head = ["Pooling", "Size", "Seeds", *(f"Layer {layer}" for layer in LAYERS), "Time", "Memory"]
    lines = []
    for key in IMAGE_RIVALS:
        rows = [results.named("images-tuned", key, layer) for layer in LAYERS]
        last = next((row for row in reversed(rows) if row is not None), None)
        if last is None:
            continue
        cells = [POOLS[key].label, size_text(last), count_text(last), *map(mean_text, rows)]
        lines.append([*cells, seconds_text(last), memory_text(last)])
    lines.append(["paper, best of its three", "", "3", *best_texts(LAYERS), "", ""])
    lines.append(
        ["the same three here (SWE with 30 epochs)", "", "3", *map(mean_text, papers_three_here(results)), "", ""]
    )
    mapped = mapped_here(results)
    lines.append(["SWE, M → 1 here (30 epochs)", "128", count_text(mapped[-1]), *map(mean_text, mapped), "", ""])
    return grid(head, lines)


def papers_three_here(results: Results) -> list[Row | None]:
    """Return the best of the paper's mean, SWE and C-SWE as they came out here, SWE with the better 30 epochs."""
    pools = ("mean:epochs=80", "swe", "cswe:epochs=80")
    rows = [[results.row("images-table1", pool, layer) for pool in pools] for layer in LAYERS]
    return [max(filter(None, found), key=lambda row: row.mean("test", "top1").mean, default=None) for found in rows]


def mapped_here(results: Results) -> list[Row | None]:
    """Return the learned map M → 1 of SWE at every layer."""
    return [results.row("images-map", "swe", layer) for layer in LAYERS]


def _against(results: Results, study: str, keys: tuple[str, ...], rivals: tuple[str, ...], metric: str = "top1") -> str:
    head = ["Pooling", *(f"Layer {layer}: − {POOLS[rival].label}" for layer in LAYERS for rival in rivals)]
    lines = []
    for key in keys:
        rows = {layer: results.named(study, key, layer) for layer in LAYERS}
        if not any(rows.values()):
            continue
        cells = [POOLS[key].label]
        for layer, row in rows.items():
            for rival in rivals:
                other = results.named(study, rival, layer)
                cells.append("" if rival == key else gain_text(row, other, metric=metric))
        lines.append(cells)
    return grid(head, lines)


def tuned_differences(results: Results) -> str:
    """Differences to attention pooling and to attentive statistics."""
    return _against(results, "images-tuned", IMAGE_RIVALS, _YARDSTICKS)


def nearest_differences(results: Results) -> str:
    """Differences of the vectors by themselves."""
    return _against(results, "images-tuned", IMAGE_RIVALS, _YARDSTICKS, "nearest")


def nearest_table(results: Results) -> str:
    """Judge vectors by themselves, by the class of the nearest training image."""
    head = ["Pooling", "Seeds", *(f"Layer {layer}" for layer in LAYERS)]
    lines = []
    for key in IMAGE_RIVALS:
        rows = [results.named("images-tuned", key, layer) for layer in LAYERS]
        if not any(rows):
            continue
        lines.append([POOLS[key].label, count_text(rows[-1]), *(mean_text(row, metric="nearest") for row in rows)])
    return grid(head, lines)


def few_table(results: Results) -> str:
    """One, five and twenty labels a class."""
    head = ["Pooling", "Seeds", *(f"{count} a class" for count in FEW)]
    head += [f"{count}: − {name}" for count in FEW for name in ("attention", "statistics")]
    head += ["Time, 20 a class", "Memory"]
    lines = []
    for key in FEW_RIVALS:
        rows = {count: _few_row(results, key, count) for count in FEW}
        if not any(rows.values()):
            continue
        cells = [POOLS[key].label, count_text(rows[1]), *map(mean_text, rows.values())]
        for count, row in rows.items():
            for rival in _YARDSTICKS:
                cells.append("" if rival == key else gain_text(row, _few_row(results, rival, count)))
        lines.append([*cells, seconds_text(rows[20]), memory_text(rows[20])])
    return grid(head, lines)


def _few_row(results: Results, key: str, count: int) -> Row | None:
    text = with_choices(POOLS[key].text, f"labels_per_class={count}")
    return results.row("images-few", text, 12, POOLS[key].slices)


def tuning_table(results: Results) -> str:
    """Say what the search chose for every pooling at every layer."""
    return choices_table(results, IMAGES, LAYERS, IMAGE_RIVALS)


def shapes_table(results: Results) -> str:
    """Vectors of one size, cut in different ways, by validation."""
    head = ["Pooling", "L", "Size", *(f"Layer {layer}" for layer in LAYERS), "Mean"]
    lines = []
    for named in (*SEARCHED_SHAPES, *SHAPES):
        study, text = "images-shapes", named.text
        if named in SEARCHED_SHAPES:
            study, text = "images-tuning", with_choices(text, *SHAPES_POINT)
        rows = [results.row(study, text, layer, named.slices) for layer in LAYERS]
        found = [row.mean("validation", "top1").mean for row in rows if row is not None]
        if found:
            cells = [named.label, str(named.slices), size_text(next(filter(None, rows)))]
            mean = f"{100 * sum(found) / len(found):.2f}" if len(found) == len(LAYERS) else NOTHING
            lines.append([*cells, *(mean_text(row, "validation") for row in rows), mean])
    return grid(head, lines)


def beyond_table(results: Results) -> str:
    """Points beyond the edges of the search, by validation."""

    def rows(layer: int, key: str) -> list[Row | None]:
        texts = (with_choices(POOLS[key].text, *point) for point in BEYOND.values())
        return [results.row("images-beyond", text, layer, POOLS[key].slices) for text in texts]

    return _against_search(results, [f"best of {len(IMAGES.grid)}", *BEYOND], rows)


def longer_table(results: Results) -> str:
    """Twice the epochs, by validation."""
    return _against_search(
        results, ["16 epochs", "32 epochs"], lambda layer, key: [results.named("images-longer", key, layer)]
    )


def _against_search(results: Results, head: list[str], rows: Callable[[int, str], list[Row | None]]) -> str:
    """Hold runs of the strongest poolings that were not in the search against the best that was, by validation."""
    chosen = read_choices(IMAGES, [results.folder])
    lines = []
    for layer in LAYERS:
        for key in STRONGEST:
            found = rows(layer, key)
            if any(found):
                best = f"{100 * chosen[layer, key, None]['validation']:.2f}"
                lines.append([str(layer), POOLS[key].label, best, *(mean_text(row, "validation") for row in found)])
    return grid(["Layer", "Pooling", *head], lines)


def clock_table(results: Results) -> str:
    """Hold the paper's own recipe at L = 64, with extraction, against the clock."""
    row = results.row("images-clock", "cswe", 12)
    store = next((entry for entry in read_extractions(results.folder) if entry["store"] == "images"), None)
    wall = row.whole[0].facts["wall"] if row is not None else None
    times = [None if store is None else store["seconds"], wall]
    told = [f"{value:.0f} s" if value is not None else NOTHING for value in times]
    known = [value for value in times if value is not None]
    total = f"{sum(known):.0f} s" if len(known) == 2 else NOTHING
    extracted = NOTHING if store is None else f"{store['memory']['bytes'] / 1e9:.1f} GB"
    lines = [
        ["extraction, layers 6, 9 and 12", told[0], extracted, "", ""],
        ["C-SWE, L = 64, 80 epochs, all scores", told[1], memory_text(row), "6–12 h", "≈ 80 GB"],
        ["together", total, "", "", ""],
        ["test accuracy", mean_text(row), "", "", ""],
    ]
    return grid(["", "ours", "memory", "paper's time", "paper's memory"], lines)
