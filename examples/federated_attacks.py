"""Two attacks on clients' updates, without privacy, with local privacy and behind a private server, as pictures.

A record from one client's update (gradient inversion), and a class that only another client has, painted by a malicious
client (Hitaj et al. 2017). What comes out is compared with what an attacker knows without any update: the mean digit,
and the same painter in a federation in which nobody has the class.

Run: python examples/federated_attacks.py --out docs/pictures --show record class
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import KeyedRNG, Plan, data
from sordino.audit.attacks import standard_training
from sordino.definitions import PrivacyUnit
from sordino.federated import LocalPrivacy, LocalTraining, PrivateServer, model_update
from sordino.research import Federation, Impersonator, gradient_of_update, invert_by_matching, label_from_sign, psnr

EPSILON, DELTA = 8.0, 1e-5
ARMS = ("none", "local", "server")
RATE, BOUND, COHORT = 0.1, 0.1, 50
_STEPS = {"none": 200, "local": 60, "server": 60}

Records = tuple[Tensor, Tensor]


def seeded(seed: int) -> KeyedRNG:
    """Pictures that come out alike each time; a seed that is known protects nobody."""
    return KeyedRNG(seed=seed, reproducible=True)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of each record."""
    return F.cross_entropy(model(x), y, reduction="none")


# ── a record from an update ─────────────────────────────────────────────────────────────────────────────────


def sigmoid_network(side: int = 28) -> nn.Module:
    """A victim as the attack's authors chose it: smooth activations, wide initial weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2 if side > 8 else 1, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(588 if side > 8 else 12 * (side // 2) ** 2, 10),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def seen(arm: str, model: nn.Module, x: Tensor, y: Tensor, *, seed: int) -> dict[str, Tensor]:
    """What the attacker sees of the update of a client that has the record (x, y) and takes one step of SGD.

    "none": the update. "local": the update as `LocalPrivacy` lets it leave the client. "server": the noisy mean of a
    `PrivateServer`, times the cohort; the other clients are all the attacker's own and send zero.
    """
    order = seeded(seed).stream("order", step=0)
    update = LocalTraining(learning_rate=RATE).update(copy.deepcopy(model), losses, (x, y), order=order)
    if arm == "none":
        return update
    if arm == "local":
        local = LocalPrivacy(epsilon=EPSILON, delta=DELTA, max_update_norm=BOUND, rng=seeded(seed + 1))
        return local.privatize(update)
    plan = Plan.for_epsilon(
        target_epsilon=EPSILON,
        delta=DELTA,
        steps=1,
        sample_rate=1.0,
        expected_batch_size=float(COHORT),
        max_grad_norm=BOUND,
        privacy_unit=PrivacyUnit.CLIENT,
    )
    shared = copy.deepcopy(model)
    zero = {name: torch.zeros_like(value) for name, value in update.items()}
    with PrivateServer(shared, plan, num_clients=COHORT, rng=seeded(seed + 2)) as server:
        for cohort in server.rounds():
            server.finish_round(cohort, ((client, update if client == 0 else zero) for client in range(COHORT)))
    moved = model_update(shared, dict(model.named_parameters()))
    return {name: COHORT * value for name, value in moved.items()}


def inverted(arm: str, model: nn.Module, x: Tensor, y: Tensor, *, seed: int, steps: int = 200) -> Tensor:
    """The record as the attacker finds it; it reads the label from the last bias, or knows it under privacy."""
    gradient = gradient_of_update(model, seen(arm, model, x, y, seed=seed), learning_rate=RATE)
    label = y if arm != "none" else torch.tensor([label_from_sign(gradient[-1])])
    found = invert_by_matching(
        model, gradient, classes=10, labels=label, steps=steps, restarts=1, rng=seeded(seed), shape=x.shape[1:]
    )
    return found.features.clamp(0, 1)


def record(out: Path, digits: int) -> dict[str, float]:
    """Each digit, the mean digit, and what comes out of the client's update in the three arms: PSNR in dB."""
    test = data.load_dataset("mnist").test
    assert test is not None
    features, labels = test.tensors()
    torch.manual_seed(0)
    model, prior, found, rows = sigmoid_network(), features[1000:].mean(0, keepdim=True), {}, []
    for k in range(digits):
        x, y = features[k : k + 1], labels[k : k + 1]
        pictures = [
            prior,
            *(inverted(arm, model, x, y, seed=10 * k, steps=60 if arm != "none" else 200) for arm in ARMS),
        ]
        for name, picture in zip(("prior", *ARMS), pictures, strict=True):
            found[f"{name} {k}"] = psnr(picture, x)
            print(f"digit {int(y)}, {name}: PSNR {found[f'{name} {k}']:.1f} dB")
        rows.append((f"digit {int(y)}", [picture[0, 0] for picture in (x, *pictures)]))
    columns = ["the record", "mean digit", "its update", f"local, ε = {EPSILON:g}", f"server, ε = {EPSILON:g}"]
    save(rows, out / "federated-record.png", columns)
    return found


# ── a class that only one client has ────────────────────────────────────────────────────────────────────────


def shared_model(side: int, outputs: int) -> nn.Module:
    """What the clients train; its last output is for the attacker's fakes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, outputs),
    )


def painted(
    arm: str,
    honest: Sequence[Records],
    attacker: Records,
    *,
    target: int,
    classes: int,
    rounds: int,
    seed: int,
    generator_steps: int = 20,
    bound: float = 1.0,
) -> tuple[Tensor, nn.Module]:
    """The attacker's pictures and the shared model, after federated averaging with the attacker as the last client."""
    torch.manual_seed(seed)
    people = len(honest) + 1
    common = {
        "delta": DELTA,
        "steps": rounds,
        "sample_rate": 1.0,
        "expected_batch_size": float(people),
        "privacy_unit": PrivacyUnit.CLIENT,
    }
    plan = Plan(noise_multiplier=0.0, max_grad_norm=100.0, **common)
    if arm == "server":
        plan = Plan.for_epsilon(target_epsilon=EPSILON, max_grad_norm=bound, **common)
    model = shared_model(attacker[0].shape[-1], classes + 1)
    worker, local = copy.deepcopy(model), LocalTraining(learning_rate=0.1, batch_size=64)
    settings = Federation(rounds=rounds, local_steps=4, learning_rate=0.1)
    malicious = Impersonator(
        attacker,
        target=target,
        classes=classes,
        federation=settings,
        generator_steps=generator_steps,
        rng=seeded(seed),
    )
    guards = [
        LocalPrivacy(epsilon=EPSILON, delta=DELTA, max_update_norm=bound, rounds=rounds, rng=seeded(100 + k))
        for k in range(len(honest) if arm == "local" else 0)
    ]

    def answers(number: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for client, records in enumerate(honest):
            worker.load_state_dict(model.state_dict())
            order = seeded(seed).stream("order", step=number, tensor=client)
            update = local.update(worker, losses, records, order=order)
            yield client, guards[client].privatize(update) if guards else update
        worker.load_state_dict(model.state_dict())
        yield people - 1, malicious.update(worker)

    with PrivateServer(model, plan, num_clients=people, rng=seeded(seed + 1)) as server:
        for cohort in server.rounds():
            server.finish_round(cohort, answers(cohort.number))
    return malicious.pictures(), model


def dealt(
    features: Tensor, labels: Tensor, *, target: int, with_target: bool, each: int
) -> list[tuple[Tensor, Tensor]]:
    """Four clients: the first has digits up to the target (and it, if asked), the others anything but the target."""
    mine = torch.nonzero((labels < target) | ((labels == target) & with_target))[:each, 0]
    others = torch.nonzero(labels != target)[:, 0]
    rest = [others[k * each : (k + 1) * each] for k in range(1, 4)]
    return [(features[places], labels[places]) for places in (mine, *rest)]


def class_(out: Path, rounds: int) -> dict[str, float]:
    """What the attacker paints of the digit 3, which one client alone has: the share that a judge takes for a 3."""
    found_data = data.load_dataset("mnist")
    assert found_data.test is not None
    (features, labels), (others, other_labels) = found_data.train.tensors(), found_data.test.tensors()
    torch.manual_seed(0)
    judge = standard_training(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
        steps=600,
        rng=seeded(5),
    )(others[:5000], other_labels[:5000])
    attacker = (features[labels > 3][:256], labels[labels > 3][:256])
    rows, found = [], {}
    for name, arm in (("nobody has it", "none"), ("no protection", "none"), ("local", "local"), ("server", "server")):
        honest = dealt(features, labels, target=3, with_target=name != "nobody has it", each=256)
        pictures, model = painted(arm, honest, attacker, target=3, classes=10, rounds=rounds, seed=3)
        with torch.no_grad():
            found[name] = (judge(pictures).argmax(1) == 3).double().mean().item()
            right = (model(others[5000:])[:, :10].argmax(1) == other_labels[5000:]).double().mean().item()
        found[f"{name}, right"] = right
        print(f"{name}: a judge takes {100 * found[name]:.0f} % for a 3; the model is right on {100 * right:.0f} %")
        rows.append((name, list(pictures[:8, 0])))
    save(rows, out / "federated-class.png", [])
    return found


def save(rows: list[tuple[str, list[Tensor]]], path: Path, columns: list[str]) -> None:
    """Pictures in a grid with words above and beside."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.4 * len(rows[0][1]) + 1.6, 1.4 * len(rows) + 0.5), dpi=80, facecolor="#faf9f6")
    axes = figure.subplots(len(rows), len(rows[0][1]), squeeze=False)
    for row, (name, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            place = axes[row][column]
            place.imshow(picture.numpy(), cmap="gray_r", vmin=0, vmax=1)
            place.set_xticks([])
            place.set_yticks([])
            if column == 0:
                place.set_ylabel(name, fontsize=9, rotation=0, ha="right", va="center")
            if row == 0 and column < len(columns):
                place.set_title(columns[column], fontsize=9)
    figure.tight_layout(pad=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Draw what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    parser.add_argument("--show", nargs="+", choices=["record", "class"], default=["record"])
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    if "record" in chosen.show:
        found |= record(chosen.out, chosen.digits)
    if "class" in chosen.show:
        found |= class_(chosen.out, chosen.rounds)
    return found


if __name__ == "__main__":
    main()
