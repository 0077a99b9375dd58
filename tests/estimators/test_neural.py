"""Torch modules as estimators: the same training as `fit`, modules that stay the user's, scikit-learn's tools."""

import copy
import io

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from torch import nn

from sordino.errors import CoupledRecords, InvalidArgument, MissingDeclaration, PrivacyError
from sordino.estimators import DPClassifier, DPRegressor, MinMaxScaler
from sordino.randomness import KeyedRNG
from sordino.training import Plan
from sordino.training.fit import fit

DECLARED = {"epsilon": 4.0, "delta": 1e-5, "dataset_size": 400, "epochs": 5.0}
SEEDED = {"random_state": 3, "reproducible": True}


def records(count=400, seed=0):
    X = np.random.default_rng(seed).normal(size=(count, 3))
    return X, (X[:, 0] > 0).astype(int)


def linear(columns, outputs):
    return nn.Linear(columns, outputs)


def weights(model):
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.module_.parameters()])


def test_the_estimator_is_the_trainer_bit_for_bit():
    X, y = records()
    start = nn.Linear(3, 2)
    model = DPClassifier(
        start, classes=(0, 1), averaged_fraction=0.0, batch_size=100, learning_rate=0.3, **DECLARED, **SEEDED
    )
    model.fit(X, y)
    plan = Plan.for_epsilon(
        target_epsilon=4.0, delta=1e-5, sample_rate=0.25, steps=20, max_grad_norm=1.0, expected_batch_size=100.0
    )
    assert model.events_ == (plan.event(),)
    twin = copy.deepcopy(start)
    fit(
        twin,
        lambda module, x, y: nn.functional.cross_entropy(module(x), y, reduction="none"),
        (torch.from_numpy(X.astype(np.float32)), torch.from_numpy(y)),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9, nesterov=True),
        rng=KeyedRNG(seed=3, reproducible=True),
        progress=False,
    )
    assert torch.equal(model.module_.weight, twin.weight)
    assert not torch.equal(model.module_.weight, start.weight)


def test_one_record_more_changes_neither_the_noise_nor_the_events():
    X, y = records(400)
    more, labels = records(401)
    first = DPClassifier(classes=(0, 1), **DECLARED).fit(X, y)
    second = DPClassifier(classes=(0, 1), **DECLARED).fit(more, labels)
    assert first.events_ == second.events_
    assert first.guarantee_ == second.guarantee_


def test_the_module_that_was_given_stays_as_it_was_and_is_the_start_of_every_fit():
    X, y = records()
    start = nn.Linear(3, 2)
    before = copy.deepcopy(start.state_dict())
    model = DPClassifier(start, classes=(0, 1), **DECLARED)
    model.fit(X, y)
    first = model.module_
    model.fit(X, y)
    assert model.module is start
    assert all(torch.equal(before[name], start.state_dict()[name]) for name in before)
    assert model.module_ is not first
    assert clone(model).module is not start


def test_fitted_models_survive_joblib_and_predict_the_same():
    X, y = records()
    for model, target in (
        (DPClassifier(linear, classes=(0, 1), **DECLARED), y),
        (DPRegressor(linear, target_bounds=(-1.0, 1.0), **DECLARED), X[:, 0]),
    ):
        buffer = io.BytesIO()
        joblib.dump(model.fit(X, target), buffer)
        buffer.seek(0)
        again = joblib.load(buffer)
        assert (again.predict(X) == model.predict(X)).all()
        assert again.guarantee_ == model.guarantee_


def test_probabilities_scores_and_classes_agree():
    X, _ = records()
    names = np.array(["a", "b", "c"])
    y = names[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0)]
    for classes in (("a", "b"), ("a", "b", "c")):
        model = DPClassifier(classes=classes, **DECLARED).fit(X, y)
        found = model.predict_proba(X)
        assert found.shape == (400, len(classes))
        assert found.sum(axis=1) == pytest.approx(1.0)
        assert np.log(found) == pytest.approx(model.predict_log_proba(X))
        assert (model.predict(X) == model.classes_[found.argmax(axis=1)]).all()
        assert model.decision_function(X).shape == ((400,) if len(classes) == 2 else (400, 3))


def test_private_networks_learn_what_is_there():
    X, y = records(4000)
    given = DECLARED | {"dataset_size": 4000, "epochs": 30.0}
    assert DPClassifier(classes=(0, 1), **given).fit(X, y).score(X, y) > 0.9
    assert DPRegressor(target_bounds=(-1.0, 1.0), **given).fit(X, np.sign(X[:, 0])).score(X, np.sign(X[:, 0])) > 0.4


def test_a_pipeline_of_declared_scaling_and_a_network_states_one_budget():
    X, y = records()
    line = make_pipeline(MinMaxScaler(bounds=(-4.0, 4.0)), DPClassifier(linear, classes=(0, 1), **DECLARED)).fit(X, y)
    assert [step.guarantee_.epsilon for _, step in line.steps] == pytest.approx([0.0, 4.0], rel=1e-3)
    assert set(line.predict(X)) <= {0, 1}


def test_own_losses_and_optimizers_are_used():
    X, y = records()

    def hinge(logits, labels):
        return torch.relu(1 - (2 * labels - 1) * (logits[:, 1] - logits[:, 0]))

    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1)

    usual = DPClassifier(nn.Linear(3, 2), classes=(0, 1), **DECLARED, **SEEDED)
    drawn = [weights(clone(usual).set_params(**change).fit(X, y)) for change in ({}, {"loss": hinge})]
    drawn += [weights(clone(usual).set_params(optimizer=choice).fit(X, y)) for choice in (adagrad, "adam")]
    for i in range(len(drawn)):
        for j in range(i):
            assert (drawn[i] != drawn[j]).any()


def test_sampling_is_by_batch_size_or_by_rate():
    X, y = records()
    by_size = DPClassifier(classes=(0, 1), batch_size=40, **DECLARED).fit(X, y)
    by_rate = DPClassifier(classes=(0, 1), sample_rate=0.1, **DECLARED).fit(X, y)
    assert by_size.events_ == by_rate.events_
    assert by_size.guarantee_.sampler == "Poisson sampling at rate 0.1"
    assert DPClassifier(classes=(0, 1), **DECLARED).fit(X, y).guarantee_.sampler == "full batches"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 401}, "batch_size must be ≤ dataset_size"),
        ({"batch_size": 4, "sample_rate": 0.1}, "batch_size must be None with sample_rate"),
        ({"epochs": 0.0}, "epochs must be"),
        ({"learning_rate": -1.0}, "learning_rate must be"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"optimizer": torch.optim.Adam, "learning_rate": 0.1}, "learning_rate must be None"),
        ({"module": nn.Linear(3, 5)}, "module must give 2 outputs"),
        ({"module": lambda columns, outputs: 3}, "module must be an nn.Module"),
        ({"delta": 0.0}, "delta must be"),
        ({"averaged_fraction": 1.5}, "averaged_fraction must be"),
        ({"microbatch_size": 0}, "microbatch_size must be"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_charged(change, words):
    model = DPClassifier(classes=(0, 1), **(DECLARED | change))
    with pytest.raises(InvalidArgument, match=words):
        model.fit(*records())
    assert not hasattr(model, "guarantee_")


def test_modules_that_mix_records_are_refused_by_the_engine():
    mixing = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises((CoupledRecords, PrivacyError)):
        DPClassifier(mixing, classes=(0, 1), **DECLARED).fit(*records())


def test_the_regressor_wants_bounds_and_takes_outputs_with_and_without_a_last_dimension():
    X, _ = records()
    with pytest.raises(MissingDeclaration, match="target_bounds"):
        DPRegressor(**DECLARED).fit(X, X[:, 0])
    flat = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    for module in (flat, nn.Linear(3, 1)):
        found = DPRegressor(module, target_bounds=(10.0, 12.0), **DECLARED).fit(X, X[:, 0] + 11).predict(X)
        assert found.shape == (400,)
        assert 9 < found.mean() < 13
