"""What is run: searches and what they choose, and studies as the page tells of them."""

from dataclasses import replace

from cswe.training.decisive import difference
from experiments.extract import STORES
from experiments.pools import IMAGE_RIVALS, POOLS
from experiments.records import RESULTS, read_study, write_lines
from experiments.studies import LITERAL, SHAPES_POINT, STUDIES
from experiments.tuning import IMAGES, LAYERS, choose, chosen_by, note_choices, read_choices


def test_final_runs_wait_for_their_own_choice_alone(scored, tmp_path):
    tuned, few = STUDIES["images-tuned"], STUDIES["images-few"]
    assert tuned.tasks({}) == few.tasks({}) == []
    tasks = STUDIES["images-tuning"].tasks({})
    grid = len(IMAGES.grid)
    assert len(tasks) == grid * len(IMAGE_RIVALS) * len(LAYERS)
    results = [scored(task.cell, number / 100) for number, task in enumerate(tasks)]
    assert choose(IMAGES, results[: grid - 1]) == []
    note_choices(IMAGES, results[:grid], [tmp_path])  # the slowest pooling at the last layer
    chosen = chosen_by(IMAGES, [tmp_path / "none", tmp_path])
    assert chosen == {(12, "weighted", None): IMAGES.grid[-1]}
    assert {(task.cell.layer, task.cell.pool) for task in tuned.tasks(chosen)} == {(12, POOLS["weighted"].text)}
    assert few.tasks(chosen) == []  # two weightings are no rival there
    falling = [scored(task.cell, -number / 100) for number, task in enumerate(tasks)]
    note_choices(IMAGES, [*results[:grid], *falling[grid:]], [tmp_path])
    chosen = chosen_by(IMAGES, [tmp_path])
    assert len(few.tasks({(12, "weighted-1", None): IMAGES.grid[0]})) == 3 * 3
    assert chosen.pop((12, "weighted", None)) == IMAGES.grid[-1]  # stays what it was
    assert set(chosen.values()) == {IMAGES.grid[0]}
    assert len(chosen) == len(IMAGES.sought) - 1
    entry = read_choices(IMAGES, [tmp_path])[6, "gap", None]
    assert entry["validation"] == max(entry["tried"].values())
    note_choices(IMAGES, falling, [tmp_path])  # the first points were made again, and speak for another choice
    assert chosen_by(IMAGES, [tmp_path])[12, "weighted", None] == IMAGES.grid[0]


def test_choices_of_an_earlier_folder_count(tmp_path):
    tried = {" ".join(point): 0.5 for point in IMAGES.grid}
    entry = {"layer": 6, "pooling": "gap", "seed": None, "validation": 0.5, "tried": tried}
    for name, point in (("a", IMAGES.grid[1]), ("b", IMAGES.grid[2])):
        write_lines(tmp_path / name / IMAGES.file, {}, "chosen", [{**entry, "choices": list(point)}])
    assert chosen_by(IMAGES, [tmp_path / "a", tmp_path / "b"]) == {(6, "gap", None): IMAGES.grid[1]}


def test_a_choice_among_fewer_points_is_made_again(scored, tmp_path):
    wider = replace(IMAGES, grid=(*IMAGES.grid, ("weight_decay=0.9", "dropout=0.9", "lr=0.9")))
    results = [scored(task.cell, 0.5) for task in STUDIES["images-tuning"].tasks({})]
    note_choices(IMAGES, results, [tmp_path])
    assert len(chosen_by(IMAGES, [tmp_path])) == len(IMAGES.sought)
    assert chosen_by(wider, [tmp_path]) == {}
    note_choices(wider, results, [tmp_path])  # the new point has not been run
    assert chosen_by(wider, [tmp_path]) == {}
    assert len(chosen_by(IMAGES, [tmp_path])) == len(IMAGES.sought)  # nothing is lost meanwhile


def test_what_is_known_is_what_the_studies_ask_for():
    """A recipe that has changed since would make the next command refuse the results."""
    for name, study in STUDIES.items():
        known = read_study(RESULTS, name)
        chosen = {} if study.search is None else chosen_by(study.search, [RESULTS])
        asked = {task.cell.name: task.cell.recipe for task in study.tasks(chosen)}
        for cell, result in known.items():
            assert difference(result.cell.recipe, asked[cell]) == "", f"{name}, {cell}"


def everything(study):
    """Choose the first point for all that is sought."""
    return {} if study.search is None else {sought.key: study.search.grid[0] for sought in study.search.sought}


def test_studies_are_what_the_page_says():
    tasks = {name: study.tasks(everything(study)) for name, study in STUDIES.items()}
    counts = {name: len(found) for name, found in tasks.items()}
    assert counts["images-table1"] == 3 * 3 * 3 + 3 + 3 * 3 * 4
    assert counts["images-slices"] == 5 * (3 + 3 + 1 + 3)
    assert counts["images-map"] == 3 * (3 + 1)
    assert counts["images-matching"] == 3 * 2 * 3 + 3 + 3
    assert counts["images-temperature"] == 2 * 3 - 1
    assert counts["images-soft"] == 3 * 3
    assert counts["images-tuned"] == 8 * 3 * 3
    assert {task.cell.recipe.optimization.weight_decay for task in tasks["images-tuned"]} == {0.1}
    assert counts["images-beyond"] == 3 * 3 * 3
    assert counts["images-longer"] == 3 * 3
    assert counts["images-few"] == 6 * 3 * 3
    assert counts["proteins-table"] == 2 * (2 + 2 * 4) * 5
    assert counts["proteins-evolution"] == 2 * 3
    assert counts["images-tuning"] == 8 * 3 * 5
    assert counts["images-shapes"] == 5 * 3
    assert SHAPES_POINT in IMAGES.grid
    assert counts["proteins-tuning"] == 8 * 5
    assert counts["proteins-tuned"] == 8 * 5
    assert counts["points-tuning"] == (10 * 10 + 10 * 6 + 5 * 10) * 4  # four rates each
    assert counts["points-longer"] == 3 * 2 * 6
    assert {task.cell.recipe.optimization.epochs for task in tasks["points-longer"]} == {200}
    assert {task.cell.recipe.optimization.schedule_every for task in tasks["points-longer"]} == {50}
    assert counts["points-table"] == (2 + 8 * 5) * 10 + (3 + 7 * 5) * 6 + (2 + 3) * 10
    for task in tasks["points-table"] + tasks["points-tuning"]:
        assert task.store.endswith(f"-{task.cell.seed % 10}")  # every seed has its own split, the search's, too
    assert {task.store for found in tasks.values() for task in found} == set(STORES)
    paper = [task.cell.recipe for task in tasks["images-table1"] if task.cell.pool == "cswe"]
    assert {recipe.optimization.epochs for recipe in paper} == {30}
    assert {recipe.bounding.slack_every for recipe in paper} == {22}
    plain = [task.cell for task in tasks["images-table1"] if task.cell.pool == "mean:epochs=80"]
    assert {cell.recipe.optimization.epochs for cell in plain} == {80}
    assert {(cell.layer, cell.seed) for cell in plain} == {(layer, seed) for layer in (6, 9, 12) for seed in range(3)}
    (clock,) = tasks["images-clock"]
    assert (clock.cell.recipe.optimization.epochs, clock.cell.slices) == (80, 64)
    literal = [task.cell for task in tasks["proteins-table"] if LITERAL in task.cell.pool]
    chosen = [cell.recipe.optimization for cell in literal]
    assert {(choice.batch_size, choice.epochs, choice.lr) for choice in chosen} == {(32, 50, 1e-4)}
    assert {cell.seed for cell in literal} == set(range(5))
    searches = ("images-tuning", "images-shapes", "images-beyond", "images-longer", "proteins-tuning")
    assert {task.cell.seed for name in searches for task in tasks[name]} == {10}  # which no final run has
    long = {(task.cell.layer, task.cell.seed) for task in tasks["images-table1"] if task.cell.pool == "cswe:epochs=80"}
    assert long == {(cell.layer, cell.seed) for cell in plain}
    sizes = {key: POOLS[key].slices for key in ("statistics", "weighted", "moments")}
    assert sizes == {"statistics": 256, "weighted": 256, "moments": 192}
