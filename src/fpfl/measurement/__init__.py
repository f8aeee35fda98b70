"""Private statistics of a population: histograms, counts and what follows, released once."""

from fpfl.measurement.cells import CategoryCells, NumberCells
from fpfl.measurement.filling import check_fillable, filled
from fpfl.measurement.measuring import measure, measured
from fpfl.measurement.people import People, people_of_dataset, people_of_table
from fpfl.measurement.plan import MeasurementPlan, plan_measurement
from fpfl.measurement.result import MeasuredCategories, MeasuredNumber, Measurement

__all__ = [
    "CategoryCells",
    "MeasuredCategories",
    "MeasuredNumber",
    "Measurement",
    "MeasurementPlan",
    "NumberCells",
    "People",
    "check_fillable",
    "filled",
    "measure",
    "measured",
    "people_of_dataset",
    "people_of_table",
    "plan_measurement",
]
