"""`sparsedepth measure`: every score of the papers on a model that exists already, ours or anybody's."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedepth.cli.train_sweep import Device
from sparsedepth.quantities import ALL, LAYERS, PAIRS, with_intervals
from sparsedepth.quantities.record import Column

if TYPE_CHECKING:
    from sparsedepth.probe.load import LoadedModel
    from sparsedepth.probe.text import GivenTokens
    from sparsedepth.run.measure_existing_model import MeasuringResult


def measure(
    model: Annotated[str, typer.Argument(help="run folder, local Hugging Face folder, or hub name")],
    data: Annotated[
        str | None,
        typer.Option(help="text to measure on: stdlib, a path or hub:NAME; default a run's own, else stdlib"),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="token ids to measure on: .npy, integers [sequences, length + 1]; the last is a target"),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option(help="targets of --tokens, of its shape (then without a last one); -100 does not count"),
    ] = None,
    fit_tokens: Annotated[
        Path | None,
        typer.Option(help="ids to fit usefulness's maps on; default: the last half of --tokens, which is not scored"),
    ] = None,
    fit_targets: Annotated[
        Path | None, typer.Option(help="targets of --fit-tokens; maps are fitted on every token, counted or not")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="context; default the run's own, else 256")] = None,
    measures: Annotated[
        str | None, typer.Option(help="all, or names: causal,permutation,...; default what a run measures")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="override a measuring field: --set measure_tokens=4096; repeatable"),
    ] = None,
    format: Annotated[str, typer.Option(help="table, json or csv")] = "table",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="folder for the record, which query, best and plot read")
    ] = None,
    device: Device = "auto",
    fp32: Annotated[bool, typer.Option("--fp32", help="widen the weights when loading; default as stored")] = False,
) -> None:
    """Measure a run, or a Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE ... from safetensors."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.run_progress import print_summary

    if format not in ("table", "json", "csv"):
        raise ValueError(f"--format {format!r} is not one of table, json, csv")
    measured = calls.measure(
        model,
        data=data,
        tokens=tokens,
        targets=targets,
        fit_tokens=fit_tokens,
        fit_targets=fit_targets,
        seq_len=seq_len,
        measures=measures,
        set=settings,
        out=out,
        device=device,
        fp32=fp32,
    )
    if format == "table":
        print(_title(measured.loaded, measured.given, fit_tokens))
        print_summary(measured.measurements.summary)
        found = {column.measure for column, _, _ in with_intervals(measured.measurements.summary)}
        asked = () if measures in (None, "all") else measured.config.measures
        if without := [name for name in asked if name not in found]:
            print(f"of {', '.join(without)} this model has no value: `sparsedepth metrics` says what each asks")
    else:
        print(Scores(measured).to_json() if format == "json" else Scores(measured).to_csv())
    if out is not None:
        print(f"written: {out}", file=sys.stdout if format == "table" else sys.stderr)


def _title(loaded: "LoadedModel", given: "GivenTokens | None", fit_tokens: Path | None) -> str:
    facts = loaded.facts
    sizes = f"{facts.n_layers} layers, d_model {facts.d_model}, {facts.params_total:,} parameters"
    title = f"{loaded.source}: {facts.family}, {sizes}"
    if given is None:
        return title
    split = "" if fit_tokens else ", the last half of the file"
    n_scored, n_tokens = given.scored.n_scored, given.n_tokens
    counted = "" if n_scored == n_tokens else f" at the {n_scored:,} of {n_tokens:,} positions that count"
    return (
        f"{title}\n{len(given.scored)} sequences of {given.seq_len} tokens scored{counted}; "
        f"maps fitted on {len(given.fit)} others{split}"
    )


class Scores:
    """What one measurement found, for programs; missing values are null, or empty."""

    def __init__(self, measured: "MeasuringResult"):
        self.measured, self.found = measured, measured.measurements

    def to_json(self) -> str:
        """An object per score: its definition, its global value with interval, and its rows as a list or a matrix."""
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
        return json.dumps(scores, indent=1, allow_nan=False)

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

    def to_csv(self) -> str:
        """A header and a line per value."""
        from sparsedepth.store.query_result import QueryResult
        from sparsedepth.store.render import to_csv

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
