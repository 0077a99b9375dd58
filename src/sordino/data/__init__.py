"""Named real data sets and files (CSV, Parquet, IDX, npz) as records with a declared schema (floor 1, no torch)."""

from sordino.data.loading import load
from sordino.data.records import DataSet, Records
from sordino.data.schema import ArraySchema, Category, Numeric, Schema

__all__ = ["ArraySchema", "Category", "DataSet", "Numeric", "Records", "Schema", "load"]
