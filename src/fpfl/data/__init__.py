"""Where data comes from: the schema, federated datasets, Adult."""

from fpfl.data.adult import load_adult
from fpfl.data.federated import Cohort, FederatedDataset
from fpfl.data.scaling import scale_by_ranges
from fpfl.data.schema import Attribute, Schema

__all__ = ["Attribute", "Cohort", "FederatedDataset", "Schema", "load_adult", "scale_by_ranges"]
