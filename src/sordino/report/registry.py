"""A draft entry for the public registry of differential privacy deployments, as YAML.

The model below follows the registry's public schema (opendp/deployments-registry-data), in its own words: tier 1 says
what the product is, tier 2 what is promised, tier 3 how. Fields that the registry added later are left out, so a draft
fits both. A draft states what the run states; what only the curator knows is a placeholder, named in the head comment.
"""

import re
from datetime import date
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from sordino.definitions import NeighboringRelation, format_upper_bound
from sordino.errors import InvalidArgument
from sordino.report.formatting import format_value, percent_up
from sordino.report.schema import Report

__all__ = ["Entry", "entry", "registry_yaml"]

_NOT_STATED = "not stated"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Curator(_Part):
    """Who publishes the product."""

    data_curator_name: str
    data_curator_type: Literal["Government", "Industry", "Nonprofit"]


class Basic(_Part):
    """Tier 1."""

    name: str
    data_curators: Annotated[tuple[Curator, ...], Field(min_length=1)]
    description: str
    intended_use: str
    data_product_type: Literal[
        "Summary statistics", "Machine learning model", "Dataset", "Synthetic data", "Interactive API", "SQL queries"
    ]
    data_product_region: str
    data_product_sector: Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] | None
    publication_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class Variant(_Part):
    """Tier 2; domain and unprotected quantities are tier 3."""

    variant_name: Literal["Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"]
    data_domain: str
    unprotected_quantities: str


class Parameters(_Part):
    """Numbers of the guarantee, never rounded below themselves."""

    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(ge=0, le=1)] | None


class RegistryPrivacyLoss(_Part):
    """Tier 2; details are tier 3."""

    privacy_unit: str
    privacy_unit_details: str
    number_of_privacy_units: int | None
    privacy_parameters: Parameters
    privacy_parameters_details: str


class Deployment(_Part):
    """Tier 2; trust is tier 3."""

    model_name: Literal["Local", "Central", "Shuffle", "Federated", "Varies"]
    trust_assumptions: str
    release_type: Literal["One release", "Many releases"]
    data_source_type: Literal["Static", "Dynamic"]
    access_type: Literal["Interactive", "Non-interactive"]


class Implementation(_Part):
    """Tier 3."""

    preprocessing_and_hyperparameter_tuning: str
    mechanisms: str
    composition: str
    post_processing: str
    justification: str
    utility: str
    additional_information: str


class Administrative(_Part):
    """About the entry itself."""

    status: Literal["Draft"]
    registry_authors: Annotated[tuple[str, ...], Field(min_length=1)]
    tier: Literal[1, 2, 3]


class Body(_Part):
    """The entry without its address."""

    basic: Basic
    dp_variant: Variant
    privacy_loss: RegistryPrivacyLoss
    deployment_model: Deployment
    implementation: Implementation
    administrative: Administrative


class Entry(_Part):
    """One deployment in the registry."""

    url_slug: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    deployment: Body


def registry_yaml(report: Report) -> str:
    """The draft as YAML, with a comment that names every placeholder.

    Raises:
        InvalidArgument: the run is not for release.
    """
    body = entry(report).model_dump(mode="json", exclude_none=True)
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


def entry(report: Report) -> Entry:
    """The draft entry of a run.

    Raises:
        InvalidArgument: the run is not for release, or a text for the registry is not one of those it knows.
    """
    if report.not_for_release:
        raise InvalidArgument(
            f"run must be fit for release to be registered, got one that is not: {report.not_for_release} "
            "Train again without a seed and with noise."
        )
    said = report.registry
    try:
        return Entry.model_validate(
            {
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
        )
    except ValueError as error:
        raise InvalidArgument(
            "registry must name a curator_type of Government, Industry or Nonprofit, and a sector of Technology, "
            "Healthcare, Education, Government, Energy or Finance, got others. Correct the run's facts."
        ) from error


def _basic(report: Report) -> dict[str, object]:
    said = report.registry
    curator = {
        "data_curator_name": said.get("curator") or report.declarations.owner or _NOT_STATED,
        "data_curator_type": said.get("curator_type", "Industry"),
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
        "data_product_sector": said.get("sector"),
        "publication_date": report.started[:10] or date.min.isoformat(),
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
