"""What `measure` found, for programs: one JSON object per score, or one CSV line per value."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparsedepth.quantities import ALL, LAYERS, PAIRS, with_intervals
from sparsedepth.quantities.record import Column

if TYPE_CHECKING:
    from sparsedepth.run.measure_existing_model import MeasuringResult


class Scores:
    """Everything that one measurement found."""

    def __init__(self, measured: "MeasuringResult"):
        self.measured, self.found = measured, measured.measurements

    def objects(self) -> list[dict[str, Any]]:
        """Per score: its definition, its global value with interval, and its rows as a list or a matrix."""
        scores = [
            self._object(column, self._metric(column), value, ends)
            for column, value, ends in with_intervals(self.found.summary)
            if not column.part and column.unit != "token"
        ]
        shown = {score["metric"] for score in scores}
        for rows, known in ((self.found.layers, LAYERS), (self.found.pairs, PAIRS)):
            by_name = {column.name: column for column in known}
            for metric in dict.fromkeys(row["metric"] for row in rows):
                if metric not in shown:
                    shown.add(metric)
                    scores.append(self._object(by_name[metric.partition("@")[0]], metric))
        return scores

    def _metric(self, column: Column) -> str:
        """The rows behind a column of `runs`."""
        quantity = column.quantity
        assert quantity
        at = f"@{getattr(self.measured.config, quantity.threshold)[0]:g}" if quantity.threshold else ""
        return (quantity.rows or quantity.name) + at

    def _object(
        self, column: Column, metric: str, value: Any = None, ends: tuple[Any, Any] | None = None
    ) -> dict[str, Any]:
        """A column of `runs` with its value and interval and the rows behind it, or rows alone."""
        layers, pairs = (
            [row for row in rows if row["metric"] == metric] for rows in (self.found.layers, self.found.pairs)
        )
        error = self.found.summary.get(f"{column.name}_se") if column.view == "runs" else None
        return {
            "name": column.name if column.view == "runs" else metric,
            "definition": column.meaning,
            "source": column.source,
            "unit": column.unit,
            "global": value,
            "interval": list(ends) if ends else None,
            "n_tokens": self._tokens(column, [*layers, *pairs]),
            "metric": metric if layers or pairs else None,
            **({} if error is None else {"standard_error": error}),
            **_by_layer(layers),
            **_by_pair(pairs, self.measured.loaded.facts.n_layers),
        }

    def _tokens(self, column: Column, rows: list[dict[str, Any]]) -> int | None:
        """Tokens behind a value; None where it is read from the weights alone."""
        if column.measure == "weights":
            return None
        if column.measure == "loss":
            tokens = self.found.summary["val_loss_tokens"]
            return None if tokens is None else int(tokens)
        if rows and column.measure != "attention":  # whose rows count attention weights
            return max(row["n"] for row in rows)
        return self.measured.n_tokens

    def values(self) -> list[tuple[Any, ...]]:
        """One row per value: COLUMNS."""
        units = {(column.view, column.name): column.unit for column in ALL}
        rows: list[tuple[Any, ...]] = []
        for column, value, ends in with_intervals(self.found.summary):
            n = self._tokens(column, []) if column.unit != "token" else None
            rows.append((column.name, None, None, None, value, *(ends or (None, None)), n, column.unit))
        for view in ("layers", "heads", "pairs"):
            for row in getattr(self.found, view):
                place = (row["layer"], row.get("other_layer"), row.get("head"))
                unit = units[view, row["metric"].partition("@")[0]]
                rows.append((row["metric"], *place, row["value"], None, None, row["n"], unit))
        return rows


COLUMNS = ("name", "layer", "other_layer", "head", "value", "lo", "hi", "n", "unit")


def to_json(scores: Scores) -> str:
    """A list with one object per score; a missing value is null."""
    return json.dumps(scores.objects(), indent=1, allow_nan=False)


def to_csv(scores: Scores) -> str:
    """A header and one line per value; a missing value is empty."""
    from sparsedepth.store.query_result import QueryResult
    from sparsedepth.store.render import to_csv as render

    return render(QueryResult(columns=COLUMNS, rows=tuple(scores.values())))


FORMATS: dict[str, Callable[[Scores], str]] = {"json": to_json, "csv": to_csv}
"""Beside 'table', which is for people."""


def _by_layer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = {row["layer"]: row["value"] for row in rows}
    if not values:
        return {}
    first = min(values)
    return {"first_layer": first, "per_layer": [values.get(layer) for layer in range(first, max(values) + 1)]}


def _by_pair(rows: list[dict[str, Any]], n_layers: int) -> dict[str, Any]:
    values = {(row["layer"], row["other_layer"]): row["value"] for row in rows}
    if not values:
        return {}
    first = min(1, *(layer for layer, _ in values))
    layers = range(first, n_layers + 1)
    return {"matrix_first_layer": first, "matrix": [[values.get((a, b)) for b in layers] for a in layers]}
