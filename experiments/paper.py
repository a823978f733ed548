"""What the paper says, where it says it in numbers; its other results are figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A number of the paper: mean and standard deviation over its runs."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.std:.2f})"


# Table 1: Tiny ImageNet, L = 128, three runs, by pool and layer: train, validation, test.
TABLE1: dict[tuple[str, int], tuple[Printed, Printed, Printed]] = {
    ("cswe", 6): (Printed(60.08, 3.56), Printed(48.65, 0.80), Printed(49.00, 0.41)),
    ("cswe", 9): (Printed(73.76, 2.47), Printed(60.01, 0.90), Printed(59.48, 0.29)),
    ("cswe", 12): (Printed(71.15, 0.51), Printed(57.76, 0.42), Printed(57.87, 0.27)),
    ("swe", 6): (Printed(88.57, 0.07), Printed(42.31, 0.29), Printed(43.02, 0.77)),
    ("swe", 9): (Printed(90.43, 0.03), Printed(55.44, 0.36), Printed(54.86, 0.26)),
    ("swe", 12): (Printed(97.22, 0.12), Printed(53.88, 0.13), Printed(54.26, 0.52)),
    ("mean", 6): (Printed(54.10, 1.11), Printed(47.19, 0.07), Printed(47.88, 0.06)),
    ("mean", 9): (Printed(68.17, 0.52), Printed(62.20, 0.03), Printed(62.00, 0.17)),
    ("mean", 12): (Printed(66.78, 0.31), Printed(59.98, 0.02), Printed(60.19, 0.09)),
}
TABLE1_SPLITS = ("train", "validation", "test")


def best_texts(layers: tuple[int, ...]) -> list[str]:
    """Return the test accuracy of the paper's best pooling at every layer."""
    pools = {pool for pool, _ in TABLE1}
    return [f"{max(TABLE1[pool, layer][2].mean for pool in pools):.2f}" for layer in layers]


# Tables of compute resources: time and memory of a run, by number of slices for images.
IMAGES_RESOURCES = {32: ("3–7 h", "≤ 40 GB"), 64: ("6–12 h", "≈ 80 GB")}
POINTS_RESOURCES = PROTEINS_RESOURCES = ("1–12 h", "≤ 30 GB")


def image_resources(slices: int) -> tuple[str, str] | None:
    """Return time and memory of a run on images; None for more slices than the paper tells of.

    Examples
    --------
    >>> image_resources(16)
    ('3–7 h', '≤ 40 GB')
    """
    return next((told for most, told in IMAGES_RESOURCES.items() if slices <= most), None)
