"""The short table in ``README.md``: poolings of up to 1024 numbers under the same regularisation."""

from pathlib import Path

from cswe.training.table import grid
from experiments.lookup import NOTHING, Results, mean_text
from experiments.paper import best_texts
from experiments.tuning import LAYERS, PROTEIN_LAYER

README = Path(__file__).parent.parent / "README.md"
MARKS = "<!-- made by python -m experiments.tables -->", "<!-- until here -->"
# As the table names it, on images, on proteins.
_ROWS = (
    ("mean", "gap", "gap"),
    ("attention, 5 queries (proteins 3)", "attention-5", "attention-3"),
    ("attentive statistics, 1 × 512", "statistics-1", "statistics-1"),
    ("weighted L-moments, 1 × 512 (the default)", "weighted-1", "weighted-1"),
)


def headline(results: Results) -> str:
    """Give the table."""
    head = ["Test accuracy", *(f"images, layer {layer}" for layer in LAYERS), "nearest neighbour, layer 12", "proteins"]
    lines = []
    for label, image, protein in _ROWS:
        found = [results.named("images-tuned", image, layer) for layer in LAYERS]
        other = results.named("proteins-tuned", protein, PROTEIN_LAYER)
        near = mean_text(found[-1], metric="nearest")
        lines.append([label, *(mean_text(row) for row in found), near, mean_text(other)])
    lines.append(["the paper's best", *best_texts(LAYERS), NOTHING, NOTHING])
    return grid(head, lines)


def with_headline(text: str, results: Results) -> str:
    """Put the table between its marks."""
    before, opened, rest = text.partition(MARKS[0])
    _, closed, after = rest.partition(MARKS[1])
    if not opened or not closed:
        raise ValueError(f"{README.name}: expected the marks {' and '.join(MARKS)}")
    return f"{before}{opened}\n\n{headline(results).rstrip()}\n\n{closed}{after}"
