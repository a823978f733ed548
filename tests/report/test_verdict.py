"""The sentence: computed from the table, honest whichever method is ahead."""

import math

import pytest

from cswe.training.cells import Cell, Result
from cswe.training.recipe import Recipe
from cswe.training.table import Table
from cswe.training.verdict import verdict


def table(accuracies, splits=("train", "validation", "test")):
    results = []
    for (pool, slices), values in accuracies.items():
        for seed, value in enumerate(values):
            scores = {split: {"top1": value} for split in splits}
            results.append(Result(Cell(pool, 0, slices, seed, Recipe()), 8, scores, {"task": "classification"}))
    return Table.of(results)


POOLS = {
    ("mean", None): [0.3, 0.31],
    ("attention", None): [0.8, 0.81],
    ("swe", 4): [0.9, 0.91],
    ("cswe", 4): [0.92, 0.93],
}


def test_it_names_the_winner_and_its_lead():
    assert verdict(table(POOLS)) == (
        "With settings chosen by validation, C-SWE with 4 slices has the best test top-1 accuracy, 92.5 % ± 0.7 over 2 "
        "seeds, 2.0 ± 0.0 points ahead of SWE with 4 slices and 12.0 ± 0.0 points ahead of attention."
    )


@pytest.mark.parametrize("winner", list(POOLS))
def test_it_changes_with_the_numbers_whoever_wins(winner):
    sentence = verdict(table(POOLS | {winner: [0.98, 0.99]}))
    name = {"mean": "GAP", "attention": "attention", "swe": "SWE", "cswe": "C-SWE"}[winner[0]]
    assert sentence.startswith(f"With settings chosen by validation, {name} ")
    assert "98.5 %" in sentence
    assert sentence != verdict(table(POOLS))
    assert sentence.count(".") - sentence.count(".0") - sentence.count(".5") - sentence.count(".7") <= 1


def test_a_narrow_lead_is_called_narrow():
    assert "not clearly ahead of attention" in verdict(
        table({("attention", None): [0.8, 0.9], ("mean", None): [0.9, 0.85]})
    )
    assert "on one seed, which proves nothing" in verdict(table({("attention", None): [0.8], ("mean", None): [0.9]}))


def test_the_bound_is_spoken_of_when_neither_wins():
    told = verdict(table(POOLS | {("attention", None): [0.98, 0.99]}))
    assert told.endswith("while the bound changes SWE by +2.0 ± 0.0 points.")
    told = verdict(table(POOLS | {("attention", None): [0.98, 0.99], ("cswe", 4): [0.86, 0.93]}))
    assert told.endswith("no more than chance would.")


def test_settings_are_chosen_by_validation_not_by_test():
    results = []
    for slices, validation, test in ((4, 0.9, 0.5), (16, 0.8, 0.99)):
        scores = {"validation": {"top1": validation}, "test": {"top1": test}}
        results.append(Result(Cell("swe", 0, slices, 0, Recipe()), 8, scores, {"task": "classification"}))
    assert "SWE with 4 slices has the best test top-1 accuracy, 50.0 %" in verdict(Table.of(results))


def test_what_has_no_number_has_no_say():
    assert "GAP has the best" in verdict(table({("swe", 4): [math.nan, 0.9], ("mean", None): [0.5, 0.5]}))
    assert verdict(table({("swe", 4): [math.nan]})) == "No run has a score yet."
    assert verdict(Table.of([])) == "No run has a score yet."
    assert "best validation" in verdict(table({("swe", 4): [0.5]}, splits=("validation",)))


def test_equals_are_called_level():
    same = {("swe", 4): [0.9, 0.8], ("cswe", 4): [0.9, 0.8]}
    assert verdict(table(same)).endswith("level with C-SWE with 4 slices.")
    told = verdict(table(same | {("attention", None): [0.98, 0.99]}))
    assert told.endswith("while the bound on SWE changes nothing.")
