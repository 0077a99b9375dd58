import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

ARGUMENTS = {
    "choose_epsilon": (["--epsilons", "1", "3", "--steps", "50"], lambda plans: len(plans) == 2),
    "education_income": (
        ["--epsilons", "1", "--repeats", "2", "--targets", "40"],
        lambda found: found["exact"] == 1.0 and found["private"] < 0.9 and found["everything"] > found["education"],
    ),
    "fit_adult": (["--steps", "10"], lambda accuracy: accuracy > 0.76),
    "learned_policy": (
        ["--small", "--steps", "6", "--rounds", "3", "--records", "100", "--epsilon", "3"],
        lambda found: set(found) == {"uniform", "learned"} and max(found.values()) < 1.5,
    ),
    "norm_policy": (
        ["--small", "--steps", "5", "--records", "100", "--runs", "1", "--epsilon", "3"],
        lambda found: len(found) == 3 and max(found.values()) < 1.5,
    ),
    "own_loop": (["--steps", "60"], lambda accuracy: accuracy > 0.8),
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} >= set(ARGUMENTS)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_the_example_runs_and_prints_its_guarantee(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, holds = ARGUMENTS[name]
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments)
    assert holds(result)
    assert "-differentially private: unit one record" in capsys.readouterr().out


def test_made_up_people_fit_their_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.data import load_dataset

    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "people.py"))
    dataset = load_dataset("people.csv", schema="people.schema.json", test="new.csv")
    assert (len(dataset.train), len(dataset.test or ())) == (2000, 200)
