"""Formulas of the pages as a browser shows them: powers and indices, and nothing of what only looks like one."""

import html
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "website"))
import typeset


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("e^ε·P′(A)", "e<sup>ε</sup>·P′(A)"),
        ("e^{K(λ)−λε}/s", "e<sup>K(λ)−λε</sup>/s"),
        ("½e^(−|z|e^(−λ))", "½e<sup>−|z|e<sup>−λ</sup></sup>"),
        ("E_P[e^{sL}]", "E<sub>P</sub>[e<sup>sL</sup>]"),
        ("λ^λ/(λ+1)^{λ+1},", "λ<sup>λ</sup>/(λ+1)<sup>λ+1</sup>,"),
        ("Σ_{k=1}^{h−1} x_k²", "Σ<sub>k=1</sub><sup>h−1</sup> x<sub>k</sub>²"),
        ("∫_U^∞ du", "∫<sub>U</sub><sup>∞</sup> du"),
        ("max_i |w_Q|^{−λ}", "max<sub>i</sub> |w<sub>Q</sub>|<sup>−λ</sup>"),
        ("2^b.", "2<sup>b</sup>."),
    ],
)
def test_powers_and_indices_are_set(text, shown):
    assert typeset.set_formulas(f"<p>{text}</p>") == f"<p>{shown}</p>"


@pytest.mark.parametrize(
    "text",
    [
        "max_grad_norm, n_steps, a file my_a_b.py, data.x_max",
        "an open brace e^{ε, at the end of a cell",
        "<code>e^{ε}</code> and <pre>x_k</pre>",
        '<a href="a_b^2">text</a>',
        "a ^ b, __init__",
    ],
)
def test_what_is_no_formula_stays(text):
    assert typeset.set_formulas(text) == text


def test_no_power_of_a_proof_is_left_as_it_was_typed():
    left = {}
    for page in (Path(__file__).parents[2] / "docs/proofs").glob("*.md"):
        text = re.sub(
            r"```.*?```|`[^`]*`|^    .*$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        shown = typeset.set_formulas(html.escape(text, quote=False))
        left[page.name] = re.findall(r".{0,20}\^.{0,12}", shown)
    assert {page: found for page, found in left.items() if found} == {}


def test_a_cell_with_a_number_stays_on_one_line():
    numbers, words = (
        "<td>84.9 ± 0.1 (3 seeds)</td><td><b>1</b></td>",
        "<td>a name</td><td>1 to 3 in four years, or five</td>",
    )
    row = f"<tr>{numbers}{words}</tr>"
    assert typeset.set_numbers(row).count('class="number"') == 2
    assert re.sub(' class="number"', "", typeset.set_numbers(row)) == row


def test_a_picture_leads_to_itself_unless_it_leads_elsewhere():
    assert typeset.link_pictures('<td><img src="a.png" alt="x"></td>') == (
        '<td><a href="a.png"><img src="a.png" alt="x"></a></td>'
    )
    linked = '<a href="b.md"><img alt="x" src="a.png" /></a>'
    assert typeset.link_pictures(linked) == linked


def test_a_long_name_in_a_cell_may_break_and_nothing_else_changes():
    cell = "<td><code>max_physical_batch_size</code>, <code>a.b</code></td>"
    assert typeset.break_names(cell).count("<wbr>") == 3
    assert typeset.break_names(cell).replace("<wbr>", "") == cell
    outside = "<p><code>sordino.integrations.accelerate</code></p>"
    assert typeset.break_names(outside) == outside
