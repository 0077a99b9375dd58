"""Federated learning: client-level privacy on a trusted server, local privacy, distributed noise."""

from sordino.federated.secure_aggregation import DistributedGaussian, DistributedServer, SimulatedSecureAggregation
from sordino.federated.server import (
    SERVER_OPTIMIZERS,
    FederatedRound,
    PrivateServer,
    Yogi,
    fed_adagrad,
    fed_adam,
    fed_avg,
    fed_avgm,
    fed_yogi,
)
from sordino.federated.simulation import FederatedResult, LocalTraining, simulate, split_clients
from sordino.federated.updates import LocalPrivacy, Update, clipped_update, model_update, shared_parameters

__all__ = [
    "DistributedGaussian",
    "DistributedServer",
    "FederatedResult",
    "FederatedRound",
    "LocalPrivacy",
    "LocalTraining",
    "PrivateServer",
    "SERVER_OPTIMIZERS",
    "SimulatedSecureAggregation",
    "Update",
    "Yogi",
    "clipped_update",
    "fed_adagrad",
    "fed_adam",
    "fed_avg",
    "fed_avgm",
    "fed_yogi",
    "model_update",
    "shared_parameters",
    "simulate",
    "split_clients",
]
