"""Federated learning (floor 4): client-level privacy on a trusted server, local privacy, distributed noise."""

from sordino.federated.distributed import DistributedGaussian
from sordino.federated.distributed_server import DistributedServer
from sordino.federated.local_privacy import LocalPrivacy
from sordino.federated.optimizers import SERVER_OPTIMIZERS, Yogi, fed_adagrad, fed_adam, fed_avg, fed_avgm, fed_yogi
from sordino.federated.secure_sum import SimulatedSecureSum
from sordino.federated.server import PrivateServer, Round
from sordino.federated.simulation import FederatedResult, LocalTraining, clients_from, simulate
from sordino.federated.updates import Update, clipped_update, difference, shared_parameters

__all__ = [
    "DistributedGaussian",
    "DistributedServer",
    "FederatedResult",
    "LocalPrivacy",
    "LocalTraining",
    "PrivateServer",
    "Round",
    "SERVER_OPTIMIZERS",
    "SimulatedSecureSum",
    "Update",
    "Yogi",
    "clients_from",
    "clipped_update",
    "difference",
    "fed_adagrad",
    "fed_adam",
    "fed_avg",
    "fed_avgm",
    "fed_yogi",
    "shared_parameters",
    "simulate",
]
