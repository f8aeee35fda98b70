"""Where data comes from: the schema, federated datasets in memory and on disk, tables, Adult."""

from fpfl.data.adult import load_adult
from fpfl.data.checks import checked_by_user
from fpfl.data.federated import FederatedDataset, merge_values
from fpfl.data.files import PopulationWriter, open_population, save_population
from fpfl.data.schema import Attribute, Schema, scale_by_ranges
from fpfl.data.table_schema import (
    AttributeColumn,
    CategoryColumn,
    Label,
    NumberColumn,
    TableSchema,
    read_table_schema,
)
from fpfl.data.tables import read_table

__all__ = [
    "Attribute",
    "AttributeColumn",
    "CategoryColumn",
    "FederatedDataset",
    "Label",
    "NumberColumn",
    "PopulationWriter",
    "Schema",
    "TableSchema",
    "checked_by_user",
    "load_adult",
    "merge_values",
    "open_population",
    "read_table",
    "read_table_schema",
    "save_population",
    "scale_by_ranges",
]
