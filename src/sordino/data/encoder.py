"""`SchemaEncoder`: a declared schema as a transformer of scikit-learn."""

import numpy as np

from sordino.data.frames import frame_columns
from sordino.data.schema import Schema
from sordino.data.tables import encode_features
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import Event
from sordino.installation import require
from sordino.shapes import Float32

try:
    from sklearn.base import BaseEstimator, TransformerMixin
    from sklearn.utils.validation import check_is_fitted
except ImportError:
    require("estimators", "sklearn", user="SchemaEncoder")
    raise


class SchemaEncoder(TransformerMixin, BaseEstimator):
    """Tables as features, by a declared schema: the columns that `Schema.encode` and the commands make, bit for bit.

    Every row stays in its place, whatever its label. The features of a row have norm at most ``schema.data_norm`` and
    lie in [-1, 1]; declare that for the estimator behind it.

    Guarantee: `fit` reads the names of the columns and no record: ε = 0. `transform` changes each record by itself.

    Args:
        schema: The declared schema. Required.

    Attributes:
        n_features_in_: number of declared columns.
        feature_names_in_: their names.
        guarantee_: ε = 0.
        events_: empty.

    Raises:
        InvalidArgument: X is no DataFrame or Arrow table, lacks a declared column, or one's type can't hold it.

    Example:
        >>> import pyarrow as pa
        >>> from sordino.data import CategoricalColumn, NumericColumn
        >>> age, job = NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("a", "b"))
        >>> encoder = SchemaEncoder(Schema(columns=(age, job), target="income", labels=("low", "high")))
        >>> encoder.fit_transform(pa.table({"job": ["b", None], "age": [25, None]})).tolist()
        [[-0.5, 0.0, 1.0], [0.0, 0.0, 0.0]]
        >>> encoder.get_feature_names_out().tolist()
        ['age', 'job=a', 'job=b']
    """

    def __init__(self, schema: Schema | None = None) -> None:
        self.schema = schema

    def fit(self, X: object, y: object = None) -> "SchemaEncoder":  # noqa: ARG002 (scikit-learn's signature)
        """Check that X is a table with the declared columns; nothing is learned."""
        schema = self._declared()
        frame_columns(X, schema, with_target=False)
        names = [column.name for column in schema.columns]
        self.feature_names_in_ = np.array(names, dtype=object)
        self.n_features_in_ = len(names)
        self.events_: tuple[Event, ...] = ()
        self.guarantee_ = Guarantee(epsilon=0.0, delta=0.0, accountant="exact", sampler="none")
        return self

    def transform(self, X: object) -> Float32[np.ndarray, "n w"]:
        """Features [n, schema.width()] of a table with the declared columns; other columns are not read."""
        check_is_fitted(self)
        schema = self._declared()
        return encode_features(frame_columns(X, schema, with_target=False), schema)

    def get_feature_names_out(self, input_features: object = None) -> np.ndarray:  # noqa: ARG002 (scikit-learn's)
        """Names of the features."""
        return np.array(self._declared().feature_names, dtype=object)

    def _declared(self) -> Schema:
        if self.schema is None:
            raise MissingDeclaration("schema must be declared, got None. Give the Schema of the table.")
        if not isinstance(self.schema, Schema):
            raise InvalidArgument(
                f"schema must be a Schema, got {type(self.schema).__name__}. Read it with read_schema."
            )
        return self.schema
