"""What each command of the command line does, as a function.

``sordino train people.csv --schema people.json --epsilon 1`` is
``sordino.commands.train("people.csv", schema="people.json", epsilon=1)``: the words of a command are joined by `_`
(`describe`, `tune` and `audit training` are `describe_file`, `tune_estimator` and `audit_with_canaries`), and options
are made of the parameters and of what the docstring says of them. A function returns what the command prints, with
``to_dict()`` for what ``--json`` prints, and says nothing unless it is given a `Progress`. ``--ledger`` with
``--dataset-name`` is ``ledger=``, an account of `sordino.ledger`. Data may also be what `sordino.data.load_dataset`
gave, a model a function (shape, classes) ↦ module, an event one of `sordino.events`.
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.commands.attacks import Attacks, Diagnosis, attack, diagnose
    from sordino.commands.auditing import (
        Conformance,
        Replays,
        TrainingAudit,
        audit_conformance,
        audit_replay,
        audit_with_canaries,
    )
    from sordino.commands.documentation import (
        CourseLesson,
        DocumentationIndex,
        DocumentationSection,
        data_get,
        data_list,
        data_show,
        explain,
        learn,
        recipes,
    )
    from sordino.commands.estimators import MethodComparison, compare, tune_estimator
    from sordino.commands.federation import federate
    from sordino.commands.ledgers import (
        AccountHistory,
        AccountSummary,
        ledger_charge,
        ledger_declare,
        ledger_export,
        ledger_history,
        ledger_init,
        ledger_release,
        ledger_show,
        ledger_verify,
    )
    from sordino.commands.outcomes import (
        ListedRuns,
        RunOutcome,
        RunsComparison,
        RunSummary,
        runs_compare,
        runs_list,
        runs_show,
    )
    from sordino.commands.planning import AccountedRun, PlannedRun, PlanTable, RecommendedPlan, account, plan
    from sordino.commands.prediction import ExportedModel, Predictions, export, predict
    from sordino.commands.reporting import WrittenReport, evaluate, report
    from sordino.commands.running import DryRun, Progress
    from sordino.commands.table_releases import (
        DescribedTable,
        SchemaCheck,
        SchemaDraft,
        SyntheticTable,
        describe_file,
        schema_check,
        schema_draft,
        synthesize,
    )
    from sordino.commands.tables import TableOptions
    from sordino.commands.training import demo, train
    from sordino.verification import verify

__all__ = [
    "AccountHistory",
    "AccountSummary",
    "AccountedRun",
    "Attacks",
    "Conformance",
    "CourseLesson",
    "DescribedTable",
    "Diagnosis",
    "DocumentationIndex",
    "DocumentationSection",
    "DryRun",
    "ExportedModel",
    "ListedRuns",
    "MethodComparison",
    "PlanTable",
    "PlannedRun",
    "Predictions",
    "Progress",
    "RecommendedPlan",
    "Replays",
    "RunOutcome",
    "RunSummary",
    "RunsComparison",
    "SchemaCheck",
    "SchemaDraft",
    "SyntheticTable",
    "TableOptions",
    "TrainingAudit",
    "WrittenReport",
    "account",
    "attack",
    "audit_conformance",
    "audit_replay",
    "audit_with_canaries",
    "compare",
    "data_get",
    "data_list",
    "data_show",
    "demo",
    "describe_file",
    "diagnose",
    "evaluate",
    "explain",
    "export",
    "federate",
    "learn",
    "ledger_charge",
    "ledger_declare",
    "ledger_export",
    "ledger_history",
    "ledger_init",
    "ledger_release",
    "ledger_show",
    "ledger_verify",
    "plan",
    "predict",
    "recipes",
    "report",
    "runs_compare",
    "runs_list",
    "runs_show",
    "schema_check",
    "schema_draft",
    "synthesize",
    "train",
    "tune_estimator",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__)
