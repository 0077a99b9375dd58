"""Named real datasets and files (CSV, Parquet, Feather, IDX, npz) as records with a declared schema."""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.data.arrays import MappedArrays, mapped_table
    from sordino.data.catalog import download_dataset
    from sordino.data.encoder import SchemaEncoder
    from sordino.data.loading import DatasetDescription, DatasetInfo, describe_dataset, list_datasets, load_dataset
    from sordino.data.readers import hashed_features
    from sordino.data.schema import (
        ArraySchema,
        BooleanColumn,
        CategoricalColumn,
        DatasetSplits,
        DateColumn,
        NumericColumn,
        OrdinalColumn,
        Records,
        Schema,
        TableColumn,
        TableFormat,
    )

__all__ = [
    "ArraySchema",
    "BooleanColumn",
    "CategoricalColumn",
    "DatasetDescription",
    "DatasetInfo",
    "DatasetSplits",
    "DateColumn",
    "MappedArrays",
    "NumericColumn",
    "OrdinalColumn",
    "Records",
    "Schema",
    "SchemaEncoder",
    "TableColumn",
    "TableFormat",
    "describe_dataset",
    "download_dataset",
    "hashed_features",
    "list_datasets",
    "load_dataset",
    "mapped_table",
]

__getattr__, __dir__ = lazy_names(__name__)
