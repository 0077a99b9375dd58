"""The page on secure noise runs, and the numbers it gives are what the code does."""

import re
from pathlib import Path

import pytest
import torch

from sordino.mechanisms.tensor_noise import TensorGaussianMechanism
from sordino.randomness import KeyedRNG

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "secure-mode.md").read_text()
PROOF = (ROOT / "docs" / "proofs" / "secure-mode.md").read_text()


def test_the_page_runs_from_top_to_bottom():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), "secure-mode.md", "exec"), {})


@pytest.mark.parametrize(("value", "share"), [(0.0, 1 / 4), (1.0, 1.0)])
def test_floating_point_noise_leaks_as_much_as_the_page_says(value, share):
    noisy = torch.full((400_000,), value)
    TensorGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0).add_noise_([noisy], rng=KeyedRNG(), step=0)
    inside = noisy[(noisy.abs() >= 1 / 8) & (noisy.abs() < 1 / 4)].double()
    assert float((inside * 2**24 % 1 == 0).double().mean()) == pytest.approx(share, abs=0.02)


def test_page_and_proof_are_in_the_site_and_link_to_what_exists():
    site = (ROOT / "mkdocs.yml").read_text()
    assert "secure-mode.md" in site
    assert "proofs/secure-mode.md" in site
    for text, base in ((PAGE, ROOT / "docs"), (PROOF, ROOT / "docs" / "proofs")):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (base / target).exists()
    for path in re.findall(r"`((?:training|mechanisms|gradients)/[a-z_/]+\.py)`", PROOF):
        assert (ROOT / "src" / "sordino" / path).exists()
