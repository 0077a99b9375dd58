"""`sordino federate DATA`: federated learning simulated on public data, with client-level privacy."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sordino import checks
from sordino.cli.console import JsonOption, Output
from sordino.cli.ledger import DatasetNameOption, DryRunOption, LedgerOption, open_account, print_preview
from sordino.cli.table_options import OutFolderOption
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from sordino.data import DatasetSplits, Records
    from sordino.federated import FederatedResult
    from sordino.ledger import Account
    from sordino.recipes import ModelFactory
    from sordino.runs import Metric
    from sordino.training import Plan

__all__ = ["federate"]


def federate(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A name from `sordino data list`: public data.")],
    epsilon: Annotated[float, typer.Option(help="The target for one client: ε is never above it.")],
    clients: Annotated[int, typer.Option(help="Number of clients; the records are dealt to them evenly.")] = 200,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 30,
    cohort: Annotated[float, typer.Option(help="Clients asked in a round, on average.")] = 100,
    delta: Annotated[
        float | None, typer.Option(help="δ; a power of ten below a tenth of 1 / clients if not given.")
    ] = None,
    model: Annotated[str, typer.Option(help="logistic, mlp or cnn.")] = "logistic",
    bound: Annotated[
        float, typer.Option("--max-update-norm", help="ℓ2 clipping norm of one update, or the first one if it adapts.")
    ] = 0.3,
    fixed_bound: Annotated[
        bool, typer.Option("--fixed-norm", help="Keep the bound; otherwise it follows the median of the norms.")
    ] = False,
    local_epochs: Annotated[int, typer.Option(help="A client's passes over its records.")] = 1,
    local_batch_size: Annotated[int, typer.Option(help="Records of a client's step.")] = 10,
    local_learning_rate: Annotated[float, typer.Option(help="Learning rate of a client's steps.")] = 0.1,
    optimizer: Annotated[
        str, typer.Option(help="Of the server: fedavg, fedavgm, fedadagrad, fedadam or fedyogi.")
    ] = "fedavg",
    out_folder: OutFolderOption = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate federated learning: clients train on their own records, the server adds noise to their mean update."""
    import numpy as np

    from sordino.cli.training_job import Outcome, render_outcome, run_folder
    from sordino.data import load_dataset
    from sordino.federated import SERVER_OPTIMIZERS, LocalTraining, simulate, split_clients
    from sordino.report import write_report
    from sordino.runs import RunFolder

    out = Output(as_json=as_json)
    checks.one_of(list(SERVER_OPTIMIZERS), optimizer=optimizer)
    size = checks.integer(1, local_batch_size=local_batch_size)
    local = LocalTraining(learning_rate=local_learning_rate, epochs=local_epochs, batch_size=size)
    build = _get_model(model)
    plan = _plan(epsilon, delta, clients, rounds, cohort, bound, adaptive=not fixed_bound)
    account = open_account(ledger, dataset_name)
    found = load_dataset(data)
    if not found.public:
        raise InvalidArgument(
            "data must be a named public set: a simulation deals its records to invented clients. For real clients use "
            "sordino.federated.PrivateServer."
        )
    records = found.train.tensors()
    held = split_clients(records, np.arange(len(found.train)) % clients, num_clients=clients)
    asked = "all of them" if cohort >= clients else f"each with probability {cohort / clients:.3g}"
    out.print_status(
        f"{clients} clients, {rounds} rounds, {asked}; noise of {plan.step_plan(0).noise_multiplier:.4g} bounds, once."
    )
    meta = _meta(found, model, optimizer, epsilon, clients)

    def learn(
        payer: "Account | None", run: RunFolder | None, advance: "Callable[..., None] | None" = None
    ) -> "FederatedResult":
        return simulate(
            build(found.train.record_shape, len(found.labels)),
            _loss,
            held,
            plan,
            local=local,
            optimizer=SERVER_OPTIMIZERS[optimizer],
            run_folder=run,
            ledger=payer,
            on_round=advance,
        )

    if dry_run:
        print_preview(out, lambda payer, _: learn(payer, None), account, delta=plan.delta)
        return
    folder = run_folder(f"{found.name}-federated", out_folder)
    with contextlib.redirect_stdout(sys.stderr), RunFolder.create(folder, plan=plan.to_json(), meta=meta) as run:
        with out.progress("rounds", total=rounds) as advance:
            result = learn(account, run, advance)
        metrics = {} if found.test is None else _measured(result.model, found, found.test)
        run.write_metrics(metrics)
        write_report(run)
    outcome = Outcome(
        run=run, guarantee=result.guarantee, metrics=metrics, steps=result.rounds, interrupted=result.rounds < rounds
    )
    out.print_result(
        {"data": found.name, "clients": clients, "rounds": rounds, **outcome.to_dict()}, *render_outcome(outcome)
    )


def _measured(model: "nn.Module", found: "DatasetSplits", test: "Records") -> "dict[str, Metric]":
    """What the model is good for on the test records, which are public, as those of `sordino train`."""
    from sordino.cli.training_job import probabilities, subgroups_of
    from sordino.report import compute_utility

    return compute_utility(probabilities(model, test), test.labels, public=True, groups=subgroups_of(found, test))


def _loss(model: "nn.Module", x: "Tensor", y: "Tensor") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(x), y, reduction="none")


def _get_model(name: str) -> "ModelFactory":
    from sordino.recipes import cnn, logistic, mlp

    factories: dict[str, ModelFactory] = {"logistic": logistic, "mlp": mlp, "cnn": cnn}
    return factories[str(checks.one_of(list(factories), model=name))]


def _plan(
    epsilon: float, delta: float | None, clients: int, rounds: int, cohort: float, bound: float, *, adaptive: bool
) -> "Plan":
    from sordino.clipping import QuantileClipping
    from sordino.definitions import PrivacyUnit
    from sordino.training import Plan

    clients = checks.integer(1, clients=clients)
    cohort = min(checks.positive(cohort=cohort), clients)
    given = 10.0 ** -len(str(10 * clients)) if delta is None else delta
    return Plan.for_epsilon(
        target_epsilon=epsilon,
        delta=given,
        sample_rate=cohort / clients,
        steps=checks.integer(1, rounds=rounds),
        max_grad_norm=checks.positive(bound=bound),
        expected_batch_size=cohort,
        privacy_unit=PrivacyUnit.CLIENT,
        dataset_size_is_public=True,
        clipping=QuantileClipping(count_noise=cohort / 10) if adaptive else None,
    )


def _meta(found: "DatasetSplits", model: str, optimizer: str, epsilon: float, clients: int) -> dict[str, object]:
    """Public facts about the run."""
    return {
        "target_epsilon": epsilon,
        "reproducible": False,
        "settings": "All settings were given on the command line, or are its defaults",
        "tuned_on_these_data": False,
        "data": {
            "name": found.name,
            "records": len(found.train),
            "clients": clients,
            "labels": len(found.labels),
            "source": found.source,
            "license": found.license,
            "public": True,
        },
        "training": {
            "model": f"{model}, federated over {clients} simulated clients",
            "optimizer": f"{optimizer} on the noisy mean update",
        },
        "noise_arithmetic": "floating point",
        "trust": "The server is trusted: it sees the update of every client before it adds the noise. Those who see "
        "the released model are not trusted.",
        "data_accesses": {
            "preprocessing": "Each record is scaled and encoded on its own.",
            "normalization": "No statistic of the records is computed.",
            "schema": "The form of the records and the labels are fixed by the dataset.",
            "early_stopping": "None: rounds were fixed in advance.",
            "evaluation": "Accuracy, calibration and subgroups on test records that are public."
            if found.test is not None
            else "None.",
            "logging": "No loss, norm or cohort is printed or stored.",
        },
        "composition": "The records are public: other uses need not be counted.",
    }
