"""`federate`: federated learning simulated on public data, with client-level privacy."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sordino import checks
from sordino.commands.outcomes import (
    RunOutcome,
    describe_data,
    measure_test_records,
    probabilities,
    run_folder,
    write_results,
)
from sordino.commands.running import SILENT, DryRun, Progress, preview
from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from sordino.data import DatasetSplits
    from sordino.federated import FederatedResult
    from sordino.ledger import Account
    from sordino.recipes import ModelFactory
    from sordino.training import Plan


def federate(
    data: "str | DatasetSplits",
    *,
    epsilon: float,
    clients: int = 200,
    rounds: int = 30,
    cohort: float = 100,
    delta: float | None = None,
    model: str = "logistic",
    max_update_norm: float = 0.3,
    fixed_norm: bool = False,
    local_epochs: int = 1,
    local_batch_size: int = 10,
    local_learning_rate: float = 0.1,
    optimizer: str = "fedavg",
    out: Path | str | None = None,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> RunOutcome | DryRun:
    """Simulate federated learning: clients train on their own records, the server adds noise to their mean update.

    Guarantee: `RunOutcome.guarantee`, for one client, charged round by round before its clients are asked.

    Args:
        data: Name of a public dataset from `sordino data list`.
        epsilon: Target ε of one client, never exceeded.
        clients: Number of clients; records are split evenly.
        rounds: Number of rounds.
        cohort: Expected number of clients per round.
        delta: δ. Default: a power of ten below 0.1 / clients.
        model: logistic, mlp or cnn.
        max_update_norm: ℓ2 clipping norm of an update; the initial one if it adapts.
        fixed_norm: Keep the clipping norm fixed. Default: it follows the median norm.
        local_epochs: Passes of a client over its records.
        local_batch_size: Batch size of a client, in records.
        local_learning_rate: Learning rate of a client.
        optimizer: Server optimizer: fedavg, fedavgm, fedadagrad, fedadam or fedyogi.
        out: Run folder to create. Default: runs/NAME-DATE-NUMBER.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.

    Returns:
        The run; with `dry_run` its cost.
    """
    import numpy as np

    from sordino.data import DatasetSplits, load_dataset
    from sordino.federated import SERVER_OPTIMIZERS, LocalTraining, simulate, split_clients
    from sordino.recipes.saved_model import describe_module
    from sordino.recipes.training_config import cross_entropy_per_record

    checks.one_of(list(SERVER_OPTIMIZERS), optimizer=optimizer)
    size = checks.integer(1, local_batch_size=local_batch_size)
    local = LocalTraining(learning_rate=local_learning_rate, epochs=local_epochs, batch_size=size)
    build = _get_model(model)
    plan = _plan(epsilon, delta, clients, rounds, cohort, max_update_norm, adaptive=not fixed_norm)
    found = data if isinstance(data, DatasetSplits) else load_dataset(data)
    if not found.public:
        raise InvalidArgument(
            "data must be a named public dataset: its records are distributed over simulated clients. For real clients "
            "use sordino.federated.PrivateServer."
        )
    records = found.train.tensors()
    held = split_clients(records, np.arange(len(found.train)) % clients, num_clients=clients)
    asked = "every client in each" if cohort >= clients else f"each client with probability {cohort / clients:.3g}"
    noise = plan.step_plan(0).noise_multiplier
    progress.status(f"{clients} clients, {rounds} rounds, {asked}; noise multiplier {noise:.4g}.")

    def learn(
        payer: "Account | None", run: RunFolder | None, advance: "Callable[..., None] | None" = None
    ) -> "FederatedResult":
        return simulate(
            build(found.train.record_shape, len(found.labels)),
            cross_entropy_per_record,
            held,
            plan,
            local=local,
            optimizer=SERVER_OPTIMIZERS[optimizer],
            run_folder=run,
            ledger=payer,
            on_round=advance,
        )

    if dry_run:
        return preview(lambda payer, _: learn(payer, None), ledger, delta=plan.delta, progress=progress)
    folder = run_folder(f"{found.name}-federated", out)
    meta = _metadata(found, model, optimizer, epsilon, clients)
    with RunFolder.create(folder, plan=plan.to_json(), meta=meta) as run:
        with progress.stage("rounds", total=rounds) as advance:
            result = learn(ledger, run, advance)
        metrics = measure_test_records(found, lambda test: probabilities(result.model, test))
        run.write_model_description(describe_module(found, model))
        write_results(run, metrics)
    return RunOutcome(
        run=run,
        guarantee=result.guarantee,
        metrics=metrics,
        steps=result.rounds,
        interrupted=result.rounds < rounds,
        details={"data": found.name, "clients": clients, "rounds": rounds},
    )


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


def _metadata(found: "DatasetSplits", model: str, optimizer: str, epsilon: float, clients: int) -> dict[str, object]:
    """Public facts about the run."""
    return {
        "target_epsilon": epsilon,
        "reproducible": False,
        "settings": "All settings were given on the command line, or are its defaults",
        "tuned_on_these_data": False,
        "data": {
            **describe_data(found, records=len(found.train), labels=len(found.labels)),
            "clients": clients,
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
