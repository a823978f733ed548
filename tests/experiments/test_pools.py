"""Poolings are what their labels say, and of like size where they are rivals."""

import math
import re

import pytest

from cswe.training.cells import Plan
from cswe.training.model import make_pool
from experiments.pools import IMAGE_RIVALS, POINT_POOLS, POOLS, PROTEIN_RIVALS, SEARCHED_SHAPES, SHAPES
from experiments.records import RESULTS, read_study

RIVALS = [(key, 192) for key in IMAGE_RIVALS] + [(key, 320) for key in PROTEIN_RIVALS]


def said(label, dim):
    """Return the size that a label says: its numbers added or multiplied, times the dimension for means of tokens."""
    numbers = [int(number) for number in re.findall(r"\d+", label)]
    if "+" in label:
        return sum(numbers)
    return math.prod(numbers) if "×" in label else math.prod(numbers) * dim


@pytest.mark.parametrize(("key", "dim"), RIVALS)
def test_a_rival_has_the_size_that_its_label_says(key, dim):
    named = POOLS[key]
    recipe = Plan((named.text,), recipe="tuned").recipe_of(named.text, named.slices)
    size = make_pool(recipe.pooling, dim).out_dim
    assert size == said(named.label, dim)
    assert size <= 1024
    weighted = "weighted" in named.label or "attentive" in named.label
    if named.slices is not None:
        assert bool(recipe.pooling.weightings) == weighted


def test_shapes_have_one_size_which_their_labels_say():
    for named in (*SEARCHED_SHAPES, *SHAPES):
        choice = Plan((named.text,), recipe="tuned").recipe_of(named.text, named.slices).pooling
        assert make_pool(choice, 192).out_dim == said(named.label, 192) == 1024


def test_points_are_pooled_as_the_table_says():
    texts = [POINT_POOLS[key].text for key in ("statistics", "moments", "weighted")]
    recipes = [Plan((text,), recipe="tuned").recipe_of(text, 16).pooling for text in texts]
    assert [choice.weightings for choice in recipes] == [2, 0, 2]
    assert [make_pool(choice, 3).out_dim for choice in recipes] == [16 * 2 * 2, 16 * 8, 16 * 2 * 2]


def test_what_is_known_has_the_size_that_is_said():
    for study, keys, dim in (("images-tuned", IMAGE_RIVALS, 192), ("proteins-tuned", PROTEIN_RIVALS, 320)):
        labels = {POOLS[key].text: POOLS[key].label for key in keys}
        for result in read_study(RESULTS, study).values():
            assert result.size == said(labels[result.cell.pool], dim)
