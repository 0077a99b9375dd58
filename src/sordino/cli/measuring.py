"""What `demo` and `train` measure after a run: the private model on public test records, the twin on public data."""

from typing import TYPE_CHECKING

from sordino.report import utility
from sordino.runs import Metric

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from sordino.data import DataSet, Records
    from sordino.recipes import Recipe

__all__ = ["groups_of", "measure", "probabilities"]

# Columns with more values than this make subgroups that are too small to read.
_MOST_VALUES = 6


def measure(dataset: "DataSet", recipe: "Recipe", model: "nn.Module", *, test_is_public: bool) -> dict[str, Metric]:
    """Accuracy, calibration and subgroups on the test records, if they are public; nothing otherwise.

    Guarantee: reads no record that is not declared public.

    Args:
        dataset: whose test records are measured on, and whose training records the twin sees when all are public.
        recipe: of the private model; the twin is trained by it.
        model: the private model.
        test_is_public: whether the test records were declared public.
    """
    from sordino.recipes import accuracy, non_private_twin

    test = dataset.test
    if test is None or not len(test) or not test_is_public:
        return {}
    found = utility(probabilities(model, test), test.labels, public=test_is_public, groups=groups_of(dataset, test))
    if dataset.public:
        twin = non_private_twin(dataset, recipe)
        found["twin_test_accuracy"] = Metric(
            value=accuracy(twin, test), public=True, what="non-private twin, public data"
        )
    labels = test.labels.tolist()
    most = max(labels.count(label) for label in set(labels)) / len(labels)
    found["majority_accuracy"] = Metric(value=most, public=True, what="share of the commonest public test label")
    return found


def probabilities(model: "nn.Module", records: "Records") -> "np.ndarray":
    """The model's probability of each class for each record, shape (records, classes), in evaluation mode."""
    import torch

    features, _ = records.tensors()
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            parts = [model(x.to(device)).double().softmax(1).cpu() for x in features.split(4096)]
    finally:
        for module, mode in modes:
            module.training = mode
    return torch.cat(parts).numpy()


def groups_of(dataset: "DataSet", records: "Records") -> dict[str, list[str]]:
    """Subgroups by true label, and by each category column of a table with few values."""
    groups = {"label": [dataset.labels[label] for label in records.labels.tolist()]}
    if len(dataset.labels) > 2 * _MOST_VALUES:
        groups.clear()
    first = 0
    for column in dataset.schema.columns if dataset.schema else ():
        names = getattr(column, "categories", ())
        part = records.features[:, first : first + column.width]
        first += column.width
        if 2 <= len(names) <= _MOST_VALUES and ":" not in column.name:
            # A value that the schema does not list is all zeros.
            known = part.max(axis=1) > 0
            places = part.argmax(axis=1)
            groups[column.name] = [
                names[place] if found else "other" for place, found in zip(places.tolist(), known.tolist(), strict=True)
            ]
    return groups
