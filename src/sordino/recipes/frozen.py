"""What recipes on frozen public models share: packaged weights, kept features, and the private head (floor 6)."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track

from sordino.data import Records
from sordino.errors import DataUnavailable
from sordino.estimators import WhitenedLogisticRegression
from sordino.randomness import Randomness
from sordino.recipes.feature_cache import kept_here
from sordino.recipes.payment import Payment
from sordino.recipes.stages import FittedEstimator, estimator_stage, pay_for
from sordino.recipes.task import Prepared, Task

__all__ = ["Head", "KeptFeatures", "packaged", "whitened_head"]

# Records extracted at a time; changes only how much a cut-off extraction loses.
_BLOCK = 2048

Rows = npt.NDArray[np.float64]


def packaged(modules: Sequence[str], *, recipe: str) -> Path:
    """The folder of the last of these installed modules, which holds public weights.

    Raises:
        DataUnavailable: one is missing; the message names the extra to install.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise DataUnavailable(
            f"recipe {recipe!r} must have its public model installed, got no {', '.join(missing)}. "
            "Install sordino[recipes]."
        )
    spec = find_spec(modules[-1])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class KeptFeatures:
    """Features by a frozen model, computed once for each record, in half precision.

    They are kept in memory within a block of `feature_cache`, and never in this object. With the environment variable
    ``SORDINO_FEATURES`` set to a folder they are kept there too, block by block, so that a long extraction that is cut
    off goes on where it stopped. Only their owner may read the files: features are as private as the records.

    Args:
        extract: records ↦ features [n, d], each record by itself.
        settings: everything that fixes the features: weights, size, layers.
    """

    def __init__(self, extract: Callable[[Records], torch.Tensor], *, settings: str) -> None:
        self.extract, self._settings = extract, settings

    def __call__(self, records: Records, *, progress: bool = False) -> Rows:
        """Features of the records [n, d]; `progress` shows how far an extraction is."""
        keys = _keys(records)
        folder = self._folder()
        kept = kept_here(("rows", self._settings), _Rows)
        kept.read(folder)
        missing = list({key: place for place, key in enumerate(keys) if key not in kept.rows}.values())
        # Without records there is still a width to find.
        starts = range(0, len(missing), _BLOCK) if keys else (0,)
        for start in track(starts, "features", console=Console(stderr=True), disable=not progress or not missing):
            places = missing[start : start + _BLOCK]
            found = self.extract(_part(records, places)).numpy().astype(np.float16)
            if not keys:
                return found.astype(np.float64)
            block = [keys[place] for place in places]
            kept.rows.update(zip(block, found, strict=True))
            if folder is not None:
                kept.write(folder, block, found)
        return np.stack([kept.rows[key] for key in keys]).astype(np.float64)

    def _folder(self) -> Path | None:
        chosen = os.environ.get("SORDINO_FEATURES")
        return None if not chosen else Path(chosen).expanduser() / hashlib.sha256(self._settings.encode()).hexdigest()


class _Rows:
    """Features by the digest of their record, and the files that were read."""

    def __init__(self) -> None:
        self.rows: dict[bytes, npt.NDArray[np.float16]] = {}
        self._seen: set[Path] = set()

    def read(self, folder: Path | None) -> None:
        """Take up what lies in the folder, if there is one."""
        for file in sorted(folder.glob("*.npz")) if folder is not None and folder.is_dir() else ():
            if file not in self._seen:
                with np.load(file, allow_pickle=False) as block:
                    keys, rows = block["keys"], block["rows"]
                self.rows.update((key.tobytes(), row) for key, row in zip(keys, rows, strict=True))
                self._seen.add(file)

    def write(self, folder: Path, keys: Sequence[bytes], rows: npt.NDArray[np.float16]) -> None:
        """Write one block, for its owner alone."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"{keys[0].hex()[:32]}.npz"
        partial = file.with_suffix(f".{os.getpid()}.part")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            np.savez(stream, keys=np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1), rows=rows)
        partial.replace(file)
        self._seen.add(file)


def _keys(records: Records) -> list[bytes]:
    if records.texts is not None:
        return [hashlib.sha256(text.encode(errors="surrogatepass")).digest() for text in records.texts]
    return [hashlib.sha256(np.ascontiguousarray(row).data).digest() for row in records.features]


def _part(records: Records, places: Sequence[int]) -> Records:
    texts = None if records.texts is None else tuple(records.texts[place] for place in places)
    return Records(records.features[places], records.labels[places], texts)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Constants of `WhitenedLogisticRegression`; those given here were chosen on scattering features of Fashion-MNIST.

    Args:
        covariance_share: share of the budget for the second moments.
        ridge: in units of the noise's largest eigenvalue.
        steps: of gradient descent.
        max_grad_norm: clipping norm.
        intercept_scaling: the constant beside each row.
        learning_rate: its rate; None lets the plan decide.
    """

    covariance_share: float = 0.2
    ridge: float = 0.5
    steps: int = 80
    max_grad_norm: float = 0.25
    intercept_scaling: float = 0.1
    learning_rate: float | None = None

    def estimator(self, task: Task, randomness: Randomness | None = None) -> WhitenedLogisticRegression:
        """The estimator for a task; a chosen seed is passed on."""
        seeded = randomness is not None and randomness.reproducible
        return WhitenedLogisticRegression(
            epsilon=task.target,
            delta=task.delta,
            classes=range(task.classes),
            population=task.population,
            covariance_share=self.covariance_share,
            ridge=self.ridge,
            steps=self.steps,
            max_grad_norm=self.max_grad_norm,
            intercept_scaling=self.intercept_scaling,
            learning_rate=self.learning_rate,
            random_state=randomness.seed if randomness is not None and seeded else None,
            reproducible=seeded,
        )


def whitened_head(
    task: Task, head: Head, *, columns: int, rows: Callable[[], KeptFeatures | Callable[[Records], Rows]], model: str
) -> Prepared:
    """A pipeline's stages for a private head on features of `columns` numbers.

    Args:
        task: public facts and the budget.
        head: constants.
        columns: features of a record.
        rows: loads the public model, and gives the map from records to features; called before anything is charged.
        model: words for the report.
    """
    stage = estimator_stage(head.estimator(task), columns, name="whitened regression")

    def fit(records: Records, payment: Payment) -> FittedEstimator:
        features = rows()
        pay_for(stage, payment)
        estimator = head.estimator(task, payment.randomness)
        kept = isinstance(features, KeptFeatures)
        estimator.fit(features(records, progress=payment.progress) if kept else features(records), records.labels)
        return FittedEstimator(estimator=estimator, rows=features)

    return Prepared(
        stages=(stage,),
        fit=fit,
        training={
            "model": model,
            "optimizer": "SGD, momentum 0.9, full batches",
            "learning_rate": head.learning_rate or "derived from the plan",
        },
    )
