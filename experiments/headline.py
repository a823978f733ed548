"""The short table in ``README.md``: poolings of up to 1024 numbers under the same regularisation, and raw points."""

from pathlib import Path

from cswe.training.table import grid
from experiments.image_tables import mapped_here, papers_three_here
from experiments.lookup import NOTHING, Results, mean_text
from experiments.paper import best_texts
from experiments.pools import RAW, RAW_POOLS, with_choices
from experiments.studies import LITERAL
from experiments.tuning import LAYERS, PROTEIN_LAYER

README = Path(__file__).parent.parent / "README.md"
MARKS = "<!-- made by python -m experiments.tables -->", "<!-- until here -->"
RAW_SLICES = 64
# As the table names it, on images, on proteins, on raw points.
_ROWS = (
    ("mean", "gap", "gap", "gap"),
    ("attention, 5 queries (proteins 3, points 1)", "attention-5", "attention-3", "attention-1"),
    ("attentive statistics, 1 × 512 (points 1 × 64)", "statistics-1", "statistics-1", "statistics-1"),
    ("weighted L-moments, 1 × 512 (points 1 × 64), the default", "weighted-1", "weighted-1", "weighted-1"),
    ('eight L-moments, `readout="moments:8"`', None, None, "moments"),
)


def headline(results: Results) -> str:
    """Give the table."""
    head = ["Test accuracy", *(f"images, layer {layer}" for layer in LAYERS), "nearest neighbour, layer 12", "proteins"]
    head += ["raw points", "balanced"]
    lines = []
    for label, image, protein, points in _ROWS:
        found = [None if image is None else results.named("images-tuned", image, layer) for layer in LAYERS]
        other = None if protein is None else results.named("proteins-tuned", protein, PROTEIN_LAYER)
        near = mean_text(found[-1], metric="nearest")
        raw = results.row("points-table", RAW_POOLS[points].text, RAW, RAW_SLICES)
        scores = [*(mean_text(row) for row in found), near, mean_text(other)]
        lines.append([label, *scores, mean_text(raw), mean_text(raw, metric="balanced")])
    lines.append(["the paper's best", *best_texts(LAYERS), *[NOTHING] * 4])
    here = [mean_text(row) for row in papers_three_here(results)]
    swe = results.row("proteins-table", with_choices("swe", LITERAL), PROTEIN_LAYER, 64)
    raw = results.row("points-table", "swe", RAW, RAW_SLICES)
    scores = [mean_text(swe), mean_text(raw), mean_text(raw, metric="balanced")]
    lines.append(["the same here, unregularised (mean, SWE or C-SWE; SWE, L = 64)", *here, NOTHING, *scores])
    mapped = map(mean_text, mapped_here(results))
    lines.append(["its map M → 1 of SWE here, 128 numbers, unregularised", *mapped, *[NOTHING] * 4])
    return grid(head, lines)


def with_headline(text: str, results: Results) -> str:
    """Put the table between its marks."""
    before, opened, rest = text.partition(MARKS[0])
    _, closed, after = rest.partition(MARKS[1])
    if not opened or not closed:
        raise ValueError(f"{README.name}: expected the marks {' and '.join(MARKS)}")
    return f"{before}{opened}\n\n{headline(results).rstrip()}\n\n{closed}{after}"
