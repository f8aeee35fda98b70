"""Where data comes from: the schema, federated datasets in memory and on disk, Adult."""

from fpfl.data.adult import load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.data.files import PopulationWriter, open_population, save_population
from fpfl.data.merging import merge_values
from fpfl.data.scaling import scale_by_ranges
from fpfl.data.schema import Attribute, Schema

__all__ = [
    "Attribute",
    "FederatedDataset",
    "PopulationWriter",
    "Schema",
    "load_adult",
    "merge_values",
    "open_population",
    "save_population",
    "scale_by_ranges",
]
