"""The server: Flower's own, with a private strategy in the place of FedAvg."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits.task import model, public_test
from sordino import Plan
from sordino.definitions import PrivacyUnit
from sordino.federated.flower import PrivateStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds, then the guarantee for one client."""
    clients, rounds = int(context.run_config["clients"]), int(context.run_config["rounds"])
    plan = Plan.for_epsilon(
        target_epsilon=float(context.run_config["epsilon"]),
        delta=1e-2,
        sample_rate=1.0,
        steps=rounds,
        expected_batch_size=clients,
        max_grad_norm=1.0,
        privacy_unit=PrivacyUnit.CLIENT,
    )
    strategy = PrivateStrategy(model(), plan, num_clients=clients)
    strategy.start(grid)
    x, y = public_test()
    with torch.no_grad():
        accuracy = float((strategy.server.model(x).argmax(1) == y).double().mean())
    print(f"accuracy {accuracy:.3f} with so few clients; {strategy.guarantee().describe()}", flush=True)
