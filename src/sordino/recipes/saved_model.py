"""A run's model, ready to predict: put together again from its run folder.

`model.json` says what `model.safetensors` is: kind of model, declared schema, classes. Nothing in a run folder is run
or unpickled: numbers come from safetensors, facts from JSON, and the class of a model is looked up in a fixed list by
name. A module of the user's own is therefore given again, by the one who trusts its code.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from torch import Tensor, nn

from sordino import estimators
from sordino.data import ArraySchema, DatasetSplits, Records, Schema
from sordino.data.arrays import to_images
from sordino.data.frames import frame_columns, text_column
from sordino.data.readers import hashed_features
from sordino.data.tables import encode_features, positions
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, SordinoError
from sordino.estimators.base import PrivateEstimator
from sordino.recipes.models import MODELS
from sordino.recipes.recipe import RECIPES, Predictor, RecipeTask, get_recipe
from sordino.recipes.stages import FittedModule, restored_module
from sordino.recipes.tabular import TABULAR_METHODS, FittedTable, flat_rows
from sordino.recipes.training_config import NETWORKS, ModelFactory
from sordino.runs import RunFolder
from sordino.runs.transcript import file_digest


def describe_module(dataset: DatasetSplits, model: str) -> dict[str, object]:
    """`model.json` of a module: its name, or that it is one of the user's own; all of it public facts."""
    return {**dataset.input_facts(), "kind": "module", "model": model if model in MODELS else None, "name": model}


def describe_estimator(dataset: DatasetSplits, fitted: FittedTable) -> dict[str, object]:
    """`model.json` of an estimator: class and parameters, which are public, or part of what a search released.

    Args:
        dataset: with the schema of what is predicted from what.
        fitted: the estimator.
    """
    left_out = {"random_state", "reproducible", "ledger"}
    parameters = {
        name: _plain(value) for name, value in fitted.estimator.get_params(deep=False).items() if name not in left_out
    }
    return {
        **dataset.input_facts(),
        "kind": "estimator",
        "model": type(fitted.estimator).__name__,
        "parameters": parameters,
        "columns": int(fitted.estimator.n_features_in_),
        "signs": fitted.signs,
    }


def _plain(value: object) -> object:
    """A parameter as JSON types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def _parameter(value: object) -> object:
    """What `_plain` was made of: sequences are tuples, keys are numbers of columns."""
    if isinstance(value, Mapping):
        return {int(name): _parameter(part) for name, part in value.items()}
    return tuple(map(_parameter, value)) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """A model of a run folder, with what is needed to use it.

    Guarantee: predictions are computed from the released model and the records that are given alone, so they cost no
    privacy of the training records. They are as private as the records they are made for.

    Args:
        run: the run folder.
        kind: ``module``, ``estimator`` or ``recipe``.
        target: name of what is predicted.
        labels: the declared labels; empty where the target is a number.
        schema: the declared schema of a table, or None.
        array_schema: the declared range of an array's numbers, or None.
        shape: shape of one record's features.
        guarantee: what the run guarantees; None for a run that was cut off.
        fitted: the model itself.
    """

    run: Path
    kind: str
    target: str
    labels: tuple[str, ...]
    schema: Schema | None
    array_schema: ArraySchema | None
    shape: tuple[int, ...]
    guarantee: Guarantee | None
    fitted: FittedTable | Predictor

    @property
    def estimator(self) -> PrivateEstimator | None:
        """The fitted estimator, on encoded features; None for a module. Its classes are indices in `labels`."""
        found = self.fitted if isinstance(self.fitted, FittedTable) else getattr(self.fitted, "estimator", None)
        return found.estimator if isinstance(found, FittedTable) else cast("PrivateEstimator | None", found)

    @property
    def module(self) -> nn.Module | None:
        """The torch module, in evaluation mode; None for an estimator that has none."""
        found = getattr(self.fitted, "module", None) or getattr(self.estimator, "module_", None)
        return found.eval() if isinstance(found, nn.Module) else None

    @property
    def is_regressor(self) -> bool:
        """Whether a number is predicted."""
        return not self.labels

    @property
    def classes_(self) -> npt.NDArray[np.generic]:
        """The labels as `predict` gives them: numbers where all of them are whole numbers, else texts."""
        if all(label.removeprefix("-").isdecimal() and str(int(label)) == label for label in self.labels):
            return np.array([int(label) for label in self.labels], dtype=np.int64)
        return np.array(self.labels, dtype=object)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features; empty for images and texts."""
        return () if self.schema is None else self.schema.feature_names

    def encode(self, X: object) -> Records:
        """Records as the model takes them, each encoded by itself, in the order in which they are given.

        Args:
            X: a DataFrame of pandas or Polars, an Arrow table or a mapping of columns, with the columns that the schema
                declares, in their own units (others are not looked at, and the target may be missing); or encoded
                features [n, …] as `sordino.data.load_dataset` makes them: numbers in [−1, 1] of tables, in [0, 1] of
                images; or whole-number pixels from 0 to 255; or a list of texts, for a model of texts.

        Raises:
            InvalidArgument: a column is missing, or the form is another one.
        """
        if isinstance(X, Records):
            return self._checked(X)
        if self.schema is not None and _is_table(X):
            return self._records(encode_features(frame_columns(X, self.schema, with_target=False), self.schema))
        if isinstance(X, Sequence) and X and all(isinstance(text, str) for text in X) and len(self.shape) == 1:
            texts = tuple(cast("Sequence[str]", X))
            features = hashed_features(texts, width=self.shape[0])
            return Records(features=features, labels=np.zeros(len(texts), dtype=np.int64), texts=texts)
        array = np.asarray(X)
        if array.dtype.kind not in "buif":
            raise InvalidArgument(
                f"X must be a table with named columns, or numbers, got {array.dtype}. {self._form()}"
            )
        if array.dtype == np.uint8 and self.array_schema is not None:
            array = to_images(array, low=self.array_schema.low, high=self.array_schema.high)
        return self._checked(self._records(self._shaped(array)))

    def _shaped(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        if array.ndim == 0 or array.shape[1:] not in {self.shape, (int(np.prod(self.shape)),)}:
            raise InvalidArgument(f"X must have shape {('n', *self.shape)}, got {array.shape}. {self._form()}")
        low, high = (-1.0, 1.0) if self.schema is not None else (0.0, 1.0)
        numbers = array.astype(np.float64)
        # A table in its own units would be predicted without an error, and wrongly.
        is_declared = self.schema is not None or self.array_schema is not None
        if is_declared and not ((numbers >= low - 1e-6) & (numbers <= high + 1e-6)).all():
            raise InvalidArgument(f"X must be encoded features in [{low:g}, {high:g}], got others. {self._form()}")
        return numbers.astype(np.float32).reshape(len(array), *self.shape)

    def _form(self) -> str:
        if self.schema is not None:
            names = ", ".join(column.name for column in self.schema.columns)
            return f"Give a DataFrame with the columns {names} in their own units, or model.encode(frame).features."
        return "Give features as sordino.data.load_dataset makes them."

    def _records(self, features: npt.NDArray[np.float32]) -> Records:
        return Records(features=features, labels=np.zeros(len(features), dtype=np.int64))

    def _checked(self, records: Records) -> Records:
        if records.record_shape != self.shape:
            raise InvalidArgument(
                f"X must have records of shape {self.shape}, got {records.record_shape}. {self._form()}"
            )
        return records

    def predict(self, X: object) -> npt.NDArray[np.generic]:
        """The label of each record [n], one of `classes_`; or the number in the target's unit [n].

        Args:
            X: as in `encode`.
        """
        found = self.predict_encoded(self.encode(X))
        return found if self.is_regressor else self.classes_[found.astype(np.int64)]

    def predict_encoded(self, records: Records) -> npt.NDArray[np.generic]:
        """Indices of the labels [n], or numbers, of encoded records."""
        if isinstance(self.fitted, FittedTable):
            return self.fitted.predict(self.rows(records))
        return self.fitted.logits(records).argmax(axis=1)

    def predict_proba(self, X: object) -> npt.NDArray[np.float64]:
        """Probabilities of the labels [n, K], in the order of `classes_`.

        Args:
            X: as in `encode`.

        Raises:
            InvalidArgument: the target is a number, or the method has no probabilities.
        """
        found = self.probabilities(self.encode(X))
        if found is None:
            why = "predicts a number" if self.is_regressor else "has no probabilities"
            raise InvalidArgument(
                f"model must have probabilities, got a {self.description}, which {why}. Use predict, or train another "
                "model: logistic, objective, boosting."
            )
        return found

    def probabilities(self, records: Records) -> npt.NDArray[np.float64] | None:
        """Probabilities [n, K] of encoded records; None where the model has none."""
        if isinstance(self.fitted, FittedTable):
            return None if self.is_regressor else self.fitted.predict_proba(self.rows(records))
        return softmax(self.fitted.logits(records).astype(np.float64), axis=1)

    def scores(self, records: Records) -> npt.NDArray[np.float64]:
        """Scores of the labels [n, K] of encoded records, larger for likelier ones."""
        if isinstance(self.fitted, FittedTable):
            return self.fitted.scores(self.rows(records))
        return self.fitted.logits(records).astype(np.float64)

    def rows(self, records: Records) -> npt.NDArray[np.float64]:
        """Encoded records as an estimator takes them [n, d]."""
        return flat_rows(records) if self.schema is None else records.features.astype(np.float64)

    @property
    def description(self) -> str:
        """The model in a word or two."""
        return type(self.estimator or self.module or self.fitted).__name__

    def score(self, X: object, y: object) -> float:
        """Share of right labels, or R² of predicted numbers.

        Guarantee: none for the records measured on: they must be public, or the number kept as private as they are.

        Args:
            X: as in `encode`.
            y: the right labels or numbers [n].
        """
        found = self.predict_encoded(self.encode(X))
        if self.is_regressor:
            targets = np.asarray(y, dtype=np.float64)
            return float(1 - np.mean(np.square(found.astype(np.float64) - targets)) / np.var(targets))
        right = positions(text_column(y), self.labels)
        return float(np.mean(found == right))


def _is_table(X: object) -> bool:
    return hasattr(X, "columns") or hasattr(X, "__arrow_c_stream__") or isinstance(X, Mapping)


def load_model(
    run: str | Path | RunFolder, *, module: ModelFactory | nn.Module | None = None, device: str = "cpu"
) -> SavedModel:
    """The model of a run folder, ready to predict.

    The run folder may come from anywhere: numbers are read from safetensors and facts from JSON, nothing is unpickled,
    and no code is imported by a name that stands in it. Run `sordino verify` to see whether the folder is whole.

    Args:
        run: a run of `sordino train` (module, estimator or recipe) or `sordino tune`.
        module: the module, or the function (shape, classes) that makes it, of a run that trained a module of the user's
            own.
        device: where a recipe with a network predicts.

    Raises:
        InvalidArgument: the run holds no model, does not say what it is, or was changed.

    Example:
        >>> load_model("no-such-run")
        Traceback (most recent call last):
        ...
        sordino.errors.InvalidArgument: path must be a run folder, got 'no-such-run', which lacks run.json, plan.json, \
transcript.jsonl. Give a folder that `sordino train` or `sordino demo` made.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    tensors = folder.load_model()
    body = folder.model_description
    if not body:
        raise InvalidArgument(
            f"run must say what its model is, got {str(folder.path)!r} without model.json. Runs of a training loop of "
            "your own have none: load RunFolder.open(run).load_model() into your module."
        )
    _check_vouched(folder)
    try:
        return _restored(folder, body, tensors, module, device)
    except SordinoError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise InvalidArgument(
            "model.json and model.safetensors must be what sordino wrote, got others, or parameters of another module. "
            "Run sordino verify."
        ) from error


def _check_vouched(folder: RunFolder) -> None:
    """Refuse a model that is not the one that the manifest lists."""
    files = folder.manifest.get("files")
    if not isinstance(files, Mapping):
        return
    for name in ("model.json", "model.safetensors"):
        if files.get(name) != file_digest(folder.path / name):
            raise InvalidArgument(f"{name} must be the file that manifest.json lists, got another. Run sordino verify.")


def _restored(
    folder: RunFolder,
    body: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    module: ModelFactory | nn.Module | None,
    device: str,
) -> SavedModel:
    kind, inputs = str(body["kind"]), cast("Mapping[str, object]", body["inputs"])
    table = inputs.get("table")
    schema = None if table is None else Schema.from_json(json.dumps(table))
    array = cast("Mapping[str, float] | None", inputs.get("array"))
    labels = tuple(map(str, cast("list[str]", body.get("labels", []))))
    shape = tuple(int(size) for size in cast("list[int]", body["shape"]))
    if kind != "module" and module is not None:
        raise InvalidArgument(f"module must be left out for a run of kind {kind}, got one. Leave it out.")
    match kind:
        case "module":
            fitted = _module(body, tensors, module, shape, len(labels))
        case "estimator":
            fitted = _estimator(body, tensors)
        case "recipe":
            fitted = _recipe(body, tensors, shape, len(labels), schema, device)
        case _:
            raise ValueError(kind)
    # An estimator carries its guarantee and what was done, as after `fit`.
    estimator = getattr(fitted, "estimator", None)
    if isinstance(estimator, PrivateEstimator) and folder.guarantee is not None:
        estimator.guarantee_ = folder.guarantee
        estimator.events_ = tuple(line.event for line in folder)
    return SavedModel(
        run=folder.path,
        kind=kind,
        target=str(body["target"]),
        labels=labels,
        schema=schema,
        array_schema=None if array is None else ArraySchema(labels=labels, low=array["low"], high=array["high"]),
        shape=shape,
        guarantee=folder.guarantee,
        fitted=fitted,
    )


def _module(
    body: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    module: ModelFactory | nn.Module | None,
    shape: tuple[int, ...],
    classes: int,
) -> FittedModule:
    name = body["model"]
    if name is None and module is None:
        raise InvalidArgument(
            f"module must be given for a run of a module of your own, {str(body['name'])!r}, got none: a run folder "
            "holds no code. Give load_model(run, module=…), or --model module:factory on the command line."
        )
    factory = NETWORKS[str(name)].build if module is None else module
    made = factory if isinstance(factory, nn.Module) else factory(shape, classes)
    return restored_module(made, tensors)


def _estimator(body: Mapping[str, object], tensors: Mapping[str, Tensor]) -> FittedTable:
    known = {
        chosen[0] for method in TABULAR_METHODS.values() for chosen in (method.classifier, method.regressor) if chosen
    }
    name = str(body["model"])
    if name not in known:
        raise InvalidArgument(f"model must be an estimator of `sordino train`, got {name!r}. Update sordino.")
    kind = cast("Callable[..., PrivateEstimator]", getattr(estimators, name))
    parameters = cast("Mapping[str, object]", body["parameters"])
    estimator = kind(**{str(key): _parameter(value) for key, value in parameters.items()})
    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
    estimator.set_learned_arrays(arrays, columns=int(str(body["columns"])))
    return FittedTable(estimator=estimator, signs=body["signs"] is True)


def _recipe(
    body: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    shape: tuple[int, ...],
    classes: int,
    schema: Schema | None,
    device: str,
) -> Predictor:
    facts = cast("Mapping[str, object]", body["recipe"])
    name = str(facts["name"])
    if name not in RECIPES:
        raise InvalidArgument(
            f"recipe must be one of {', '.join(RECIPES)}, got {name!r}. A recipe of your own is restored by its own "
            "PreparedRecipe.restore."
        )
    epsilon, setting = facts["epsilon"], facts["setting"]
    task = RecipeTask(
        data=str(facts["data"]),
        shape=shape,
        classes=classes,
        dataset_size=int(str(facts["dataset_size"])),
        schema=schema,
        epsilon=None if epsilon is None else float(str(epsilon)),
        delta=float(str(facts["delta"])),
        setting=None if setting is None else str(setting),
        device=device,
    )
    restore = get_recipe(name).prepare(task).restore
    if restore is None:
        raise InvalidArgument(f"recipe must be able to restore its model, got {name!r}, which is not. Update sordino.")
    return restore(tensors)
