"""A run's model as an ONNX file: linear models, boosting, forests, naive Bayes, modules made of common layers.

The graph takes encoded features (`SavedModel.encode`) and gives what `predict` and `predict_proba` give. Estimators
compute in double precision, as they do in Python; modules in single precision, as torch does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn

from sordino import estimators
from sordino.data import Records
from sordino.errors import DataUnavailable, InvalidArgument, SordinoError
from sordino.estimators.base import PrivateEstimator, require_declared
from sordino.estimators.hist_gradient_boosting import Feature
from sordino.estimators.neural import RowNorm
from sordino.mechanisms.base import checked_bounds
from sordino.randomness import KeyedRNG
from sordino.recipes.models import Centered, UnitNorm
from sordino.recipes.saved_model import SavedModel
from sordino.recipes.stages import FittedModule
from sordino.recipes.tabular import FittedTable

# Versions that every onnxruntime of the last years reads.
_OPSET, _IR = 18, 9
_ROWS = 256


def _onnx(name: str) -> Any:
    """A name of the optional package onnx."""
    return getattr(import_module("onnx"), name)


class _Graph:
    """Nodes and constants of a graph under construction; values go by name."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """One node with one output, whose name is returned."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(_onnx("helper").make_node(kind, list(inputs), [name], **attributes))
        return name

    def const(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.float64) -> str:
        """A constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(_onnx("numpy_helper").from_array(np.array(values, dtype=dtype), name))
        return name

    def whole(self, *values: int) -> str:
        """A vector of whole numbers: axes and shapes."""
        return self.const(values, np.int64)

    def cast(self, value: str, kind: str) -> str:
        """The value in another type of numbers: DOUBLE, FLOAT or INT64."""
        return self.op("Cast", value, to=getattr(_onnx("TensorProto"), kind))

    def unit_rows(self, x: str, norm: float, dtype: npt.DTypeLike) -> str:
        """Rows scaled to one norm, each by itself; zero stays zero."""
        length = self.op("ReduceL2", x, self.whole(1), keepdims=1)
        least = self.op("Max", length, self.const(1e-12, dtype))
        return self.op("Mul", x, self.op("Div", self.const(norm, dtype), least))


def _require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise DataUnavailable(
            f"export must have the packages onnx and onnxruntime, got no {', '.join(missing)}. Install sordino[onnx]."
        )


def export_onnx(model: SavedModel, path: str | Path) -> tuple[str, ...]:
    """Write the model as an ONNX file, and compare it with the model by onnxruntime.

    Guarantee: that of the model: nothing but what the run folder holds goes in.

    Args:
        model: from `load_model`.
        path: the file.

    Returns:
        Names of the outputs. The input is ``features`` [records, …], float32; the outputs are ``prediction`` [records]
        for a number; ``label`` [records] and ``probabilities`` [records, labels], or ``scores`` where the method has no
        probabilities, for labels. Schema, features, labels and guarantee are in the metadata.

    Raises:
        DataUnavailable: onnx or onnxruntime is not installed.
        InvalidArgument: the model has a part without a rule; the message names it and another way.
    """
    _require_onnx()
    made = _model(model)
    path = Path(path)
    path.write_bytes(made.SerializeToString())
    rows = _synthetic(model)
    difference = onnx_difference(model, path, rows)
    if not difference <= (1e-9 if _is_double(model) else 1e-3):
        path.unlink()
        raise SordinoError(
            f"the ONNX file must predict as the model does, got a difference of {difference:.3g} on synthetic records. "
            "Please report this."
        )
    return tuple(output.name for output in made.graph.output)


def _is_double(model: SavedModel) -> bool:
    return model.module is None


def _synthetic(model: SavedModel) -> Records:
    """Features in the declared range, made of random numbers."""
    size = int(np.prod(model.shape))
    stream = KeyedRNG(seed=0, reproducible=True).new_stream("onnx-check")
    values = np.asarray(stream.uniform(_ROWS * size)).reshape(_ROWS, *model.shape)
    low = -1.0 if model.schema is not None else 0.0
    features = (low + (1 - low) * values).astype(np.float32)
    # Categories are zeros and ones.
    for group in model.schema.one_hot if model.schema is not None else ():
        part = features[:, list(group)]
        features[:, list(group)] = (part == part.max(axis=1, keepdims=True)) & (part > -0.5)
    return Records(features=features, labels=np.zeros(_ROWS, dtype=np.int64))


def onnx_difference(model: SavedModel, path: str | Path, records: Records) -> float:
    """The largest difference between what an ONNX file and the model give for these records.

    Of numbers, relative to the largest; of labels, probabilities or scores; ∞ if a clear label differs.
    """
    onnxruntime = cast("Any", import_module("onnxruntime"))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"features": records.features}), strict=True))
    if model.is_regressor:
        wanted = model.predict_encoded(records).astype(np.float64)
        scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        return float(np.abs(np.asarray(found["prediction"]) - wanted).max(initial=0.0) / scale)
    chances = model.probabilities(records)
    wanted = model.scores(records) if chances is None else chances
    given = np.asarray(found["scores" if chances is None else "probabilities"], dtype=np.float64)
    difference = float(np.abs(given - wanted).max(initial=0.0))
    ordered = np.sort(wanted, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 1e-4
    labels = model.classes_[model.predict_encoded(records).astype(np.int64)]
    same = np.asarray(found["label"])[clear] == labels[clear]
    return difference if bool(same.all()) else float("inf")


def _model(model: SavedModel) -> Any:
    helper, kinds = _onnx("helper"), _onnx("TensorProto")
    graph = _Graph()
    outputs = _outputs(graph, model)
    for name, (value, _, _) in outputs.items():
        graph.nodes.append(helper.make_node("Identity", [value], [name]))
    built = helper.make_graph(
        graph.nodes,
        "sordino",
        [helper.make_tensor_value_info("features", kinds.FLOAT, ["records", *model.shape])],
        [helper.make_tensor_value_info(name, kind, shape) for name, (_, kind, shape) in outputs.items()],
        graph.constants,
    )
    made = helper.make_model(built, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="sordino")
    made.ir_version = _IR
    facts = {
        "target": model.target,
        "labels": json.dumps(list(model.labels), ensure_ascii=False),
        "features": json.dumps(list(model.feature_names), ensure_ascii=False),
        "schema": "" if model.schema is None else model.schema.to_json(),
        "guarantee": "" if model.guarantee is None else model.guarantee.describe(),
    }
    helper.set_model_props(made, facts)
    _onnx("checker").check_model(made)
    return made


def _outputs(graph: _Graph, model: SavedModel) -> dict[str, tuple[str, int, list[object]]]:
    """Name ↦ (value, type, shape) of every output."""
    kinds = _onnx("TensorProto")
    kind = kinds.DOUBLE if _is_double(model) else kinds.FLOAT
    if isinstance(model.fitted, FittedTable):
        scores, probabilities = _estimator(graph, model.fitted, scaled=model.schema is None)
    elif isinstance(model.fitted, FittedModule) and model.fitted.inputs is None:
        scores = _module(graph, model.fitted.module, "features")
        probabilities = graph.op("Softmax", scores, axis=1)
    else:
        raise InvalidArgument(
            "run must be of an estimator or a module that takes the features as they are, got a recipe that prepares "
            "records outside of its module. Use sordino.load_model in Python."
        )
    if model.is_regressor:
        flat = graph.op("Reshape", scores, graph.whole(-1))
        if isinstance(model.estimator, estimators.DPRegressor):
            kind = kinds.DOUBLE
        return {"prediction": (flat, kind, ["records"])}
    labels = model.classes_
    is_text = labels.dtype.kind == "O"
    position = graph.op("ArgMax", scores, axis=1, keepdims=0)
    listed = graph.const(labels, object if is_text else np.int64)
    label = graph.op("Gather", listed, position, axis=0)
    name = "scores" if probabilities is None else "probabilities"
    return {
        "label": (label, kinds.STRING if is_text else kinds.INT64, ["records"]),
        name: (scores if probabilities is None else probabilities, kind, ["records", len(labels)]),
    }


def _estimator(graph: _Graph, fitted: FittedTable, *, scaled: bool) -> tuple[str, str | None]:
    """Scores [n, K], or [n, 1] of a number, and probabilities [n, K] where there are any."""
    estimator = fitted.estimator
    x = graph.op("Flatten", "features", axis=1)
    if isinstance(estimator, estimators.DPClassifier | estimators.DPRegressor):
        if scaled:
            x = graph.cast(graph.unit_rows(graph.cast(x, "DOUBLE"), 1.0, np.float64), "FLOAT")
        scores = _module(graph, estimator.module_, x)
        if isinstance(estimator, estimators.DPClassifier):
            return scores, graph.op("Softmax", scores, axis=1)
        center, half = estimator.scale
        wide = graph.op("Mul", graph.cast(scores, "DOUBLE"), graph.const(half))
        return graph.op("Add", wide, graph.const(center)), None
    x = graph.cast(x, "DOUBLE")
    if scaled:
        x = graph.unit_rows(x, 1.0, np.float64)
    if isinstance(estimator, estimators.GaussianNB):
        joint = _gaussian(graph, estimator, x)
        return joint, graph.op("Softmax", joint, axis=1)
    if isinstance(estimator, estimators.HistGradientBoostingClassifier | estimators.HistGradientBoostingRegressor):
        scores = _boosting(graph, estimator, x)
    elif isinstance(estimator, estimators.RandomForestClassifier | estimators.RandomForestRegressor):
        scores = _forest(graph, estimator, x)
    else:
        scores = _linear(graph, estimator, x)
    if (
        isinstance(
            estimator,
            estimators.HistGradientBoostingRegressor | estimators.RandomForestRegressor | estimators.LinearRegression,
        )
        and not fitted.signs
    ):
        return scores, None
    return _classes(graph, scores, _width(estimator), probable=not fitted.signs and hasattr(estimator, "predict_proba"))


def _width(estimator: PrivateEstimator) -> int:
    """Number of scores of a record: 1 for two classes."""
    learned = estimator.learned_arrays()
    for name in ("curves_", "values_"):  # of boosting and of forests
        if name in learned:
            return int(learned[name].shape[-1])
    return int(np.atleast_2d(learned["coef_"]).shape[0])


def _classes(graph: _Graph, scores: str, width: int, *, probable: bool) -> tuple[str, str | None]:
    """Scores and probabilities of all classes, from those of the second one or of all."""
    if width > 1:
        return scores, graph.op("Softmax", scores, axis=1) if probable else None
    both = graph.op("Concat", graph.op("Neg", scores), scores, axis=1)
    return both, graph.op("Sigmoid", both) if probable else None


def _linear(graph: _Graph, estimator: PrivateEstimator, x: str) -> str:
    learned = estimator.learned_arrays()
    weights = np.atleast_2d(learned["coef_"]).T
    return graph.op(
        "Add", graph.op("MatMul", x, graph.const(weights)), graph.const(np.atleast_1d(learned["intercept_"]))
    )


def _gaussian(graph: _Graph, estimator: estimators.GaussianNB, x: str) -> str:
    """Log prior − Σ ((x − mean)² / variance + log 2πvariance) / 2, for each class; log shares of one-hot groups."""
    columns = estimator.theta_.shape[1]
    groups = estimator.one_hot_groups(columns)
    numbers = np.setdiff1d(np.arange(columns), [column for group in groups for column in group.columns])
    means, variances = estimator.theta_[:, numbers], estimator.var_[:, numbers]
    part = graph.op("Gather", x, graph.whole(*numbers.tolist()), axis=1)
    apart = graph.op("Sub", graph.op("Unsqueeze", part, graph.whole(1)), graph.const(means))
    terms = graph.op("Div", graph.op("Mul", apart, apart), graph.const(variances))
    terms = graph.op("Add", terms, graph.const(np.log(2 * np.pi * variances)))
    half = graph.op("Mul", graph.op("ReduceSum", terms, graph.whole(2), keepdims=0), graph.const(0.5))
    joint = graph.op("Sub", graph.const(np.log(estimator.class_prior_)), half)
    for group in groups:
        table = estimator.log_shares(group).T
        bins = _bin(graph, group, x, none=group.bins)  # a last row of zeros for an undeclared category
        joint = graph.op("Add", joint, graph.op("Gather", graph.const(np.vstack([table, 0 * table[:1]])), bins, axis=0))
    return joint


def _bin(graph: _Graph, feature: Feature, x: str, *, none: int) -> str:
    """The bin of each record in one feature [n]; `none` for a category that is not declared."""
    part = graph.op("Gather", x, graph.whole(*feature.columns), axis=1)
    if feature.edges is not None:
        beyond = graph.op("GreaterOrEqual", part, graph.const([feature.edges[1:-1]]))
        return graph.op("ReduceSum", graph.cast(beyond, "INT64"), graph.whole(1), keepdims=0)
    if feature.values is not None:
        part = graph.cast(graph.op("Equal", part, graph.const([feature.values])), "DOUBLE")
    # The largest entry, if it is above 0.
    index = graph.op("ArgMax", part, axis=1, keepdims=0)
    is_set = graph.op("Greater", graph.op("ReduceMax", part, graph.whole(1), keepdims=0), graph.const(0.0))
    return graph.op("Where", is_set, index, graph.const(none, np.int64))


def _boosting(
    graph: _Graph,
    estimator: estimators.HistGradientBoostingClassifier | estimators.HistGradientBoostingRegressor,
    x: str,
) -> str:
    """The sum of one curve a feature, each looked up in its bin."""
    total, start = graph.const(estimator.intercept_), 0
    for feature in estimator.features_:
        curve = estimator.curves_[start : start + feature.bins]
        start += feature.bins
        # A last row of zeros for an undeclared category.
        bins = _bin(graph, feature, x, none=feature.bins)
        total = graph.op("Add", total, graph.op("Gather", graph.const(np.vstack([curve, 0 * curve[:1]])), bins, axis=0))
    return total


def _forest(
    graph: _Graph, estimator: estimators.RandomForestClassifier | estimators.RandomForestRegressor, x: str
) -> str:
    """The sum of the values of one leaf a tree, all trees going down one level at a time."""
    trees, nodes, columns = estimator.goes_right_.shape
    leaves, outputs = estimator.values_.shape[1:]
    bins = [
        graph.op("Unsqueeze", _bin(graph, feature, x, none=columns - 1), graph.whole(1))
        for feature in estimator.features_
    ]
    everywhere = graph.op("Concat", *bins, axis=1)
    features = graph.const(estimator.split_features_.ravel(), np.int64)
    right = graph.const(estimator.goes_right_.ravel(), np.bool_)
    first = graph.const([np.arange(trees) * nodes], np.int64)
    zeros = graph.op("Mul", graph.op("Gather", everywhere, graph.whole(0), axis=1), graph.whole(0))
    node = graph.op("Add", zeros, graph.const(np.zeros((1, trees)), np.int64))
    for _ in range((nodes + 1).bit_length() - 1):
        index = graph.op("Add", node, first)
        bin_there = graph.op("GatherElements", everywhere, graph.op("Gather", features, index), axis=1)
        cell = graph.op("Add", graph.op("Mul", index, graph.whole(columns)), bin_there)
        step = graph.op("Add", graph.cast(graph.op("Gather", right, cell), "INT64"), graph.whole(1))
        node = graph.op("Add", graph.op("Mul", node, graph.whole(2)), step)
    leaf = graph.op("Add", node, graph.const([np.arange(trees) * leaves - nodes], np.int64))
    found = graph.op("Gather", graph.const(estimator.values_.reshape(-1, outputs)), leaf, axis=0)
    total = graph.op("Add", graph.op("ReduceSum", found, graph.whole(1), keepdims=0), graph.const(estimator.intercept_))
    if isinstance(estimator, estimators.RandomForestRegressor):
        low, high = checked_bounds(require_declared(estimator.target_bounds, name="target_bounds", meaning="its range"))
        return graph.op("Min", graph.op("Max", total, graph.const(low)), graph.const(high))
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Modules, layer by layer.
# ----------------------------------------------------------------------------------------------------------------------


def _module(graph: _Graph, module: nn.Module, x: str) -> str:
    if isinstance(module, nn.Sequential):
        for part in module:
            x = _module(graph, part, x)
        return x
    rule = _RULES.get(type(module))
    if rule is None:
        raise InvalidArgument(
            f"module must be made of {', '.join(kind.__name__ for kind in _RULES)} in an nn.Sequential, got "
            f"{type(module).__name__}. Export it by torch itself: "
            "torch.onnx.export(sordino.load_model(RUN).module, (example,), 'model.onnx')."
        )
    return rule(graph, cast("Any", module), x)


def _weights(module: nn.Module) -> Mapping[str, npt.NDArray[np.float32]]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def _dense(graph: _Graph, module: nn.Linear, x: str) -> str:
    learned = _weights(module)
    found = graph.op("MatMul", x, graph.const(learned["weight"].T, np.float32))
    return found if module.bias is None else graph.op("Add", found, graph.const(learned["bias"], np.float32))


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _convolution(graph: _Graph, module: nn.Conv2d, x: str) -> str:
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise InvalidArgument("Conv2d must have numbers as its padding with zeros, got another. Set padding=N.")
    learned = _weights(module)
    inputs = [x, graph.const(learned["weight"], np.float32)]
    if module.bias is not None:
        inputs.append(graph.const(learned["bias"], np.float32))
    return graph.op(
        "Conv",
        *inputs,
        kernel_shape=list(module.kernel_size),
        strides=list(module.stride),
        pads=_pair(cast("Sequence[int]", module.padding)) * 2,
        dilations=list(module.dilation),
        group=module.groups,
    )


def _pool(graph: _Graph, module: nn.MaxPool2d, x: str) -> str:
    if module.ceil_mode:
        raise InvalidArgument("MaxPool2d must round sizes down, got ceil_mode=True. Export it by torch.onnx.export.")
    size = _pair(cast("int", module.kernel_size))
    strides = _pair(cast("int", module.stride if module.stride is not None else module.kernel_size))
    return graph.op(
        "MaxPool",
        x,
        kernel_shape=size,
        strides=strides,
        pads=_pair(cast("int", module.padding)) * 2,
        dilations=_pair(cast("int", module.dilation)),
    )


def _flatten(graph: _Graph, module: nn.Flatten, x: str) -> str:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise InvalidArgument("Flatten must be of all but the first dimension, got another. Use nn.Flatten().")
    return graph.op("Flatten", x, axis=1)


def _centered(graph: _Graph, _: Centered, x: str) -> str:
    return graph.op("Sub", graph.op("Mul", x, graph.const(2.0, np.float32)), graph.const(1.0, np.float32))


_RULES: dict[type[nn.Module], Callable[[_Graph, Any, str], str]] = {
    nn.Linear: _dense,
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _pool,
    nn.Flatten: _flatten,
    nn.ReLU: lambda graph, _, x: graph.op("Relu", x),
    nn.Tanh: lambda graph, _, x: graph.op("Tanh", x),
    nn.Sigmoid: lambda graph, _, x: graph.op("Sigmoid", x),
    nn.ELU: lambda graph, module, x: graph.op("Elu", x, alpha=float(module.alpha)),
    nn.Identity: lambda graph, _, x: graph.op("Identity", x),
    nn.Dropout: lambda graph, _, x: graph.op("Identity", x),
    UnitNorm: lambda graph, module, x: graph.unit_rows(x, module.norm, np.float32),
    RowNorm: lambda graph, _, x: graph.unit_rows(x, 2.0, np.float32),
    Centered: _centered,
}
