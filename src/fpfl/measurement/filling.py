"""Filling a schema: centres, scales and shares that nobody declared, from a measurement."""

from __future__ import annotations

from dataclasses import replace

from fpfl.data.table_schema import CategoryColumn, MeasuredAt, NumberColumn, TableSchema
from fpfl.measurement.result import MeasuredCategories, MeasuredNumber, Measurement


def filled(schema: TableSchema, measurement: Measurement) -> TableSchema:
    """The schema with what was measured, marked as that; what was given before stays as it is.

    A column whose noise dominates stays without. The centre is the median, the scale the spread, a
    category's share is of the rows that have a value.

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


def _short(value: float) -> float:
    """Six digits: more are noise."""
    return float(f"{value:.6g}")
