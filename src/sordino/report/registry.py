"""A draft entry for the public registry of differential privacy deployments, as YAML.

The entry follows the registry's public schema (opendp/deployments-registry-data): tier 1 says what the product is,
tier 2 what is promised, tier 3 how. Fields that the registry added later are left out, so a draft fits both. A draft
states what the run states; what only the curator knows is a placeholder, named in the head comment.
"""

import re
from datetime import date
from typing import Any

import yaml

from sordino.definitions import NeighboringRelation, format_upper_bound
from sordino.errors import InvalidArgument
from sordino.report.formatting import format_value, percent_up
from sordino.report.schema import Report

_NOT_STATED = "not stated"
_CURATORS = ("Government", "Industry", "Nonprofit")
_SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance", None)


def registry_yaml(report: Report) -> str:
    """The draft as YAML, with a comment that names every placeholder.

    Raises:
        InvalidArgument: the run is not for release, or a text for the registry is not one of those it knows.
    """
    if report.not_for_release:
        raise InvalidArgument(
            f"run must be fit for release to be registered, got one that is not: {report.not_for_release} "
            "Train again without a seed and with noise."
        )
    body = _without_none(_entry(report))
    said = report.registry
    open_fields = {
        "curator": "data_curator_name",
        "curator_type": "data_curator_type (Government, Industry or Nonprofit)",
        "intended_use": "intended_use",
        "region": "data_product_region",
        "sector": "data_product_sector",
        "justification": "justification",
        "registry_author": "registry_authors",
    }
    declared = {"curator": report.declarations.owner, "intended_use": report.declarations.purpose}
    left = [words for name, words in open_fields.items() if name not in said and not declared.get(name)]
    head = "# Draft for the registry of differential privacy deployments, made by sordino from a run folder.\n"
    head += "# Read it, then complete it. publication_date is the day of the run.\n"
    if left:
        head += f"# Placeholders to fill in: {', '.join(left)}.\n"
    return head + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=100)


def _without_none(body: dict[str, Any]) -> dict[str, Any]:
    """The entry without what is not stated."""
    stated = {name: value for name, value in body.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in stated.items()}


def _entry(report: Report) -> dict[str, Any]:
    said = report.registry
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", (said.get("name") or report.name).lower()).strip("-") or "run",
        "deployment": {
            "basic": _basic(report),
            "dp_variant": _variant(report),
            "privacy_loss": _loss(report),
            "deployment_model": {
                "model_name": "Central",
                "trust_assumptions": report.trust,
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "implementation": _implementation(report),
            "administrative": {
                "status": "Draft",
                "registry_authors": [said.get("registry_author", _NOT_STATED)],
                "tier": 3,
            },
        },
    }


def _basic(report: Report) -> dict[str, object]:
    said = report.registry
    curator_type, sector = said.get("curator_type", "Industry"), said.get("sector")
    published = report.started[:10] or date.min.isoformat()
    if curator_type not in _CURATORS or sector not in _SECTORS or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", published):
        raise InvalidArgument(
            "registry must name a curator_type of Government, Industry or Nonprofit, and a sector of Technology, "
            "Healthcare, Education, Government, Energy or Finance, got others. Correct the run's facts."
        )
    curator = {
        "data_curator_name": said.get("curator") or report.declarations.owner or _NOT_STATED,
        "data_curator_type": curator_type,
    }
    facts = dict(report.data)
    model = dict(report.training).get("model", "machine learning")
    return {
        "name": said.get("name", report.name),
        "data_curators": [curator],
        "description": said.get("description", f"A {model} model trained on {facts.get('name', 'one dataset')}."),
        "intended_use": said.get("intended_use") or report.declarations.purpose or _NOT_STATED,
        "data_product_type": "Machine learning model",
        "data_product_region": said.get("region", _NOT_STATED),
        "data_product_sector": sector,
        "publication_date": published,
    }


def _variant(report: Report) -> dict[str, object]:
    facts = dict(report.data)
    size = "The number of records is treated as public." if report.mechanism.dataset_size_is_public else "None."
    return {
        "variant_name": "Pure DP" if report.guarantee.delta == 0 else "Approximate DP",
        "data_domain": f"Datasets of the declared form of {facts.get('name', 'the training data')}.",
        "unprotected_quantities": size,
    }


def _loss(report: Report) -> dict[str, object]:
    guarantee, curves = report.guarantee, report.curves
    neighbors = {
        NeighboringRelation.ADD_OR_REMOVE_ONE: "one {} is added or removed",
        NeighboringRelation.REPLACE_ONE: "one {} is replaced by another",
        NeighboringRelation.REPLACE_SPECIAL: "one {} is replaced by one that contributes nothing",
    }[guarantee.neighboring_relation].format(guarantee.privacy_unit.value)
    details = f"{guarantee.description}."
    if curves.gaussian_mu is not None:
        details += f" Best Gaussian summary: μ = {format_upper_bound(curves.gaussian_mu, 4)}."
    bare = report.accounting.without_amplification
    if report.accounting.sampled and bare is not None:
        details += f" Without amplification by sampling: ε = {format_upper_bound(bare)}."
    records = dict(report.data).get("records", "").replace(",", "")
    return {
        "privacy_unit": f"{guarantee.privacy_unit.value}-level",
        "privacy_unit_details": f"Two datasets are adjacent when {neighbors}.",
        "number_of_privacy_units": int(records) if records.isdigit() else None,
        "privacy_parameters": {
            "epsilon": float(format_upper_bound(guarantee.epsilon, 4)),
            "delta": guarantee.delta or None,
        },
        "privacy_parameters_details": details,
    }


def _implementation(report: Report) -> dict[str, object]:
    mechanism, said = report.mechanism, report.registry
    stated = [f"{access.title}: {(access.text or _NOT_STATED).rstrip('.')}." for access in report.data_accesses]
    numbers = {
        "noise multiplier": mechanism.noise_multiplier,
        "clipping norm": mechanism.max_grad_norm,
        "sample rate": mechanism.sample_rate,
        "steps": mechanism.steps_charged,
        "expected batch size": mechanism.expected_batch_size,
    }
    values = ", ".join(
        f"{name} {_NOT_STATED if value is None else format_value(value)}" for name, value in numbers.items()
    )
    process = report.process
    measured = [f"{item.name} {100 * item.value:.1f} %" for item in report.utility.accuracy]
    measured += [f"{words} {text}" for words, text in report.utility.figures if not report.utility.accuracy]
    measured += [
        f"on {one.records} {100 * one.shares[0].accuracy:.1f} % ({100 * one.shares[0].lower:.1f} to "
        f"{100 * one.shares[0].upper:.1f} %), released with ε = {format_upper_bound(one.epsilon)}"
        for one in report.evaluations
        if one.shares
    ]
    attack = ""
    if report.attack_bounds:
        attack = (
            f"Membership guesses are correct in at most {percent_up(report.attack_bounds.right_guesses)} of cases. "
        )
    return {
        "preprocessing_and_hyperparameter_tuning": "\n".join(stated),
        "mechanisms": (
            f"DP-SGD: gradients clipped per {report.guarantee.privacy_unit.value}, Gaussian noise on their sum; "
            f"{values}. "
            f"Sampling: {mechanism.sampler_charged}. Library: sordino {report.accounting.version}. "
            f"Randomness: {process.rng or _NOT_STATED}. Arithmetic: {process.arithmetic or _NOT_STATED}."
        ),
        "composition": (
            f"Steps composed numerically by the {report.accounting.accountant.replace('_', ' ')} accountant. "
            f"Other uses of the records: {(report.composition.text or _NOT_STATED).rstrip('.')}."
        ),
        "post_processing": "None.",
        "justification": said.get("justification", _NOT_STATED),
        "utility": "; ".join(measured) + "." if measured else _NOT_STATED,
        "additional_information": said.get("additional_information", attack + f"Transcript head {process.head}."),
    }
