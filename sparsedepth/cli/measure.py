"""`sparsedepth measure` and `evaluate`: layer-effectiveness measures of an existing model, and its scores on tasks."""

import json
import sys
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsedepth.cli import option
from sparsedepth.quantities import LAYERS, PAIRS, with_intervals
from sparsedepth.quantities.quantity import Column
from sparsedepth.words.degeneracy import notes_on_run
from sparsedepth.words.measure import model_text, notes_text, summary_text, tokens_text
from sparsedepth.words.plain_text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsedepth.probe.text import TokenArrays
    from sparsedepth.quantities.quantity import Measure
    from sparsedepth.run.measure_existing_model import MeasurementResult, MeasureOnlyConfig


@dataclass(frozen=True)
class MeasureCommand:
    """Measure a run, a local Hugging Face folder or a hub model; the result's `measurements` have `summary`, `layers`
    and `pairs`.

    Raises ValueError for two sources of text, a missing or unsafe model, and incompatible settings."""

    model: Annotated[option.ModelName, typer.Argument(help="run folder, local Hugging Face folder, or hub name")]
    _: KW_ONLY
    data: Annotated[
        str | None, typer.Option(help="text: stdlib, a path or hub:NAME; default the run's own, else stdlib")
    ] = None
    tokens: Annotated[
        option.Folder | None,
        typer.Option(help="token ids instead: .npy, integers [sequences, length + 1], the last of a row only a target"),
    ] = None
    targets: Annotated[
        option.Folder | None,
        typer.Option(help="targets for --tokens, both [sequences, length]; positions with -100 are not scored"),
    ] = None
    fit_tokens: Annotated[
        option.Folder | None,
        typer.Option(help="token ids to fit usefulness's linear maps; default the last half of --tokens, not scored"),
    ] = None
    seq_len: Annotated[int | None, typer.Option(help="context length; default the run's own, else 256")] = None
    measures: Annotated[
        option.Names | None, typer.Option(help="all, or names: causal,permutation,...; default those of a run")
    ] = None
    set: Annotated[
        option.Settings | None,
        typer.Option("--set", help="override a measuring field: --set measure_tokens=4096; repeatable"),
    ] = None
    out: Annotated[
        option.Folder | None, typer.Option("-o", "--out", help="folder for the record, for query and plot")
    ] = None
    device: option.Device = "auto"

    def compute(self) -> "MeasurementResult":
        """What can be refused is refused before the model is loaded."""
        from sparsedepth.cli.run_progress import bar
        from sparsedepth.config.load import parse_settings
        from sparsedepth.probe.load import load_model
        from sparsedepth.probe.text import read_token_arrays, tokens_to_measure
        from sparsedepth.run.measure_existing_model import measure_existing_model, measuring_config
        from sparsedepth.run.publish import Stopwatch
        from sparsedepth.store.run_record import check_place
        from sparsedepth.train.runtime import find_device, measuring_device

        watch = Stopwatch()
        written = None if self.out is None else option.path(self.out)
        paths = (self.tokens, self.fit_tokens, self.targets)
        scored, fit, aims = (None if path is None else Path(path) for path in paths)
        if scored is not None and self.data is not None:
            raise ValueError("--data and --tokens are two sources; give one of them")
        if scored is None and (fit is not None or aims is not None):
            raise ValueError(f"--{'targets' if fit is None else 'fit-tokens'} needs --tokens; give both")
        changes = parse_settings(self.set or [])
        measures = [measure.name for measure in known_measures(self.measures)] if self.measures is not None else None
        own = {"seq_len": self.seq_len, "measures": measures}
        own = {name: value for name, value in own.items() if value is not None}
        if twice := sorted({*own} & {*changes}):
            flag = twice[0].replace("_", "-")
            raise ValueError(f"--{flag} and --set {twice[0]}=... set the same field; give one of them")
        given = None if scored is None else read_token_arrays(scored, fit, aims)
        if written is not None:
            check_place(written)
        with bar("loading the model") as report:
            loaded = load_model(str(self.model), device=measuring_device(find_device(self.device)))
            config = measuring_config(loaded, {**own, **changes}, given)
            begin = partial(report, "reading the text", 0.0)
            measured = partial(report, "measuring")
            with tokens_to_measure(loaded, config, self.data, given, begin) as source:
                return measure_existing_model(loaded, source, config, out=written, watch=watch, report=measured)


def known_measures(measures: "Sequence[str] | str") -> "list[Measure]":
    """The measures of --measures. Raises ValueError for one that is unknown."""
    from sparsedepth.quantities.measured import MEASURES

    known = {measure.name: measure for measure in MEASURES}
    names = [name.strip() for name in measures.split(",")] if isinstance(measures, str) else measures
    names = [*known] if measures == "all" else names
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known, f"it must be one of all, {', '.join(known)}")
        raise ValueError(f"--measures {unknown[0]!r} is unknown; {hint}")
    return [known[name] for name in dict.fromkeys(names)]


@option.command
def measure(
    given: MeasureCommand,
    format: Annotated[Literal["table", "json"], typer.Option(help="output format")] = "table",
) -> None:
    """Measure a run or a Hugging Face model: Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE, ..."""
    from sparsedepth.store.degeneracy import reasons_of_run

    result = given.compute()
    out = given.out
    if format == "table":
        summary = result.measurements.summary
        facts = result.loaded.facts
        print(model_text(result))
        if result.given is not None:
            print(tokens_text(scored_tokens(result.given, result.config, is_halved=given.fit_tokens is None)))
        print(summary_text(summary), end="")
        available = {column.measure for column, _, _ in with_intervals(summary)}
        requested = () if given.measures in (None, "all") else result.config.measures
        if missing := [name for name in requested if name not in available]:
            print(f"not defined for this model: {', '.join(missing)}; see `sparsedepth metrics` for their requirements")
        row = {"outcome": "ok", "n_layers": facts.n_layers, "vocab_size": facts.vocab_size, **summary}
        print(notes_text(notes_on_run(reasons_of_run(row))), end="")
    else:
        print(json.dumps(_scores(result), indent=1, allow_nan=False))
    if out is not None:
        print(f"written: {out}", file=sys.stdout if format == "table" else sys.stderr)


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """Which of the given tokens were used, in sequences and positions."""

    length: int
    n_sequences: int
    n_tokens: int
    n_scored: int
    n_of_loss: int
    """Sequences behind the loss."""
    n_fit: int
    """Sequences to which the maps were fitted."""
    is_halved: bool
    """Whether these are the last half of the file."""


def scored_tokens(given: "TokenArrays", config: "MeasureOnlyConfig", *, is_halved: bool) -> ScoredTokens:
    """What the limits of the configuration leave of the given tokens."""
    scored = given.scored[: config.measure_tokens // config.seq_len]
    return ScoredTokens(
        length=config.seq_len,
        n_sequences=len(scored),
        n_tokens=scored.n_tokens,
        n_scored=scored.n_scored,
        n_of_loss=len(given.scored[: config.val_tokens // config.seq_len]),
        n_fit=len(given.fit[: config.fit_tokens // config.seq_len]),
        is_halved=is_halved,
    )


def _scores(result: "MeasurementResult") -> list[dict[str, Any]]:
    """An object per score: definition, global value with interval, and values by layer or a matrix of pairs. Missing
    values are null."""
    measured = result.measurements
    scores = []
    for column, value, interval in with_intervals(measured.summary):
        quantity = column.quantity
        if quantity and not column.part and column.unit != "token":
            at = f"@{getattr(result.config, quantity.threshold)[0]:g}" if quantity.threshold else ""
            scores.append(_score(result, column, quantity.metric + at, value, interval))
    shown = {score["metric"] for score in scores}
    for rows, columns in ((measured.layers, LAYERS), (measured.pairs, PAIRS)):
        by_name = {column.name: column for column in columns}
        metrics = dict.fromkeys(row["metric"] for row in rows if row["metric"] not in shown)
        scores += [_score(result, by_name[metric.partition("@")[0]], metric) for metric in metrics]
        shown |= {*metrics}
    return scores


def _score(
    result: "MeasurementResult", column: Column, metric: str, value: Any = None, interval: tuple[Any, Any] | None = None
) -> dict[str, Any]:
    """A column of `runs` with value, interval and its rows; or a metric with rows only."""
    measured = result.measurements
    layers = [row for row in measured.layers if row["metric"] == metric]
    pairs = [row for row in measured.pairs if row["metric"] == metric]
    error = measured.summary.get(f"{column.name}_se") if column.view == "runs" else None
    return {
        "name": column.name if column.view == "runs" else metric,
        "definition": column.meaning,
        "source": column.source,
        "unit": column.unit,
        "global": value,
        "interval": list(interval) if interval else None,
        "n_tokens": _n_tokens(result, column, [*layers, *pairs]),
        "metric": metric if layers or pairs else None,
        **({} if error is None else {"standard_error": error}),
        **_by_layer(layers),
        **_by_pair(pairs, result.loaded.facts.n_layers),
    }


def _n_tokens(result: "MeasurementResult", column: Column, rows: list[dict[str, Any]]) -> int | None:
    """Number of tokens behind a value; None for measures of the weights."""
    if column.measure == "weights":
        return None
    if column.measure == "loss":
        tokens = result.measurements.summary["val_loss_tokens"]
        return None if tokens is None else int(tokens)
    if rows and column.measure != "attention":  # its rows count attention weights
        return max(row["n"] for row in rows)
    return result.n_tokens


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
