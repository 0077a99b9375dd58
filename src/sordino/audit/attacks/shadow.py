"""Shadow models (floor 4): learn from models of one's own what the confidences of members look like."""

from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.linear_model import LogisticRegression

from sordino.errors import InvalidArgument

__all__ = ["shadow_scores"]

Floats = NDArray[np.float64]

_LEAST = 1e-12
_FEWEST = 10


def shadow_scores(
    probabilities: ArrayLike, labels: ArrayLike, shadow_probabilities: ArrayLike, included: ArrayLike
) -> Floats:
    """Scores of one attack model per class, trained on the shadow models' confidence vectors. A baseline.

    Args:
        probabilities: of the attacked model, (records, classes).
        labels: (records,), indices of classes.
        shadow_probabilities: of the shadow models on the same records, (models, records, classes).
        included: whether each shadow model saw each record, (models, records).

    Returns:
        Log odds of being a member, (records,).

    References:
        Shokri, Stronati, Song, Shmatikov 2017, "Membership inference attacks against machine learning models".
    """
    own, shadows = np.asarray(probabilities, dtype=np.float64), np.asarray(shadow_probabilities, dtype=np.float64)
    right, seen = np.asarray(labels), cast("NDArray[np.bool_]", np.asarray(included, dtype=bool))
    if shadows.shape[1:] != own.shape or seen.shape != shadows.shape[:2] or right.shape != own.shape[:1]:
        raise InvalidArgument(
            "probabilities and shadow_probabilities must have shapes (records, classes) and (models, records, "
            f"classes), got {own.shape} and {shadows.shape}. Put the models first."
        )
    scores = np.zeros(len(own))
    for label in np.unique(right):
        mine = right == label
        members = seen[:, mine].ravel()
        # A class that is nearly always, or nearly never, in the shadow models teaches nothing: its score stays 0.
        if min(members.sum(), (~members).sum()) < _FEWEST:
            continue
        known = _features(shadows[:, mine].reshape(-1, own.shape[1]), label)
        learner = LogisticRegression(max_iter=200).fit(known, members)
        scores[mine] = learner.decision_function(_features(own[mine], label))
    return scores


def _features(probabilities: Floats, label: int) -> Floats:
    """Log confidences, and the log odds of the record's own class."""
    clipped = np.clip(probabilities, _LEAST, 1.0)
    own = clipped[:, label]
    return np.column_stack([np.log(clipped), np.log(own) - np.log(np.maximum(1 - own, _LEAST))])
