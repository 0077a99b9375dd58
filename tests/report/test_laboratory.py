"""The laboratory: its table against the accountant and closed forms, and what a browser shows of it."""

import base64
import importlib.util
import json
import math
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from scipy.stats import norm

from reported_runs import EVERYTHING, SAMPLED, SAMPLED_PLAN, make
from sordino import accounting
from sordino.report import build_report, render_html
from sordino.report.render import laboratory_script

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("laboratory", ROOT / "website" / "laboratory.py")
laboratory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(laboratory)
TABLE = json.loads(laboratory.TABLE.read_text(encoding="utf-8"))
CODES = struct.unpack(f"<{len(base64.b64decode(TABLE['codes'])) // 2}H", base64.b64decode(TABLE["codes"]))
WIDTH = 1 + 2 * len(laboratory.DELTAS) + len(laboratory.FRACTIONS)
SETTINGS = [
    (0.01, 4.0, 10_000),
    (0.001, 0.5, 30_000),
    (0.3, 10.0, 300),
    (1.0, 2.0, 10),
    (0.1, 1.0, 1),
    (0.03, 0.7, 100),
]


def stored(rate, noise, steps):
    q, s, t = laboratory.RATES.index(rate), laboratory.NOISES.index(noise), laboratory.STEPS.index(steps)
    first = ((q * len(laboratory.NOISES) + s) * len(laboratory.STEPS) + t) * WIDTH
    return [laboratory.values(code) for code in CODES[first : first + WIDTH]]


def parts(found):
    count = len(laboratory.DELTAS)
    return found[0], found[1 : 1 + count], found[1 + count : -count], found[-count:]


def true_positives(found, rate):
    """The bound that the page draws."""
    advantage, epsilons, others, _ = parts(found)
    pairs = [(0.0, advantage), *zip(epsilons, laboratory.DELTAS, strict=True)]
    pairs += zip(others, (part * advantage for part in laboratory.FRACTIONS), strict=True)
    return min(
        1.0,
        *(min(math.exp(min(e, 700)) * rate + d, 1 - math.exp(-e) * (1 - d - rate)) for e, d in pairs),
    )


def test_the_table_is_the_grid_that_is_stated():
    for name, grid in (("rates", "RATES"), ("noises", "NOISES"), ("steps", "STEPS"), ("deltas", "DELTAS")):
        assert tuple(TABLE[name]) == getattr(laboratory, grid)
    assert len(CODES) == WIDTH * len(laboratory.RATES) * len(laboratory.NOISES) * len(laboratory.STEPS)
    assert laboratory.TABLE.stat().st_size < 64 * 1024


@pytest.mark.parametrize("settings", SETTINGS)
def test_values_are_the_accountants_rounded_up_by_less_than_is_stated(settings):
    run, found = laboratory.event(*settings), stored(*settings)
    advantage, epsilons, others, _ = parts(found)
    exact = [accounting.membership_advantage(run).upper]
    exact += [accounting.epsilon(run, delta).upper for delta in laboratory.DELTAS]
    exact += [accounting.epsilon(run, part * exact[0]).upper for part in laboratory.FRACTIONS]
    for shown, value in zip([advantage, *epsilons, *others], exact, strict=True):
        assert value * (1 - 1e-9) <= shown <= value * 1.0007 + 1e-12


@pytest.mark.parametrize("settings", SETTINGS)
def test_rates_are_bounds_and_close_to_the_exact_ones(settings):
    run, found = laboratory.event(*settings), stored(*settings)
    for rate in (0.001, 0.01, 0.1):
        exact = accounting.true_positive_rate(run, rate)
        assert exact * (1 - 1e-6) <= true_positives(found, rate) <= 1.1 * exact


@pytest.mark.parametrize(("noise", "steps"), [(2.0, 10), (10.0, 1), (0.5, 30_000)])
def test_the_tail_without_sampling_is_that_of_a_normal_loss(noise, steps):
    # Z is normal with mean μ²/2 and variance μ².
    mu = math.sqrt(steps) / noise
    _, epsilons, _, tails = parts(stored(1.0, noise, steps))
    for at, chance in zip(epsilons, tails, strict=True):
        if at > 0:
            exact = norm.sf((at - mu**2 / 2) / mu)
            assert exact <= chance * 1.005
            # ε itself is rounded up, and t stands where it is.
            assert chance <= norm.sf((at / 1.0007 - mu**2 / 2) / mu) * 1.02


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.01, 0.5), (0.3, 2.0)])
def test_the_tail_of_one_sampled_step_is_that_of_its_mixture(rate, noise):
    _, epsilons, _, tails = parts(stored(rate, noise, 1))
    seen = 0
    for at, chance in zip(epsilons, tails, strict=True):
        if at > 0:
            # The loss rises with the output x of the mixture: log(1 − q + q e^((2x − 1)/(2σ²))) > t.
            for place, bounds in ((at, (0.0, 1.005)), (at / 1.0007, (None, 1.02))):
                x = noise**2 * math.log((math.expm1(place) + rate) / rate) + 0.5
                exact = (1 - rate) * norm.sf(x / noise) + rate * norm.sf((x - 1) / noise)
                if bounds[0] is not None:
                    assert exact <= chance * bounds[1]
                else:
                    assert chance <= exact * bounds[1]
            seen += 1
    assert seen >= 3


def test_the_report_begins_near_its_run_and_runs_nothing_else(tmp_path):
    run = make(tmp_path / "run", event=SAMPLED, plan=SAMPLED_PLAN, meta=EVERYTHING, epsilon=None)
    page = render_html(build_report(run))
    assert re.search(r'data-laboratory data-rate="0.02" data-noise="3.0" data-steps="40.0" data-delta="1e-05"', page)
    assert page.count("<script>") == 1
    assert laboratory_script() in page
    assert "innerHTML" not in laboratory_script()


def _chromium(page, folder):
    done = subprocess.run(
        [
            shutil.which("chromium"),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=2000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed: the page is not looked at")
def test_a_browser_shows_the_accountants_numbers_and_follows_a_slider(tmp_path):
    moved = 'const it = document.querySelector("[name=noises]"); it.value = 6; it.dispatchEvent(new Event("input"));'
    body = f'<meta charset="utf-8"><div data-laboratory></div><script>{laboratory_script()}</script>'
    shown = []
    for name, script in (("first", ""), ("moved", moved)):
        page = tmp_path / f"{name}.html"
        page.write_text(f"{body}<script>{script}</script>", encoding="utf-8")
        shown.append(_chromium(page, tmp_path))
    for text, noise in zip(shown, (1.0, 4.0), strict=True):
        settings = (0.01, noise, 1000)
        run = laboratory.event(*settings)
        told = {name: float(value) for name, value in re.findall(r'data-(epsilon|advantage|found)="([^"]+)"', text)}
        epsilon = accounting.epsilon(run, 1e-5).upper
        assert epsilon <= told["epsilon"] <= epsilon * 1.0007
        assert told["found"] == pytest.approx(true_positives(stored(*settings), 0.01), rel=1e-9)
        printed = float(re.search(r"ε ≤ ([\d.,]+) at δ = 10⁻⁵", text)[1].replace(",", ""))
        assert told["epsilon"] <= printed * (1 + 1e-12) <= told["epsilon"] * 1.001
        assert text.count("<svg") == 2
        assert text.count("<path") >= 5
