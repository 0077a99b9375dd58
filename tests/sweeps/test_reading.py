"""Sweep files: what they mean, and errors that name key, line and section."""

import re
from pathlib import Path

import pytest

from sordino import accounting, sweeps
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed, compose

ROOT = Path(__file__).parents[2]
GOOD = """title = "Adult"
[data]
name = "adult"
records = 4000
[base]
batch_size = 400
learning_rate = 1.0
epochs = 3
max_grad_norm = 1.0
[grid]
noise_multiplier = [1.0, 2.0]
"""


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


def steps_event(sigma, rate, steps):
    return SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=sigma)), count=steps)


def test_a_grid_is_every_combination_and_the_epsilon_of_a_cell_is_the_accountants():
    sweep = sweeps.parse_sweep(GOOD + "max_grad_norm = [0.5, 2]\nseed = [0, 1]\n")
    assert len(sweep.cells) == 8
    assert len({cell.key for cell in sweep.cells}) == 8
    for cell in sweep.cells:
        sigma = cell.told["noise_multiplier"]
        wanted = accounting.epsilon(steps_event(sigma, 0.1, 30), 1e-5).upper
        assert cell.epsilon == wanted
        assert cell.plan.steps == 30


def test_private_components_are_on_the_bill():
    (cell, _) = sweeps.parse_sweep(changed("epochs = 3", "epochs = 3\npca = 20\npca_noise_multiplier = 5")).cells
    both = compose([Gaussian(noise_multiplier=5.0), steps_event(1.0, 0.1, 30)])
    assert cell.epsilon == accounting.epsilon(both, 1e-5).upper
    bare = accounting.epsilon(steps_event(1.0, 0.1, 30), 1e-5).upper
    assert cell.epsilon > bare * 1.01


def test_a_target_is_reached_and_not_exceeded_with_components_too():
    text = changed("noise_multiplier = [1.0, 2.0]", "target_epsilon = [0.7, 2.0]\npca = [0, 20]")
    text = text.replace("[base]", "[base]\npca_noise_multiplier = 12")
    for cell in sweeps.parse_sweep(text).cells:
        goal = cell.told["target_epsilon"]
        assert goal * 0.995 < cell.epsilon <= goal
        event = steps_event(cell.plan.step_plan(0).noise_multiplier, 0.1, 30)
        if cell.settings.pca:
            event = compose([Gaussian(noise_multiplier=12.0), event])
        assert accounting.epsilon(event, 1e-5).upper <= goal


def test_cells_without_noise_or_clipping_have_no_epsilon():
    arms = '\narm = ["private", "noise without clipping", "clipping without noise", "neither"]\n'
    found = {cell.settings.arm: [] for cell in sweeps.parse_sweep(GOOD + arms).cells}
    for cell in sweeps.parse_sweep(GOOD + arms).cells:
        found[cell.settings.arm].append(cell)
    # Where σ has no part in the training, both of its values are one cell.
    assert {arm: len(cells) for arm, cells in found.items()} == {
        "private": 2,
        "noise without clipping": 2,
        "clipping without noise": 1,
        "neither": 1,
    }
    for arm, cells in found.items():
        for cell in cells:
            assert (cell.epsilon is not None) == (arm == "private")
            assert (cell.guarantee() is not None) == (arm == "private")


def test_several_grids_share_their_base_and_equal_cells_are_one():
    text = changed("[grid]\nnoise_multiplier = [1.0, 2.0]", "noise_multiplier = 2.0\n")
    text += "[[grids]]\nnoise_multiplier = [1.0, 2.0]\n[[grids]]\nbatch_size = [200, 400]\n"
    text += '[[panels]]\nx = "noise_multiplier"\n[[panels]]\nx = "batch_size"\n'
    sweep = sweeps.parse_sweep(text)
    assert len(sweep.cells) == 3
    assert [[cell.settings.batch_size for cell in sweep.of(panel)] for panel in sweep.panels] == [
        [400, 400],
        [400, 200],
    ]
    assert {cell.settings.noise_multiplier for cell in sweep.of(sweep.panels[1])} == {2.0}


def test_a_recipe_fills_what_is_not_given():
    text = changed("batch_size = 400\nlearning_rate = 1.0\nepochs = 3\nmax_grad_norm = 1.0", 'recipe = "logistic"')
    text = text.replace("noise_multiplier = [1.0, 2.0]", "target_epsilon = [1.0, 4.0]\nmax_grad_norm = [0.5]")
    low, high = sweeps.parse_sweep(text).cells
    assert low.settings.batch_size == 4000
    assert low.settings.max_grad_norm == 0.5
    assert low.settings.learning_rate < high.settings.learning_rate
    assert 0.99 < low.epsilon <= 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            changed("noise_multiplier = [1.0, 2.0]", "noise_multiplier = [1.0, -2.0]"),
            "noise_multiplier .*line 11, .grid",
        ),
        (changed("noise_multiplier = [1.0, 2.0]", "sigma = [1.0]"), r"sigma .*line 11, \[grid\].* unknown"),
        (changed("max_grad_norm = 1.0", "max_norm = 1.0"), r"max_norm .*line 9, \[base\].* unknown"),
        (changed("max_grad_norm = 1.0", "max_grad_norm = 0"), r"max_grad_norm .*line 9, \[base\].*> 0, got 0"),
        (changed("max_grad_norm = 1.0", 'clipping = "hard"'), r"clipping .*line 9, \[base\].*flat"),
        (changed("records = 4000", "rows = 4000"), r"rows .*line 4, \[data\].*unknown"),
        (changed("records = 4000", "records = 40000"), r"records .*line 4, \[data\].*30162"),
        (changed("records = 4000", "records = 100"), "batch_size of at most the 100 training records, got 400"),
        (changed('name = "adult"', ""), r"name .*\[data\].*must be a data set"),
        (changed("epochs = 3", "epochs = 3\nsteps = 9"), "one of epochs and steps, got both"),
        (changed("epochs = 3\n", ""), "epochs or steps, got neither"),
        (changed("noise_multiplier = [1.0, 2.0]", "seed = [0]"), "noise_multiplier or target_epsilon, got neither"),
        (changed("noise_multiplier = [1.0, 2.0]", "noise_multiplier = [1.0, 1.0]"), "different values"),
        (changed("noise_multiplier = [1.0, 2.0]", "noise_multiplier = []"), "at least one"),
        (changed("learning_rate = 1.0", "learning_rate = 1.0\nfinal_learning_rate = 0.5"), "together, got one"),
        (changed('title = "Adult"', "title = 3"), "title .*line 1.*text"),
        (changed('title = "Adult"', 'titel = "Adult"'), "titel .*line 1.*unknown"),
        (GOOD + "[[grids]]\nseed = [1]\n", "got both"),
        (GOOD + '[[panels]]\nx = "batch_size"\n', r"x .*line 13, \[panels\]"),
        (
            GOOD + '[[panels]]\nx = "noise_multiplier"\n[[panels]]\nx = "epoch"\ny = "loss"\n',
            r"y .*line 16, \[panels\]",
        ),
        (GOOD + '[[panels]]\nx = "epoch"\n', "one setting at each point, got cells that differ in noise_multiplier"),
        (GOOD + '[[panels]]\nx = "epoch"\nwhere = {noise_multiplier = 3.0}\n', "at least one cell"),
        (GOOD + "[grid\n", "must be TOML.*line 12"),
    ],
)
def test_an_error_names_the_key_and_where_it_stands(text, words):
    with pytest.raises(InvalidArgument, match=words):
        sweeps.parse_sweep(text)


def test_a_private_file_is_refused_before_it_is_looked_for():
    text = changed('name = "adult"', 'name = "patients.csv"')
    with pytest.raises(InvalidArgument, match=r"line 3, \[data\].* must be public.*sordino tune"):
        sweeps.parse_sweep(text)
    assert len(sweeps.parse_sweep(text.replace("records", 'public = true\ntest = "t.csv"\nrecords')).cells) == 2
    with pytest.raises(InvalidArgument, match=r"records .*must be declared"):
        sweeps.parse_sweep(text.replace("records = 4000", "public = true"))


def test_the_key_of_a_cell_follows_every_setting_and_the_data():
    keys = {
        sweeps.parse_sweep(text).cells[0].key
        for text in (
            GOOD,
            changed("1.0, 2.0", "1.1, 2.0"),
            changed("records = 4000", "records = 4001"),
            changed("epochs = 3", "epochs = 4"),
            changed("learning_rate = 1.0", "learning_rate = 1.5"),
            changed("max_grad_norm = 1.0", "max_grad_norm = 1.5"),
        )
    }
    assert len(keys) == 6
    assert sweeps.parse_sweep(GOOD).cells[0].key == sweeps.parse_sweep(changed("Adult", "Other")).cells[0].key


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_the_sweeps_of_the_repository_can_be_planned(path):
    sweep = sweeps.read_sweep(path)
    assert sweep.panels
    for cell in sweep.cells:
        assert (cell.guarantee(0) is None) == (cell.settings.arm != "private")
        # ε of estimated norms takes minutes where others take a moment.
        if not cell.settings.projections and cell.is_private:
            assert 0 < cell.epsilon < 50
    assert re.search(r"epochs|steps", sweep.note + sweep.title) or any(p.title for p in sweep.panels)


def test_panels_are_made_for_any_grid_that_names_none():
    sweep = sweeps.parse_sweep(GOOD + 'max_grad_norm = [0.5, 2]\narm = ["private", "neither"]\nepochs = [0.7, 2]\n')
    (accuracy, epsilon) = sweep.panels
    assert (accuracy.x, accuracy.lines, epsilon.y) == ("noise_multiplier", "max_grad_norm", "epsilon")
    shown = sweep.of(accuracy)
    assert {cell.value("epochs") for cell in shown} == {3.0} or len({cell.value("epochs") for cell in shown}) == 1


def test_a_length_in_epochs_is_compared_as_it_is_written():
    # 0.7 epochs are 7 steps of 400 records; 2.2 are 22.
    sweep = sweeps.parse_sweep(GOOD.replace("epochs = 3", "epochs = 2.2") + "epochs = [0.77, 2.2]\n")
    assert [cell.plan.steps for cell in sweep.cells] == [8, 22, 8, 22]
    assert {cell.value("epochs") for cell in sweep.cells} == {0.77, 2.2}
