"""What `measure` found, for programs: one JSON object per score, or one CSV line per value."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsedepth import quantities
from sparsedepth.config.run import MeasureOnlyConfig

if TYPE_CHECKING:
    from sparsedepth.measure.rows import Measurements

ROWS_OF = {
    "causal_score": "causal_effect",
    "permutation_score": "permutation_effect",
    "usefulness": "affine_loss_increase",
    "usefulness_loss_increase": "affine_loss_increase",
    "usefulness_identity": "skip_loss_increase",
    "removal_score": "removal_drop",
    "residual_variance_last": "residual_variance",
    "residual_variance_growth": "residual_growth",
    "lens_loss_increase": "lens_loss",
    "early_exit_loss_increase": "early_exit_loss",
}
"""The rows that a global score sums up, where they bear another name."""

FIRST_THRESHOLD = {
    "weight_sparsity": "weight_eps",
    "weight_sparsity_rel": "weight_rel_eps",
    "attention_sparsity": "attention_tau",
    "attention_sparsity_rel": "attention_rel_tau",
}

NO_TOKENS = ("weight_sparsity",)
"""What is read from the weights alone."""
OF_WEIGHTS = ("attention_sparsity", "attention_entropy", "attention_sink")
"""Rows whose n counts attention weights, not tokens."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Everything that one measurement found."""

    found: "Measurements"
    config: MeasureOnlyConfig
    n_layers: int
    n_tokens: int
    """Tokens that the scores read."""

    def objects(self) -> list[dict[str, Any]]:
        """Per score: its definition, its global value with interval, and its rows as a list or a matrix."""
        measured = [quantity for quantity in quantities.RUNS if self._is_score(quantity)]
        found = [self._object(quantity, self._metric(quantity.name)) for quantity in measured]
        taken = {one["metric"] for one in found}
        for quantity, metric in self._row_metrics():
            if metric not in taken:
                taken.add(metric)
                found.append(self._object(quantity, metric))
        return found

    def _is_score(self, quantity: quantities.Quantity) -> bool:
        is_part = quantity.name.endswith(("_lo", "_hi", "_se")) or quantity.unit == "token"
        return not is_part and self.found.summary.get(quantity.name) is not None

    def _metric(self, name: str) -> str:
        if name in FIRST_THRESHOLD:
            return f"{name}@{getattr(self.config, FIRST_THRESHOLD[name])[0]:g}"
        return ROWS_OF.get(name, name)

    def _row_metrics(self) -> Iterable[tuple[quantities.Quantity, str]]:
        for rows, known in ((self.found.layers, quantities.LAYERS), (self.found.pairs, quantities.PAIRS)):
            by_name = {quantity.name: quantity for quantity in known}
            for metric in dict.fromkeys(row["metric"] for row in rows):
                yield by_name[metric.partition("@")[0]], metric

    def _object(self, quantity: quantities.Quantity, metric: str) -> dict[str, Any]:
        name = quantity.name if quantity.table == "runs" else metric
        of_run = self.found.summary if quantity.table == "runs" else {}
        low, high = of_run.get(f"{name}_lo"), of_run.get(f"{name}_hi")
        layers = [row for row in self.found.layers if row["metric"] == metric]
        pairs = [row for row in self.found.pairs if row["metric"] == metric]
        content: dict[str, Any] = {
            "name": name,
            "definition": quantity.meaning,
            "source": quantity.source,
            "unit": quantity.unit,
            "global": of_run.get(name),
            "interval": None if low is None or high is None else [low, high],
            "n_tokens": self._tokens(name, [*layers, *pairs]),
            "metric": metric if layers or pairs else None,
        }
        if of_run.get(f"{name}_se") is not None:
            content["standard_error"] = of_run[f"{name}_se"]
        if layers:
            first = min(row["layer"] for row in layers)
            content |= {"first_layer": first, "per_layer": _filled(layers, first)}
        if pairs:
            first = min(1, *(row["layer"] for row in pairs))
            content |= {"matrix_first_layer": first, "matrix": _matrix(pairs, first, self.n_layers)}
        return content

    def _tokens(self, name: str, rows: list[dict[str, Any]]) -> int | None:
        if name.startswith(NO_TOKENS):
            return None
        if name.startswith("val_") and "val_loss_tokens" in self.found.summary:
            tokens = self.found.summary["val_loss_tokens"]
            return None if tokens is None else int(tokens)
        if rows and not name.startswith(OF_WEIGHTS):
            return max(row["n"] for row in rows)
        return self.n_tokens

    def values(self) -> list[tuple[Any, ...]]:
        """One row per value: COLUMNS."""
        summary = self.found.summary
        units = {(quantity.table, quantity.name): quantity.unit for quantity in quantities.ALL}
        rows: list[tuple[Any, ...]] = [
            (
                name,
                None,
                None,
                None,
                value,
                summary.get(f"{name}_lo"),
                summary.get(f"{name}_hi"),
                n,
                units["runs", name],
            )
            for name, value in summary.items()
            if value is not None and not name.endswith(("_lo", "_hi"))
            for n in (self._tokens(name, []) if units["runs", name] != "token" else None,)
        ]
        for table in ("layers", "heads", "pairs"):
            for row in getattr(self.found, table):
                place = (row["layer"], row.get("other_layer"), row.get("head"))
                unit = units[table, row["metric"].partition("@")[0]]
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


def _filled(rows: list[dict[str, Any]], first: int) -> list[float | None]:
    values = {row["layer"]: row["value"] for row in rows}
    return [values.get(layer) for layer in range(first, max(values) + 1)]


def _matrix(rows: list[dict[str, Any]], first: int, n_layers: int) -> list[list[float | None]]:
    values = {(row["layer"], row["other_layer"]): row["value"] for row in rows}
    layers = range(first, n_layers + 1)
    return [[values.get((a, b)) for b in layers] for a in layers]
