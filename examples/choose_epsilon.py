"""Choose ε before training: what each budget costs in noise, without touching a record.

Run: python examples/choose_epsilon.py
"""

import argparse

from sordino.training import Plan


def main(arguments: list[str] | None = None) -> list[Plan]:
    """Print, for some ε, the noise that reaches it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 3.0, 8.0])
    parser.add_argument("--dataset-size", type=int, default=60_000, help="public number of records")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args(arguments)

    plans = [
        Plan.for_epsilon(
            target_epsilon=epsilon,
            delta=1e-6,
            sample_rate=chosen.batch_size / chosen.dataset_size,
            steps=chosen.steps,
            max_grad_norm=1.0,
            expected_batch_size=float(chosen.batch_size),
            dataset_size_is_public=True,
        )
        for epsilon in chosen.epsilons
    ]
    for plan in plans:
        # What the noise does to one step: its standard deviation, in units of one record's largest contribution,
        # spread over the batch.
        per_step = plan.noise_multiplier / plan.expected_batch_size
        print(f"noise multiplier {plan.noise_multiplier:6.3f} · noise on the mean gradient {per_step:.1e} · C")
        print(f"    {plan.guarantee().describe()}")
    return plans


if __name__ == "__main__":
    main()
