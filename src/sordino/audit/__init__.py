"""Auditing (floor 4): lower bounds on ε by attack, audits of our own training, replays, named checks of the engine.

    audit                             train once with canaries and say what was shown about ε
    one_run, one_run_curve, …         bounds from the guesses of any attack, of one run or of many
    replay                            run a pipeline on neighbours with all releases forced, and compare
    check_engine                      cheap named checks, each of which catches a way of being not private
    check_library                     every case on which training libraries are known to be wrong, on any library

Example:
    >>> from sordino.audit import Guesses, one_run_curve
    >>> bound = one_run_curve(Guesses(canaries=1000, guesses=100, correct=90), delta=1e-5)
    >>> f"ε ≥ {bound.epsilon:.2f} with 95 % confidence, at most {bound.ceiling:.2f} could have been shown"
    'ε ≥ 2.46 with 95 % confidence, at most 5.55 could have been shown'
"""

from typing import TYPE_CHECKING

from sordino.lazy_names import lazy_names

if TYPE_CHECKING:
    from sordino.audit.bounds import Guesses, LowerBound, guess, one_run, one_run_curve, one_run_p_value
    from sordino.audit.canary_estimate import OneShotEstimate, normal_pair_epsilon, one_shot
    from sordino.audit.case import Case, Finding, Wrong
    from sordino.audit.conformance import CASES, check_library
    from sordino.audit.engine_checks import CheckedEngine, check_engine
    from sordino.audit.families import EventFamily, Family, GaussianFamily
    from sordino.audit.library import Engine, Fit, Library, Loss, NotOffered, Private, paths
    from sordino.audit.multi_run import (
        Trials,
        clopper_pearson,
        gaussian_mu,
        gaussian_multi_run,
        multi_run_curve,
        trials,
    )
    from sordino.audit.replaying import ReplayReport, Violation, replay
    from sordino.audit.training_audit import AuditResult, audit

__all__ = [
    "AuditResult",
    "CASES",
    "Case",
    "CheckedEngine",
    "Engine",
    "EventFamily",
    "Family",
    "Finding",
    "Fit",
    "GaussianFamily",
    "Guesses",
    "Library",
    "Loss",
    "LowerBound",
    "NotOffered",
    "OneShotEstimate",
    "Private",
    "ReplayReport",
    "Trials",
    "Violation",
    "Wrong",
    "audit",
    "check_engine",
    "check_library",
    "clopper_pearson",
    "gaussian_mu",
    "gaussian_multi_run",
    "guess",
    "multi_run_curve",
    "normal_pair_epsilon",
    "one_run",
    "one_run_curve",
    "one_run_p_value",
    "one_shot",
    "paths",
    "replay",
    "trials",
]

_HOMES = {
    "AuditResult": "training_audit",
    "CASES": "conformance",
    "Case": "case",
    "CheckedEngine": "engine_checks",
    "Engine": "library",
    "EventFamily": "families",
    "Family": "families",
    "Finding": "case",
    "Fit": "library",
    "GaussianFamily": "families",
    "Guesses": "bounds",
    "Library": "library",
    "Loss": "library",
    "LowerBound": "bounds",
    "NotOffered": "library",
    "OneShotEstimate": "canary_estimate",
    "Private": "library",
    "ReplayReport": "replaying",
    "Trials": "multi_run",
    "Violation": "replaying",
    "Wrong": "case",
    "audit": "training_audit",
    "check_engine": "engine_checks",
    "check_library": "conformance",
    "clopper_pearson": "multi_run",
    "gaussian_mu": "multi_run",
    "gaussian_multi_run": "multi_run",
    "guess": "bounds",
    "multi_run_curve": "multi_run",
    "normal_pair_epsilon": "canary_estimate",
    "one_run": "bounds",
    "one_run_curve": "bounds",
    "one_run_p_value": "bounds",
    "one_shot": "canary_estimate",
    "paths": "library",
    "replay": "replaying",
    "trials": "multi_run",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
