"""The draft entry against the registry's public form, written down here a second time, field by field."""

import re

import pytest
import yaml

from reported_runs import EVERYTHING, TRUE_EPSILON, make
from sordino.errors import InvalidArgument
from sordino.report import build_report, registry_yaml

# From the public description of the registry's schema (opendp/deployments-registry-data): name, what it may hold,
# whether it must be there. A tuple lists the words that are allowed.
FORM = {
    "url_slug": (str, True),
    "deployment.basic.name": (str, True),
    "deployment.basic.data_curators": (list, True),
    "deployment.basic.description": (str, True),
    "deployment.basic.intended_use": (str, True),
    "deployment.basic.data_product_type": (
        ("Summary statistics", "Machine learning model", "Dataset", "Synthetic data", "Interactive API", "SQL queries"),
        True,
    ),
    "deployment.basic.data_product_region": (str, True),
    "deployment.basic.data_product_sector": (
        ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance"),
        False,
    ),
    "deployment.basic.publication_date": (str, True),
    "deployment.dp_variant.variant_name": (
        ("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"),
        False,
    ),
    "deployment.dp_variant.data_domain": (str, False),
    "deployment.dp_variant.unprotected_quantities": (str, False),
    "deployment.privacy_loss.privacy_unit": (str, False),
    "deployment.privacy_loss.privacy_unit_details": (str, False),
    "deployment.privacy_loss.number_of_privacy_units": (int, False),
    "deployment.privacy_loss.privacy_parameters.epsilon": (float, False),
    "deployment.privacy_loss.privacy_parameters.delta": (float, False),
    "deployment.privacy_loss.privacy_parameters.rho": (float, False),
    "deployment.privacy_loss.privacy_parameters_details": (str, False),
    "deployment.deployment_model.model_name": (("Local", "Central", "Shuffle", "Federated", "Varies"), False),
    "deployment.deployment_model.model_name_details": (str, False),
    "deployment.deployment_model.trust_assumptions": (str, False),
    "deployment.deployment_model.actors": (str, False),
    "deployment.deployment_model.release_type": (("One release", "Many releases"), False),
    "deployment.deployment_model.release_type_details": (str, False),
    "deployment.deployment_model.data_source_type": (("Static", "Dynamic"), False),
    "deployment.deployment_model.data_source_type_details": (str, False),
    "deployment.deployment_model.access_type": (("Interactive", "Non-interactive"), False),
    "deployment.deployment_model.access_type_details": (str, False),
    "deployment.implementation.preprocessing_and_hyperparameter_tuning": (str, False),
    "deployment.implementation.mechanisms": (str, False),
    "deployment.implementation.composition": (str, False),
    "deployment.implementation.post_processing": (str, False),
    "deployment.implementation.justification": (str, False),
    "deployment.implementation.utility": (str, False),
    "deployment.implementation.additional_information": (str, False),
    "deployment.administrative.evidence_sources": (dict, False),
    "deployment.administrative.status": (
        ("Converted", "Draft", "Pending", "Changes Required", "Approved", "Approved (Pending)"),
        True,
    ),
    "deployment.administrative.registry_authors": (list, True),
    "deployment.administrative.tier": (int, True),
}
# What a complete entry of tier 3 says; the rest is optional there too.
TIER_3 = [name for name, (_, needed) in FORM.items() if needed] + [
    f"deployment.{name}"
    for name in (
        "dp_variant.variant_name",
        "dp_variant.data_domain",
        "dp_variant.unprotected_quantities",
        "privacy_loss.privacy_unit",
        "privacy_loss.privacy_unit_details",
        "privacy_loss.privacy_parameters.epsilon",
        "privacy_loss.privacy_parameters.delta",
        "deployment_model.model_name",
        "deployment_model.trust_assumptions",
        "deployment_model.release_type",
        "deployment_model.data_source_type",
        "deployment_model.access_type",
        "implementation.preprocessing_and_hyperparameter_tuning",
        "implementation.mechanisms",
        "implementation.composition",
        "implementation.post_processing",
        "implementation.justification",
    )
]


def leaves(body, path=""):
    for name, value in body.items():
        where = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and where not in FORM:
            yield from leaves(value, where)
        else:
            yield where, value


def check(body):
    """The registry's rules, without the model that wrote the entry."""
    found = dict(leaves(body))
    assert set(found) <= set(FORM), "the registry allows no other fields"
    assert {name for name, (_, needed) in FORM.items() if needed} <= set(found)
    for name, value in found.items():
        kind = FORM[name][0]
        assert value in kind if isinstance(kind, tuple) else type(value) is kind, name
    for curator in found["deployment.basic.data_curators"]:
        assert set(curator) == {"data_curator_name", "data_curator_type"}
        assert curator["data_curator_type"] in {"Government", "Industry", "Nonprofit"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["deployment.basic.publication_date"])
    assert found["deployment.administrative.tier"] in {1, 2, 3}
    assert found["deployment.administrative.registry_authors"]
    return found


SAID = {
    "name": "Income Model 1",
    "curator": "Bureau",
    "curator_type": "Government",
    "intended_use": "Teaching.",
    "region": "United States",
    "sector": "Finance",
    "registry_author": "A. Author",
    "justification": "Chosen by the board.",
}


@pytest.mark.parametrize("said", [{}, SAID])
def test_the_draft_is_an_entry_of_tier_three(said, tmp_path):
    text = registry_yaml(build_report(make(tmp_path / "run", meta=EVERYTHING | {"registry": said})))
    found = check(yaml.safe_load(text))
    assert set(TIER_3) <= set(found)
    assert found["deployment.administrative.status"] == "Draft"
    assert TRUE_EPSILON <= found["deployment.privacy_loss.privacy_parameters.epsilon"] <= TRUE_EPSILON + 1e-4
    assert found["deployment.privacy_loss.privacy_parameters.delta"] == 1e-5
    assert found["deployment.privacy_loss.number_of_privacy_units"] == 30000
    assert ("# Placeholders to fill in" in text) == (not said)


def test_what_the_curator_said_is_taken_over(tmp_path):
    found = check(yaml.safe_load(registry_yaml(build_report(make(tmp_path / "run", meta={"registry": SAID})))))
    assert found["url_slug"] == "income-model-1"
    assert found["deployment.basic.data_product_sector"] == "Finance"
    assert found["deployment.basic.data_curators"] == [
        {"data_curator_name": "Bureau", "data_curator_type": "Government"}
    ]
    assert found["deployment.implementation.justification"] == "Chosen by the board."


def test_a_field_that_the_registry_does_not_know_fails_the_check(tmp_path):
    body = yaml.safe_load(registry_yaml(build_report(make(tmp_path / "run"))))
    body["deployment"]["basic"]["color"] = "red"
    with pytest.raises(AssertionError, match="no other fields"):
        check(body)


def test_a_sector_that_the_registry_does_not_know_is_refused(tmp_path):
    report = build_report(make(tmp_path / "run", meta={"registry": SAID | {"sector": "Alchemy"}}))
    with pytest.raises(InvalidArgument, match="sector"):
        registry_yaml(report)


def test_a_run_that_is_not_for_release_has_no_entry(tmp_path):
    with pytest.raises(InvalidArgument, match="fit for release"):
        registry_yaml(build_report(make(tmp_path / "run", meta={"reproducible": True})))
