"""Filling a schema: centres, scales and shares that nobody declared, from a measurement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fpfl.data.inputs import KNOTS
from fpfl.data.table_schema import CategoryColumn, MeasuredAt, NumberColumn, TableSchema
from fpfl.measurement.result import MeasuredCategories, MeasuredNumber, Measurement


def filled(schema: TableSchema, measurement: Measurement) -> TableSchema:
    """The schema with what was measured, marked as that; what was given before stays as it is.

    A column whose noise dominates stays without. The centre is the median, the scale the spread, a
    category's share is of the rows that have a value. A number that becomes its rank has quantiles
    in place of centre and scale: as many as `KNOTS`, each the middle of its bin.

    Parameters
    ----------
    schema
        Of the table.
    measurement
        Of its columns.
    """
    check_fillable(schema)
    known = {each.name: each for each in measurement.columns}
    features = tuple(_filled(each, known.get(each.name)) for each in schema.features)
    if features == schema.features:
        return schema
    cost = MeasuredAt(
        measurement.epsilon, measurement.delta, measurement.neighbours, measurement.seeded
    )
    return replace(schema, features=features, measured=cost)


def check_fillable(schema: TableSchema) -> None:
    """Refuse a schema that says the price of an earlier measurement."""
    if schema.measured is not None:
        raise ValueError(
            f"the schema holds figures of a measurement already (ε = {schema.measured.epsilon:g}); "
            "fill one without [measured] and without what that measured: the file says one price"
        )


def _filled(
    feature: NumberColumn | CategoryColumn, found: MeasuredNumber | MeasuredCategories | None
) -> NumberColumn | CategoryColumn:
    if found is None or feature.given:
        return feature
    if isinstance(feature, NumberColumn) and isinstance(found, MeasuredNumber):
        low, high = feature.range
        centre, scale = found.median.value, found.spread
        if centre != centre or scale != scale:  # NaN: noise dominates
            return feature
        if feature.transform == "quantile":
            at = [_short(min(max(each, low), high)) for each in _quantiles(found)]
            # All people in one bin: nothing that a range does not say.
            given = tuple(at) if at[0] < at[-1] else None
            return replace(feature, quantiles=given, measured=given is not None)
        # Of a measurement over another range than the schema's.
        centre, scale = min(max(centre, low), high), min(scale, high - low)
        return replace(feature, centre=_short(centre), scale=_short(scale), measured=True)
    if isinstance(feature, CategoryColumn) and isinstance(found, MeasuredCategories):
        shares = [share.value for share in found.shares.values()]
        if any(share != share for share in shares):
            return feature
        # Each was clipped to [0, 1] by itself.
        total = max(sum(shares), 1e-12)
        own = tuple(int(1e6 * share / total) / 1e6 for share in shares[: len(feature.values)])
        return replace(feature, shares=own, measured=True)
    return feature


def _quantiles(found: MeasuredNumber) -> list[float]:
    """At even shares; a bin with many people is named several times, as common values are."""
    edges, shares = found.cells.edges, np.linspace(0.0, 1.0, KNOTS)
    bins = np.searchsorted(found.distribution[1:], shares).clip(max=len(edges) - 2)
    middles: list[float] = ((edges[:-1] + edges[1:]) / 2)[bins].tolist()
    return middles


def _short(value: float) -> float:
    """Six digits: more are noise."""
    return float(f"{value:.6g}")
