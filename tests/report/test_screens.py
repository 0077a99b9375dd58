"""The page as a browser shows it: wide and narrow, light and dark. Needs Debian's chromium; under CI it is a must."""

import json
import os
import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest
from PIL import Image

from reported_runs import EVERYTHING, PUBLIC, SAMPLED, SAMPLED_PLAN, make
from sordino import accounting
from sordino.events import SelfComposed
from sordino.report import build_report, compute_utility, render_comparison_html, render_html

BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"), reason="chromium is not installed: the page is not looked at"
)
PAPER = {"light": (0xFA, 0xF9, 0xF6), "dark": (0x14, 0x17, 0x1A)}
ACCENT = {"light": (0x0B, 0x6E, 0x69), "dark": (0x5C, 0xC4, 0xBB)}
LOOKS = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]


def browse(page, folder, *options, scheme="light", width=1280, height=2400):
    """Run the browser on a page without a network; what it printed, and what it complained of."""
    done = subprocess.run(
        [
            BROWSER or "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--window-size={width},{height}",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    draw = np.random.default_rng(3)
    sure = draw.uniform(0.5, 1.0, size=600)
    labels = (draw.uniform(size=600) > sure).astype(int)
    groups = {
        "a long name of a column": draw.choice(
            ["one", "two", "a value with a very long name indeed"], size=600
        ).tolist()
    }
    metrics = PUBLIC | compute_utility(np.stack([sure, 1 - sure], axis=1), labels, public=True, groups=groups)
    spent = accounting.epsilon(SelfComposed(event=SAMPLED, count=40), 1e-5).upper
    path = tmp_path_factory.mktemp("run") / "a-run-with-a-name-that-is-longer-than-a-telephone-is-wide-0123456789"
    return build_report(make(path, epsilon=spent, event=SAMPLED, plan=SAMPLED_PLAN, meta=EVERYTHING, metrics=metrics))


@pytest.fixture(scope="module")
def pages(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "single": render_html(report),
        "seeded": render_html(report.model_copy(update={"not_for_release": "The noise came from a chosen seed."})),
        "compared": render_comparison_html([report, report.model_copy(update={"name": "other"})]),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


def near(picture, color, tolerance=12):
    return (abs(picture.astype(int) - np.array(color)).max(axis=2) <= tolerance).sum()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_drawn_in_its_colors_and_nothing_complains(width, scheme, pages, tmp_path):
    target = tmp_path / "shot.png"
    # The whole page: its drawings stand below the text.
    height = {1280: 7000, 400: 13000}[width]
    _, complaints = browse(
        pages / "single.html", tmp_path, f"--screenshot={target}", scheme=scheme, width=width, height=height
    )
    assert complaints == []
    with Image.open(target) as image:
        picture = np.asarray(image.convert("RGB"))
    assert picture.shape[:2] == (height, width)
    assert near(picture, PAPER[scheme]) > 0.6 * picture.shape[0] * width
    # The curves and the bar of the private model are drawn in the accent color.
    assert near(picture, ACCENT[scheme]) > 3000
    other = "light" if scheme == "dark" else "dark"
    assert near(picture, PAPER[other]) < 0.05 * picture.shape[0] * width
    # Nothing runs into the right edge.
    edge = picture[:, -8:]
    assert near(edge, PAPER[scheme]) == edge.shape[0] * edge.shape[1]


TELL = """<script>
const all = (what) => document.querySelectorAll(what).length;
parent.postMessage({wide: document.documentElement.scrollWidth, ready: document.documentElement.dataset.ready,
  readable: all("svg[data-points]"), crosses: all(".cross"), curves: all("polyline")}, "*");
</script></body>"""
FRAME = """<body><script>onmessage = (event) => { document.body.dataset.found = JSON.stringify(event.data) }</script>
<iframe src="measured.html" style="width: %dpx; height: 900px; border: 0"></iframe></body>"""


@pytest.mark.parametrize(("name", "charts"), [("single", 5), ("seeded", 5), ("compared", 1)])
@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_its_window_and_its_script_has_run(name, charts, width, pages, tmp_path):
    text = (pages / f"{name}.html").read_text(encoding="utf-8")
    # A copy without the policy, so that one more script may measure it; a frame may be narrower than a window.
    text = re.sub(r"<meta http-equiv[^>]*>", "", text)
    (tmp_path / "measured.html").write_text(text.replace("</body>", TELL), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width, encoding="utf-8")
    dom, complaints = browse(tmp_path / "frame.html", tmp_path, "--dump-dom", width=1400)
    assert complaints == []
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    assert found["wide"] <= width
    assert found["ready"] == "yes"
    assert found["readable"] == found["crosses"] == charts
    assert found["curves"] >= charts


def test_a_script_that_is_not_the_pages_own_does_not_run(pages, tmp_path):
    text = (pages / "single.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</main>", "<script>document.title = 'owned'</script></main>"))
    dom, complaints = browse(tmp_path / "page.html", tmp_path, "--dump-dom")
    assert "<title>owned</title>" not in dom
    assert 'data-ready="yes"' in dom
    assert "Content Security Policy" in " ".join(complaints)


def test_a_run_that_is_not_for_release_is_marked_across_the_page(pages, tmp_path):
    pictures = []
    for name in ("single", "seeded"):
        target = tmp_path / f"{name}.png"
        browse(pages / f"{name}.html", tmp_path, f"--screenshot={target}", height=900)
        with Image.open(target) as image:
            pictures.append(np.asarray(image.convert("RGB")).astype(int))
    reddish = [((one[..., 0] - one[..., 2]) > 15).sum() for one in pictures]
    assert reddish[0] < 500
    assert reddish[1] > 20_000


def test_the_page_prints_on_paper(pages, tmp_path):
    target = tmp_path / "report.pdf"
    browse(pages / "single.html", tmp_path, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
