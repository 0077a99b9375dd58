"""Client-level privacy on MNIST over 1000 simulated users, beside federated averaging without privacy.

    ./run bench federated                 # the table, kept as benchmarks/results/federated.json
    ./run bench federated --quick         # one seed, ε = 8 only

Users: the 60 000 training records dealt to 1000 users, 60 each, either evenly or so that each user has records of two
digits only (shards, as McMahan et al. 2017 split them). All settings are the same for every ε and both splits, and were
chosen on the last 10 000 training records.
"""

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sordino.clipping import QuantileClipping
from sordino.data import load
from sordino.definitions import PrivacyUnit
from sordino.federated import LocalTraining, clients_from, fed_avgm, simulate
from sordino.training import Plan

RESULT = Path(__file__).parent / "results" / "federated.json"
USERS, ROUNDS, DELTA = 1000, 60, 1e-4


def logistic():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


MODELS = {"logistic": logistic, "cnn": cnn}


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def users_of(labels, split, seed):
    """The user of each record."""
    numbers = np.random.default_rng(seed)
    of = np.empty(len(labels), dtype=np.int64)
    if split == "even":
        of[numbers.permutation(len(labels))] = np.arange(len(labels)) % USERS
        return of
    shards = np.array_split(np.argsort(labels, kind="stable"), 2 * USERS)
    for place, shard in enumerate(numbers.permutation(2 * USERS)):
        of[shards[shard]] = place // 2
    return of


def plan_for(epsilon, args):
    values = {
        "steps": args.rounds,
        "sample_rate": args.rate,
        "expected_batch_size": USERS * args.rate,
        "max_grad_norm": args.bound,
        "delta": DELTA,
        "privacy_unit": PrivacyUnit.CLIENT,
        "dataset_size_is_public": True,
    }
    if epsilon is None:
        return Plan(noise_multiplier=0.0, **{**values, "max_grad_norm": 1e3})
    clipping = QuantileClipping(quantile=0.5, learning_rate=0.2, count_noise=USERS * args.rate / 10)
    return Plan.for_epsilon(target_epsilon=epsilon, clipping=clipping, **values)


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def one(data, model_name, split, epsilon, seed, args):
    (x, y), (test_x, test_y) = data
    torch.manual_seed(seed)
    model = MODELS[model_name]()
    clients = clients_from((x, y), users_of(y.numpy(), split, seed), count=USERS)
    plan = plan_for(epsilon, args)
    local = LocalTraining(learning_rate=args.local_rate, epochs=1, batch_size=10)
    start = time.time()
    result = simulate(
        model,
        loss,
        clients,
        plan,
        local=local,
        optimizer=lambda parameters: fed_avgm(parameters, learning_rate=args.server_rate),
    )
    return {
        "model": model_name,
        "split": split,
        "epsilon": epsilon,
        "seed": seed,
        "spent": result.guarantee.epsilon if epsilon else None,
        "noise_multiplier": plan.noise_multiplier,
        "accuracy": accuracy(model, test_x, test_y),
        "seconds": time.time() - start,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--bound", type=float, default=0.3)
    parser.add_argument("--local-rate", type=float, default=0.1)
    parser.add_argument("--server-rate", type=float, default=0.3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--splits", nargs="+", default=["even", "shards"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--validate", action="store_true", help="measure on the last training records")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = load("mnist")
    (x, y), test = found.train.tensors(), found.test.tensors()
    data = ((x, y), test)
    if args.validate:
        data = ((x[:50_000], y[:50_000]), (x[50_000:], y[50_000:]))
    rows = []
    seeds = 1 if args.quick or args.validate else args.seeds
    for model in args.models:
        for split in args.splits:
            for epsilon in [8.0] if args.quick else [*args.epsilons, None]:
                for seed in range(seeds):
                    rows.append(one(data, model, split, epsilon, seed, args))
                    print(json.dumps(rows[-1]), flush=True)
                    if not args.quick and not args.validate:
                        write(rows, args)


def write(rows, args):
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "torch": torch.__version__,
        "users": USERS,
        "delta": DELTA,
        "settings": {name: value for name, value in vars(args).items() if name not in ("quick", "validate")},
        "rows": rows,
    }
    RESULT.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
