"""The exercises of the course: right answers pass, tempting ones are refuted by the number that refutes them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino import accounting
from sordino.cli import app
from sordino.course import EXERCISES, check, lessons, notebook, read_lesson, refutation
from sordino.errors import InvalidArgument, UnsupportedEvent
from sordino.events import ApproximateDP, Gaussian, ParallelComposed, PoissonSampled, PureDP, SelfComposed
from sordino.mechanisms import LaplaceMechanism

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")


def ridge(x, y, penalty, factor=None):
    return np.linalg.solve(x.T @ x + (factor or len(x)) * penalty * np.eye(x.shape[1]), x.T @ y)


def descent(x, y, tolerance, steps=None, size=1.0):
    curvature = np.linalg.eigvalsh(2 * x.T @ x / len(x))
    steps = steps or math.ceil(curvature[-1] / curvature[0] * math.log(1 / tolerance) / 2)
    theta = np.zeros(x.shape[1])
    for _ in range(steps):
        theta = theta + size / curvature[-1] * 2 / len(x) * x.T @ (y - x @ theta)
    return theta, steps


def best_noise(steps, condition, budget):
    shape = ((1 - 1 / condition) ** np.arange(steps - 1, -1, -1.0)) ** -0.25
    return shape * np.sqrt(np.sum(shape**-2.0) / budget)


RIGHT = {
    "baseline": 0.754,
    "ridge": ridge,
    "gradients": (lambda theta: 2 * theta, lambda x, y, theta: -2 * x.T @ (y - x @ theta)),
    "convex": {"x^2"},
    "descent": descent,
    "sequential": 0.8,
    "parallel": {"add or remove one": 0.5, "replace one": 0.8},
    "salaries": 40_000,
    "thousand": {"basic": 400, "optimal": 123.8},
    "sampled": 4.906,
    "noise": 2.14,
    "late noise": best_noise,
    "accountants": 0.94687,
}
TEMPTING = [
    ("baseline", 0.5, "75.4 %"),
    ("ridge", lambda x, y, penalty: ridge(x, y, penalty, factor=1), "a factor n"),
    ("ridge", lambda x, y, penalty: np.linalg.lstsq(x, y, rcond=None)[0], "not 0"),
    ("gradients", (lambda t: t, RIGHT["gradients"][1]), "of θ²"),
    ("gradients", (RIGHT["gradients"][0], lambda x, y, theta: 2 * x.T @ (y - x @ theta)), "the sign"),
    ("gradients", (RIGHT["gradients"][0], lambda x, y, theta: -2 * (y - x @ theta)), "the shape"),
    ("gradients", (RIGHT["gradients"][0], lambda x, y, theta: -x.T @ (y - x @ theta)), "measured"),
    ("convex", {"x^2", "x^3"}, "x^3 is not convex"),
    ("convex", {"x^2", "sqrt x"}, "sqrt x is not convex"),
    ("convex", {"x^2", "log x"}, "log x is not convex"),
    ("convex", set(), "x^2 is convex too"),
    ("convex", {"sin"}, "the functions are"),
    ("descent", lambda x, y, tolerance: descent(x, y, tolerance, steps=x.shape[1]), "not on the columns"),
    ("descent", lambda x, y, tolerance: descent(x, y, tolerance, size=2.2), "of the first gap"),
    ("descent", lambda x, y, tolerance: descent(x, y, tolerance, steps=4000), "do."),
    ("sequential", 0.5, "0.80, above"),
    ("sequential", 1.0, "more than is needed"),
    ("parallel", {"add or remove one": 0.5, "replace one": 0.5}, "moves a record"),
    ("parallel", {"add or remove one": 0.8, "replace one": 0.8}, "lies in one part"),
    ("salaries", 7717.05, "5.2·ε"),
    ("salaries", 200_000, "the farthest is 40 000"),
    ("thousand", {"basic": 400, "optimal": 47.02}, "is no bound"),
    ("thousand", {"basic": 400, "optimal": 30.98}, "is no bound"),
    ("thousand", {"basic": 400, "optimal": 251}, "optimal: 123.8"),
    ("sampled", 4.0, "the first term"),
    ("sampled", 400, "4.906"),
    ("noise", 2.0, "above 2"),
    ("noise", 3.0, "would do as well"),
    ("late noise", lambda steps, condition, budget: [math.sqrt(steps / budget)] * steps, "can be had"),
    ("late noise", lambda steps, condition, budget: best_noise(steps, condition, budget)[::-1], "can be had"),
    ("late noise", lambda steps, condition, budget: [1.0] * steps, "the budget is"),
    ("accountants", 1.26, "the moments accountant"),
    ("accountants", 9.34, "terms dropped"),
    ("accountants", 0.9, "less than is true"),
]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_right_answer_passes_and_no_answer_gets_the_hint(name, capsys):
    assert refutation(name, RIGHT[name]) is None
    check(name)
    check(name, RIGHT[name])
    assert capsys.readouterr().out == f"No answer yet. Hint: {EXERCISES[name].hint}\nRight. {EXERCISES[name].because}\n"


@pytest.mark.parametrize(("name", "answer", "words"), TEMPTING)
def test_a_tempting_answer_is_refuted(name, answer, words):
    assert words in refutation(name, answer)


@pytest.mark.parametrize("name", EXERCISES)
def test_an_answer_of_another_kind_is_no_error(name):
    assert refutation(name, object())
    with pytest.raises(InvalidArgument, match="name must be"):
        check("no exercise")


def test_the_event_that_breaks_the_short_form_does_so_in_another_computation():
    from mpmath import binomial, exp, mp, mpf

    words = refutation("thousand", {"basic": 400, "optimal": 47.02})
    place, claimed = int(re.search(r"more than (\d+) point", words)[1]), float(re.search(r"a δ of ([\d.]+)", words)[1])
    with mp.workdps(40):
        chance = exp(mpf("0.4")) / (1 + exp(mpf("0.4")))
        tail = [
            sum(binomial(1000, k) * c**k * (1 - c) ** (1000 - k) for k in range(place + 1, 1001))
            for c in (chance, 1 - chance)
        ]
        assert float(tail[0] - exp(mpf("47.02")) * tail[1]) == pytest.approx(claimed, rel=0.02)


def test_both_sums_of_composition_are_reached_by_laplace_counts():
    # The counts are 3 and 4 in neighbors of one part; 3, 7 and 4, 6 where a record moves.
    z = np.linspace(-20, 30, 501)
    first = 0.3 * (np.abs(z - 4) - np.abs(z - 3))
    second = 0.5 * (np.abs(z - 4) - np.abs(z - 3))
    moved = 0.5 * (np.abs(z - 6) - np.abs(z - 7))
    assert (first[:, None] + second).max() == pytest.approx(RIGHT["sequential"])
    assert (first[:, None] + moved).max() == pytest.approx(RIGHT["parallel"]["replace one"])
    assert second.max() == pytest.approx(RIGHT["parallel"]["add or remove one"])
    parts = ParallelComposed(events=(PureDP(epsilon=0.3), PureDP(epsilon=0.5)))
    assert accounting.epsilon(parts, 0.0).upper == pytest.approx(0.5)
    with pytest.raises(UnsupportedEvent):
        accounting.epsilon(parts, 0.0, neighboring_relation="replace_one")


def test_the_numbers_of_the_page_are_what_is_computed():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "teaching.md", "exec"), names)
    queries = ApproximateDP(epsilon=0.4, delta=1e-6)
    whole = SelfComposed(event=queries, count=1000)
    one = math.log1p(0.01 * math.expm1(0.4))
    pairs = SelfComposed(event=ApproximateDP(epsilon=one, delta=1e-8), count=1000)
    sampled = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=queries), count=1000)
    noise = accounting.calibrate_noise_multiplier(
        lambda sigma: Gaussian(noise_multiplier=sigma), target_epsilon=0.4, delta=1e-6
    )
    gaussian = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=noise)), count=1000)
    computed = {
        "123.8": accounting.epsilon(whole, 1.1e-3, accountant="optimal").upper,
        "251.0": 0.4 * math.sqrt(2000 * math.log(1e4)) + 400 * math.expm1(0.4),
        "47.02": 0.4 * math.sqrt(1000 * math.log(1e6)),
        "30.98": 0.4 * math.sqrt(1000 * math.log10(1e6)),
        "4.906": 1000 * one,
        "0.769": accounting.epsilon(pairs, 2e-5, accountant="advanced").upper,
        "0.549": accounting.epsilon(pairs, 2e-5, accountant="optimal").upper,
        "0.446": accounting.epsilon(sampled, 2e-5).upper,
        "0.449": accounting.epsilon(gaussian, 1e-6, accountant="moments").upper,
        "0.118": accounting.epsilon(gaussian, 1e-6).upper,
    }
    for shown, value in computed.items():
        assert shown in PAGE
        assert value == pytest.approx(float(shown), abs=0.6 * 10.0 ** -len(shown.partition(".")[2]))
    salaries = np.array([71_250.0, 84_619.0, 98_400.0, 113_510.0, 130_530.0])
    local = max(abs(salaries.mean() - np.delete(salaries, k).mean()) for k in range(5))
    assert (round(salaries.mean(), 2), round(local, 2)) == (99_661.80, 7717.05)
    errors = [abs(LaplaceMechanism(epsilon=0.5, l1_sensitivity=40_000).release(0.0)) for _ in range(4000)]
    assert np.mean(errors) == pytest.approx(80_000, rel=0.1)


def test_every_lesson_has_its_exercises_and_is_on_the_page():
    asked = {
        name: set(re.findall(r'check\("([a-z ]+)", answer\)', path.read_text())) for name, path in lessons().items()
    }
    assert list(asked) == ["regression", "learning", "mechanisms", "schedules", "accounting"]
    assert sorted(name for names in asked.values() for name in names) == sorted(EXERCISES)
    for name, path in lessons().items():
        assert f"| `{name}` |" in PAGE
        cells = read_lesson(path.read_text(encoding="utf-8"))
        assert cells[0].kind == "markdown"
        # A reader's place for the answer comes before the cell that gives it away.
        source = [cell.source for cell in cells if cell.kind == "code"]
        for exercise in asked[name]:
            places = [k for k, text in enumerate(source) if f'check("{exercise}"' in text]
            assert "answer = None" in source[places[0]]
            assert len(re.findall(r"check\(", source[places[0]])) == 1


def test_the_command_lists_lessons_and_writes_a_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = json.loads(CliRunner().invoke(app, ["learn", "--json"]).stdout)
    assert list(shown["lessons"]) == list(lessons())
    result = CliRunner().invoke(app, ["learn", "mechanisms"])
    assert result.exit_code == 0
    body = json.loads((tmp_path / "mechanisms.ipynb").read_text(encoding="utf-8"))
    assert body == notebook(read_lesson(lessons()["mechanisms"].read_text(encoding="utf-8")))
    assert (body["nbformat"], body["nbformat_minor"]) == (4, 5)
    assert {cell["cell_type"] for cell in body["cells"]} == {"markdown", "code"}
    code = "\n".join("".join(cell["source"]) for cell in body["cells"] if cell["cell_type"] == "code")
    compile(code, "mechanisms", "exec")
    for arguments in (["learn", "mechanisms"], ["learn", "nothing"], ["learn", "--out", "x.ipynb"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2
