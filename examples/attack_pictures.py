"""Three attacks on MNIST, without and with privacy, as pictures: a digit from a gradient, members, a painted class.

Run: python examples/attack_pictures.py --out docs/pictures --show gradients members federated
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import KeyedRNG, Plan, accounting, data, fit
from sordino.audit.attacks import membership_report, plot_roc, standard_training
from sordino.definitions import format_upper_bound
from sordino.events import Gaussian, NonPrivate
from sordino.research import (
    Federation,
    Impersonation,
    Protection,
    impersonate,
    invert_by_direction,
    invert_by_matching,
    label_from_sign,
    privatized_gradient,
    psnr,
    shared_gradient,
    ssim,
)

NOISE, DELTA, SHAPE = 0.5, 1e-5, (1, 28, 28)
Records = tuple[Tensor, Tensor]


def seeded(seed: int) -> KeyedRNG:
    """Pictures that come out alike each time; a seed that is known protects nobody."""
    return KeyedRNG(seed=seed, reproducible=True)


def test_records() -> tuple[Tensor, Tensor]:
    """MNIST's test digits."""
    test = data.load_dataset("mnist").test
    assert test is not None
    return test.tensors()


def save(rows: list[tuple[str, list[Tensor]]], path: Path, columns: list[str]) -> None:
    """Pictures in a grid with words above and beside."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 * len(rows[0][1]) + 1.6, 1.45 * len(rows) + 0.5), dpi=80, facecolor="#faf9f6")
    axes = figure.subplots(len(rows), len(rows[0][1]), squeeze=False)
    for row, (name, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            place = axes[row][column]
            place.imshow(picture.clamp(0, 1).numpy(), cmap="gray_r", vmin=0, vmax=1)
            place.set_xticks([])
            place.set_yticks([])
            if column == 0:
                place.set_ylabel(name, fontsize=9, rotation=0, ha="right", va="center")
            if row == 0 and column < len(columns):
                place.set_title(columns[column], fontsize=9)
    figure.tight_layout(pad=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def sigmoid_network() -> nn.Module:
    """A victim as the attack's authors chose it: smooth activations, wide initial weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(588, 10),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def gradients(out: Path, digits: int) -> dict[str, float]:
    """Each digit, what its gradient gives away, and what is left after clipping and noise."""
    features, labels = test_records()
    torch.manual_seed(0)
    model, rows, found = sigmoid_network(), [], {}
    for k in range(digits):
        x, y = features[k : k + 1], labels[k : k + 1]
        exact = shared_gradient(model, x, y)
        known = torch.tensor([label_from_sign(exact[-1])])
        open_ = invert_by_matching(model, exact, classes=10, steps=200, restarts=2, rng=seeded(k), shape=SHAPE)
        noisy = privatized_gradient(model, x, y, max_grad_norm=1.0, noise_multiplier=NOISE, rng=seeded(100 + k))
        matched = invert_by_matching(
            model, noisy, classes=10, labels=known, steps=60, restarts=1, rng=seeded(k), shape=SHAPE
        )
        turned = invert_by_direction(model, noisy, labels=known, steps=300, rng=seeded(k), shape=SHAPE)
        pictures = [x, open_.features, matched.features, turned.features]
        rows.append((f"digit {int(y)}", [picture[0, 0] for picture in pictures]))
        for name, picture in zip(("open", "matched", "turned"), pictures[1:], strict=True):
            found[f"{name} {k}"] = psnr(picture.clamp(0, 1), x)
            likeness = ssim(picture[0].clamp(0, 1), x[0])
            print(f"digit {int(y)}, {name}: PSNR {found[f'{name} {k}']:.1f} dB, SSIM {likeness:.2f}")
    event = Gaussian(noise_multiplier=NOISE)
    epsilon, most = accounting.epsilon(event, DELTA).upper, accounting.reconstruction_bound(event, 0.001)
    print(f"The private gradient: ({format_upper_bound(epsilon)}, {DELTA:g})-differentially private: unit one record.")
    print(f"A record that is guessed with chance 0.1 % is reconstructed with chance {100 * most:.1f} % at most.")
    save(rows, out / "gradient-leak.png", ["original", "from its gradient", "private: matching", "private: direction"])
    return found


def members(out: Path, records: int) -> dict[str, float]:
    """ROC curves of every attack on a model with and without privacy, 20 % of whose labels are chance."""
    features, labels = data.load_dataset("mnist").train.tensors()
    generator = torch.Generator().manual_seed(0)
    chance = torch.randint(0, 10, (3 * records,), generator=generator)
    labels = torch.where(torch.rand(3 * records, generator=generator) < 0.2, chance, labels[: 3 * records])
    parts = [(features[k * records : (k + 1) * records], labels[k * records : (k + 1) * records]) for k in range(3)]
    torch.manual_seed(0)

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    train = standard_training(build, steps=400, batch_size=64, rng=seeded(1))
    plan = Plan.for_epsilon(
        target_epsilon=2.0, delta=1e-4, sample_rate=0.1, steps=100, max_grad_norm=1.0, expected_batch_size=records / 10
    )
    private = fit(
        build(),
        losses,
        parts[0],
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        rng=seeded(2),
        progress=False,
    )
    settings = {"population": parts[2], "train_reference": train, "references": 16, "public": True}
    bare = membership_report(train(*parts[0]), *parts[:2], event=NonPrivate(reason="none"), rng=seeded(3), **settings)
    kept = membership_report(
        private.model, *parts[:2], event=plan.event(), claim=private.guarantee, rng=seeded(3), **settings
    )
    found = {}
    for name, words, report in (("open", "without privacy", bare), ("private", "trained privately", kept)):
        out.mkdir(parents=True, exist_ok=True)
        plot_roc(report, out / f"members-{name}.png", title=f"Members of an MNIST model, {words}")
        for attack in report.attacks:
            rate = attack.roc.true_positive_rate(0.01)
            found[f"{name} {attack.name}"] = rate.value
            span = f"{100 * rate.lower:.1f}–{100 * rate.upper:.1f}"
            print(f"{name}, {attack.name}: TPR at 1 % {100 * rate.value:.1f} % ({span}), AUC {attack.roc.auc:.3f}")
        print(
            f"{name}: ceiling {100 * report.ceiling.true_positive_rate(0.01):.1f} %, above it: {report.above_ceiling}"
        )
    print(private.guarantee.describe())
    return found


TARGET = 3
ARMS = {
    "control": Federation(),
    "none": Federation(),
    "record": Federation(protection=Protection.RECORD, max_grad_norm=1.0, noise_multiplier=0.6),
    "client": Federation(protection=Protection.CLIENT, max_grad_norm=0.05, noise_multiplier=1.0),
}

Judge = Callable[[Tensor], Tensor]


def judges(x: Tensor, y: Tensor) -> dict[str, Judge]:
    """Three ways to name the digit of a picture, none of which saw the federation's records."""
    networks = {
        "network": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
        "convolutions": lambda: nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1568, 10),
        ),
    }
    found: dict[str, Judge] = {}
    for place, (name, build) in enumerate(networks.items()):
        torch.manual_seed(place)
        model = standard_training(build, steps=600, rng=seeded(5 + place))(x, y)
        found[name] = lambda pictures, model=model: model(pictures).argmax(1)

    def nearest(pictures: Tensor) -> Tensor:
        """The commonest digit among the five nearest pictures."""
        distances = torch.cdist(pictures.flatten(1), x.flatten(1))
        return y[distances.topk(5, largest=False).indices].mode(dim=1).values

    return found | {"nearest five": nearest}


def painted(arm: str, rounds: int, seed: int, records: Records) -> Impersonation:
    """What the attacker has after the last round; in the control the victim's threes are shuffled pixels."""
    x, y = records
    if arm == "control":
        order = torch.randperm(784, generator=torch.Generator().manual_seed(0))
        x = torch.where((y == TARGET)[:, None, None, None], x.flatten(1)[:, order].view_as(x), x)
    torch.manual_seed(seed)
    return impersonate(
        (x[y < 5], y[y < 5]),
        (x[y >= 5], y[y >= 5]),
        target=TARGET,
        classes=10,
        federation=replace(ARMS[arm], rounds=rounds),
        generator_steps=20,
        rng=seeded(100 + seed),
    )


def federated(out: Path, rounds: int, seeds: int = 5, records: int = 8000) -> dict[str, list[float]]:
    """What the attacker paints of the victim's digit 3 under each protection, over seeds and judges.

    Returns:
        For each arm and judge the share of pictures taken for a 3, one a seed; for each arm how often the shared model
        is right.
    """
    features, labels = data.load_dataset("mnist").train.tensors()
    others, other_labels = test_records()
    named = judges(others[:5000], other_labels[:5000])
    with torch.no_grad():
        for name, judge in named.items():
            share = (judge(others[5000:7000]) == other_labels[5000:7000]).float().mean().item()
            print(f"judge {name}: right on {100 * share:.0f} % of real digits")
    rows, found = [], {}
    for arm, federation in ARMS.items():
        for seed in range(seeds):
            result = painted(arm, rounds, seed, (features[:records], labels[:records]))
            with torch.no_grad():
                for name, judge in named.items():
                    taken = (judge(result.pictures) == TARGET).float().mean().item()
                    found.setdefault(f"{arm}, {name}", []).append(taken)
                right = (result.model(others[7000:])[:, :10].argmax(1) == other_labels[7000:]).float().mean().item()
            found.setdefault(f"{arm}, model", []).append(right)
            if seed == 0:
                words = f"{arm} protection" if federation.protection is not Protection.NONE else f"{arm}"
                rows.append((words.replace("none", "no protection"), list(result.pictures[:8, 0])))
        for name in (*named, "model"):
            values = [100 * value for value in found[f"{arm}, {name}"]]
            what = "is right on" if name == "model" else "takes for a 3"
            mean = sum(values) / len(values)
            print(f"{arm}: {name} {what} {mean:.0f} % ({min(values):.0f} to {max(values):.0f})", flush=True)
    save(rows, out / "painted-class.png", [])
    return found


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Draw what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    parser.add_argument("--show", nargs="+", choices=["gradients", "members", "federated"], default=["gradients"])
    parser.add_argument("--digits", type=int, default=4)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    # One thread, whatever is asked for elsewhere: sums in another order end in other pictures after sixty rounds.
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    if "gradients" in chosen.show:
        found |= gradients(chosen.out, chosen.digits)
    if "members" in chosen.show:
        found |= members(chosen.out, chosen.records)
    if "federated" in chosen.show:
        found |= federated(chosen.out, chosen.rounds, chosen.seeds)
    return found


if __name__ == "__main__":
    main()
