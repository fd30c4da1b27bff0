"""`sparsedepth measure`: all layer-effectiveness measures on an existing model."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsedepth.cli import calls, option
from sparsedepth.quantities import ALL, LAYERS, PAIRS, with_intervals
from sparsedepth.quantities.record import Column
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.render import to_csv

if TYPE_CHECKING:
    from sparsedepth.run.measure_existing_model import MeasurementResult


@option.of_call(calls.measure)
def measure(
    given: option.Given,
    format: Annotated[Literal["table", "json", "csv"], typer.Option(help="output format")] = "table",
) -> None:
    """Measure a run or a Hugging Face model: Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE, ..."""
    from sparsedepth.cli.run_progress import print_summary
    from sparsedepth.store.degeneracy import notes_on_run
    from sparsedepth.store.terminal import wrapped

    result, measures, out = calls.measure(**given), given["measures"], given["out"]
    if format == "table":
        print(_title(result, given["fit_tokens"]))
        print_summary(result.measurements.summary)
        available = {column.measure for column, _, _ in with_intervals(result.measurements.summary)}
        requested = () if measures in (None, "all") else result.config.measures
        if missing := [name for name in requested if name not in available]:
            print(f"not defined for this model: {', '.join(missing)}; see `sparsedepth metrics` for their requirements")
        print(wrapped(f"note: {note}" for note in notes_on_run(_as_row(result))), end="")
    else:
        print(Scores(result).to_json() if format == "json" else Scores(result).to_csv())
    if out is not None:
        print(f"written: {out}", file=sys.stdout if format == "table" else sys.stderr)


def _as_row(result: "MeasurementResult") -> dict[str, Any]:
    """As a row of `runs`, for notes on what its scores show."""
    facts = result.loaded.facts
    sizes = {"n_layers": facts.n_layers, "vocab_size": facts.vocab_size}
    return {"outcome": "ok", **sizes, **result.measurements.summary}


def _title(result: "MeasurementResult", fit_tokens: Path | None) -> str:
    facts, config = result.loaded.facts, result.config
    sizes = f"{facts.n_layers} layers, d_model {facts.d_model}, {facts.params_total:,} parameters"
    title = f"{result.loaded.source}: {facts.family}, {sizes}"
    if result.given is None:
        return title
    given, length = result.given, config.seq_len
    scored = given.scored[: config.measure_tokens // length]
    n_fit, n_of_loss = len(given.fit[: config.fit_tokens // length]), len(given.scored[: config.val_tokens // length])
    n_scored, n_tokens = scored.n_scored, scored.n_tokens
    positions = "" if n_scored == n_tokens else f" at {n_scored:,} of {n_tokens:,} positions"
    loss = "" if n_of_loss == len(scored) else f", the loss on {n_of_loss}"
    split = "" if fit_tokens else ", of the last half of the file"
    return (
        f"{title}\n{len(scored)} sequences of {length} tokens scored{positions}{loss}; "
        f"maps fitted on {n_fit} others{split}"
    )


class Scores:
    """A measurement as JSON or CSV; missing values are null or empty."""

    def __init__(self, result: "MeasurementResult"):
        self.result, self.measurements = result, result.measurements

    def to_json(self) -> str:
        """An object per score: definition, global value with interval, and values by layer or a matrix of pairs."""
        scores = [
            self._object(column, self._metric(column), value, interval)
            for column, value, interval in with_intervals(self.measurements.summary)
            if not column.part and column.unit != "token"
        ]
        metrics = {score["metric"] for score in scores}
        for rows, columns in ((self.measurements.layers, LAYERS), (self.measurements.pairs, PAIRS)):
            by_name = {column.name: column for column in columns}
            for metric in dict.fromkeys(row["metric"] for row in rows):
                if metric not in metrics:
                    metrics.add(metric)
                    scores.append(self._object(by_name[metric.partition("@")[0]], metric))
        return json.dumps(scores, indent=1, allow_nan=False)

    def _metric(self, column: Column) -> str:
        quantity = column.quantity
        assert quantity
        at = f"@{getattr(self.result.config, quantity.threshold)[0]:g}" if quantity.threshold else ""
        return quantity.metric + at

    def _object(
        self, column: Column, metric: str, value: Any = None, interval: tuple[Any, Any] | None = None
    ) -> dict[str, Any]:
        """A column of `runs` with value, interval and its rows; or a metric with rows only."""
        layers, pairs = (
            [row for row in rows if row["metric"] == metric]
            for rows in (self.measurements.layers, self.measurements.pairs)
        )
        error = self.measurements.summary.get(f"{column.name}_se") if column.view == "runs" else None
        return {
            "name": column.name if column.view == "runs" else metric,
            "definition": column.meaning,
            "source": column.source,
            "unit": column.unit,
            "global": value,
            "interval": list(interval) if interval else None,
            "n_tokens": self._tokens(column, [*layers, *pairs]),
            "metric": metric if layers or pairs else None,
            **({} if error is None else {"standard_error": error}),
            **_by_layer(layers),
            **_by_pair(pairs, self.result.loaded.facts.n_layers),
        }

    def _tokens(self, column: Column, rows: list[dict[str, Any]]) -> int | None:
        """Number of tokens behind a value; None for measures of the weights."""
        if column.measure == "weights":
            return None
        if column.measure == "loss":
            tokens = self.measurements.summary["val_loss_tokens"]
            return None if tokens is None else int(tokens)
        if rows and column.measure != "attention":  # its rows count attention weights
            return max(row["n"] for row in rows)
        return self.result.n_tokens

    def to_csv(self) -> str:
        units = {(column.view, column.name): column.unit for column in ALL}
        rows: list[tuple[Any, ...]] = []
        for column, value, interval in with_intervals(self.measurements.summary):
            n = self._tokens(column, []) if column.unit != "token" else None
            rows.append((column.name, None, None, None, value, *(interval or (None, None)), n, column.unit))
        for view in ("layers", "heads", "pairs"):
            for row in getattr(self.measurements, view):
                indices = (row["layer"], row.get("other_layer"), row.get("head"))
                unit = units[view, row["metric"].partition("@")[0]]
                rows.append((row["metric"], *indices, row["value"], None, None, row["n"], unit))
        columns = ("name", "layer", "other_layer", "head", "value", "lo", "hi", "n", "unit")
        return to_csv(QueryResult(columns=columns, rows=tuple(rows)))


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
