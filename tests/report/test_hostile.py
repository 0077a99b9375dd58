"""A run folder written by someone who wants to run a script in the reader's browser, or to forge what is said."""

import json
import re

import pytest

from reported_runs import EVERYTHING, Page, make
from sordino.errors import InvalidArgument
from sordino.report import (
    build_report,
    registry_yaml,
    render_comparison_html,
    render_comparison_markdown,
    render_html,
    render_markdown,
)
from sordino.runs import Metric

EVIL = (
    "</script></style><script>window.owned=1</script><img src=x onerror=owned()>\"'`|\n"
    "# **x** [a](javascript:1) {{7*7}}"
)


def hostile(path):
    accesses = dict.fromkeys(EVERYTHING["data_accesses"], EVIL)
    meta = {
        "data": {"name": EVIL, EVIL: EVIL},
        "training": {EVIL: EVIL, "model": EVIL},
        "settings": EVIL,
        "started": EVIL,
        "released": EVIL,
        "trust": EVIL,
        "rng": EVIL,
        "noise_arithmetic": EVIL,
        "composition": EVIL,
        "data_accesses": accesses,
        "registry": {"name": EVIL, "curator": EVIL, "description": EVIL},
    }
    metrics = {
        "test_accuracy": Metric(value=0.5, public=True, what=EVIL),
        f"subgroup:{EVIL.replace(':', '')}:{EVIL}:records": Metric(value=5, public=True),
        f"subgroup:{EVIL.replace(':', '')}:{EVIL}:accuracy": Metric(value=0.4, public=True),
    }
    run = make(path, meta=meta, metrics=metrics, plan={"max_grad_norm": {"schedule": EVIL}, "clipping": {"kind": EVIL}})
    (run.path / "environment.json").write_text(json.dumps({"python": EVIL, "packages": {EVIL: EVIL}}))
    audit = {"method": EVIL, "canaries": 9, "guesses": 5, "alpha": 0.05, "epsilon_lower": 0.1, "attacker": EVIL}
    (run.path / "audit.json").write_text(json.dumps(audit))
    names = ("purpose", "owner", "contact", "legal_basis", "approved_by")
    (run.path / "declarations.json").write_text(json.dumps(dict.fromkeys(names, EVIL)))
    attacks = [{"name": EVIL, "knowledge": EVIL, "auc": 0.5, "auc_interval": [0.4, 0.6]}]
    bounds = {"ceiling": {"auc": 0.6}, "above_ceiling": [EVIL], "members": 9, "non_members": 9, "public": True}
    (run.path / "attack.json").write_text(json.dumps({"attacks": attacks, **bounds}))
    guarantee = json.loads((run.path / "guarantee.json").read_text())
    guarantee |= {"sampler": EVIL, "accountant": EVIL, "caveats": [EVIL]}
    (run.path / "guarantee.json").write_text(json.dumps(guarantee))
    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return build_report(hostile(tmp_path_factory.mktemp("hostile") / "a<b>&\"'c"))


@pytest.mark.parametrize("several", [False, True])
def test_no_string_of_a_run_folder_becomes_a_tag_an_attribute_or_a_script(report, several):
    page = render_comparison_html([report, report]) if several else render_html(report)
    parsed = Page(page)
    assert parsed.tags.count("script") == parsed.tags.count("style") == 1
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name in {"onerror", "src", "href"} or name.startswith("on")]
    assert "window.owned=1" not in "".join(re.findall(r"<script>(.*?)</script>", page, re.DOTALL))
    assert "<script>window.owned=1</script>" in parsed.text
    assert "{{7*7}}" in parsed.text
    assert not re.search(r"\bowned=1</script><", page)


@pytest.mark.parametrize("several", [False, True])
def test_no_string_of_a_run_folder_means_anything_in_markdown(report, several):
    text = render_comparison_markdown([report, report]) if several else render_markdown(report)
    assert not re.search(r"<\w", text)
    assert not re.search(r"(?<!\\)\]\(javascript", text)
    for line in text.splitlines():
        if line.startswith("#"):
            assert "owned" not in line or line.startswith("# Privacy report")
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in {3, 4, 5}


def test_a_name_on_the_page_is_escaped_too(report):
    page = render_html(report)
    assert "a<b>" not in page
    assert "a&lt;b&gt;" in page


def test_a_registry_entry_holds_hostile_text_as_text(report):
    import yaml

    body = yaml.safe_load(registry_yaml(report.model_copy(update={"started": "2026-01-31T00:00:00"})))
    assert body["deployment"]["basic"]["name"] == " ".join(EVIL.split())


@pytest.mark.parametrize(
    "text",
    ["{", '{"method": 1}', '[{"method": "a"}]', '{"epsilon_lower": "NaN"}', '"x"'],
)
def test_an_audit_file_that_is_none_is_refused_without_repeating_it(text, tmp_path):
    run = make(tmp_path / "run")
    (run.path / "audit.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"audit\.json must"):
        build_report(run)
