"""Auditing: lower bounds on ε by attack, audits of our own training, replays, named checks of the engine.

    audit                             train once with canaries and say what was shown about ε
    one_run_lower_bound, one_run_trade_off_bound, …         bounds from the guesses of any attack, of one run or of many
    replay                            run a pipeline on neighbors with all releases forced, and compare
    check_engine                      cheap named checks, each of which catches a way of being not private
    check_library                     every case on which training libraries are known to be wrong, on any library

Example:
    >>> from sordino.audit import CanaryGuesses, one_run_trade_off_bound
    >>> bound = one_run_trade_off_bound(CanaryGuesses(canaries=1000, guesses=100, correct=90), delta=1e-5)
    >>> f"ε ≥ {bound.epsilon:.2f} with 95 % confidence, at most {bound.ceiling:.2f} could have been shown"
    'ε ≥ 2.46 with 95 % confidence, at most 5.55 could have been shown'
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.audit.canaries import OneShotEstimate, normal_pair_epsilon, one_shot_estimate
    from sordino.audit.conformance import CASES, check_library
    from sordino.audit.conformance.engine_cases import CheckedEngine, check_engine
    from sordino.audit.conformance.framework import (
        Case,
        CaseResult,
        ConformanceFailure,
        ConformanceLoss,
        EngineLibrary,
        FitLibrary,
        Library,
        NotSupported,
        PrivateTraining,
        library_paths,
    )
    from sordino.audit.lower_bounds import (
        CanaryGuesses,
        EventTradeOffFamily,
        GaussianTradeOffFamily,
        LowerBound,
        MembershipTrials,
        TradeOffFamily,
        clopper_pearson,
        gaussian_mu,
        gaussian_multi_run,
        guess_canaries,
        make_trials,
        multi_run_trade_off_bound,
        one_run_lower_bound,
        one_run_p_value,
        one_run_trade_off_bound,
    )
    from sordino.audit.neighbor_replay import ReplayReport, Violation, replay
    from sordino.audit.training_audit import AuditResult, audit_training

__all__ = [
    "AuditResult",
    "CASES",
    "CanaryGuesses",
    "Case",
    "CaseResult",
    "CheckedEngine",
    "ConformanceFailure",
    "ConformanceLoss",
    "EngineLibrary",
    "EventTradeOffFamily",
    "FitLibrary",
    "GaussianTradeOffFamily",
    "Library",
    "LowerBound",
    "MembershipTrials",
    "NotSupported",
    "OneShotEstimate",
    "PrivateTraining",
    "ReplayReport",
    "TradeOffFamily",
    "Violation",
    "audit_training",
    "check_engine",
    "check_library",
    "clopper_pearson",
    "gaussian_mu",
    "gaussian_multi_run",
    "guess_canaries",
    "library_paths",
    "make_trials",
    "multi_run_trade_off_bound",
    "normal_pair_epsilon",
    "one_run_lower_bound",
    "one_run_p_value",
    "one_run_trade_off_bound",
    "one_shot_estimate",
    "replay",
]

__getattr__, __dir__ = lazy_names(__name__)
