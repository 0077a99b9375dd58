"""Named real data sets and files (CSV, Parquet, IDX, npz) as records with a declared schema (floor 1, no torch)."""

from sordino.data.fetch import get
from sordino.data.listing import DataInfo, Description, available, show
from sordino.data.loading import load
from sordino.data.mapped import MappedArrays, mapped_table
from sordino.data.records import DataSet, Records
from sordino.data.schema import ArraySchema, Category, Numeric, Schema
from sordino.data.text import hashed_features

__all__ = [
    "ArraySchema",
    "Category",
    "DataInfo",
    "DataSet",
    "Description",
    "MappedArrays",
    "Numeric",
    "Records",
    "Schema",
    "available",
    "get",
    "hashed_features",
    "load",
    "mapped_table",
    "show",
]
