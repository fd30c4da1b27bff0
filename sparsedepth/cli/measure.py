"""`sparsedepth measure` and `evaluate`: layer-effectiveness measures of an existing model, and its scores on tasks."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from sparsedepth.cli import option
from sparsedepth.cli.option import Device, Folder, ModelName, Names, Settings, TableOrJson
from sparsedepth.config.rule import Rule, refuse_first
from sparsedepth.quantities import LAYERS, PAIRS, with_intervals
from sparsedepth.quantities.quantity import Column, Named, without_none
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.degeneracy import notes_on_run
from sparsedepth.words.measure import model_text, notes_text, summary_text, tokens_text, told_text
from sparsedepth.words.plain_text import commas
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.config.section import Fields
    from sparsedepth.probe.text import TokenArrays
    from sparsedepth.run.measure_existing_model import MeasurementResult

OPTIONAL = (
    "seconds licence permutation_score residual_variance_last",
    "usefulness_loss_increase",
    "causal_score",
    "tokens_trained",
)  # fmt: skip
"""Columns of several models that a narrow terminal leaves out."""


@dataclass(frozen=True)
class MeasureCommand:
    """Measure a run, a local Hugging Face folder or a hub model; the result's `measurements` have `summary`, `layers`
    and `pairs`. With `revisions` the result is a row for each.

    Raises ValueError for two sources of text, a missing or unsafe model, and incompatible settings."""

    model: Annotated[
        ModelName | None,
        Argument(help="run folder, local Hugging Face folder, or hub name, NAME@REVISION"),
    ] = None
    _: KW_ONLY
    data: Annotated[str | None, Option(help="text: stdlib, a path or hub:NAME; default the run's own, else stdlib")] = (
        None
    )
    tokens: Annotated[
        Folder | None,
        Option(help="token ids instead: .npy, integers [sequences, length + 1], the last of a row only a target"),
    ] = None
    targets: Annotated[
        Folder | None,
        Option(help="targets for --tokens, both [sequences, length]; positions with -100 are not scored"),
    ] = None
    fit_tokens: Annotated[
        Folder | None,
        Option(help="token ids to fit usefulness's linear maps; default the last half of --tokens, not scored"),
    ] = None
    seq_len: Annotated[
        int | None, Option(help="context length; default the run's own, else 256 or the model's positions")
    ] = None
    measures: Annotated[Names | None, Option(help="all, or names: causal,permutation,...; default those of a run")] = (
        None
    )
    set: Annotated[
        Settings | None,
        Option(
            "--set",
            help="override a measuring field, or with --revisions state one of the training: --set measure_tokens=4096",
        ),
    ] = None
    out: Annotated[
        Folder | None,
        Option("-o", "--out", help="folder for the record, or with --revisions a results folder"),
    ] = None
    device: Device = "auto"
    revisions: Annotated[
        Names | None,
        Option(help="many checkpoints, by step: 'step*', step1000,step2000; of the hub, or folders in MODEL"),
    ] = None
    name: Annotated[str | None, Option(help="with --revisions: of the training; default the model's")] = None
    tokens_per_step: Annotated[int | None, Option(min=1, help="with --revisions: of an optimizer step")] = None
    keep: Annotated[int | None, Option(min=0, max=0, help="with --revisions: 0 deletes each download after use")] = None

    models: Annotated[Folder | None, Option(help="file of many models (`init models`), each a record in DIR of -o")] = (
        None
    )

    def compute(self) -> "MeasurementResult | QueryResult":
        """What can be refused is refused before the model is loaded."""
        from sparsedepth.cli.run_progress import bar
        from sparsedepth.probe.load import load_model
        from sparsedepth.probe.text import tokens_to_measure
        from sparsedepth.run.measure_existing_model import measure_existing_model, measuring_config
        from sparsedepth.run.publish import Stopwatch
        from sparsedepth.store.run_record import check_place
        from sparsedepth.train.runtime import find_device, measuring_device

        watch = Stopwatch()
        written = option.path_of_file(self.out)
        given, fields = self._tokens(), self._fields()
        refuse_first(RULES, self)
        if self.models is not None:
            return self._models(fields)
        if self.revisions is not None:
            return self._series(given, fields)
        if written is not None:
            check_place(written)
        with bar("loading the model") as report:
            loaded = load_model(str(self.model), device=measuring_device(find_device(self.device)))
            config = measuring_config(loaded, fields, given)
            begin = partial(report, "reading the text", 0.0)
            measured = partial(report, "measuring")
            with tokens_to_measure(loaded, config, self.data, given, begin) as source:
                return measure_existing_model(loaded, source, config, out=written, watch=watch, report=measured)

    def _tokens(self) -> "TokenArrays | None":
        from sparsedepth.probe.folder import CONFIG
        from sparsedepth.probe.text import read_token_arrays, tokenizer_folder

        paths = (self.tokens, self.fit_tokens, self.targets)
        scored, fit, aims = (None if path is None else Path(path) for path in paths)
        if scored is not None and self.data is not None:
            raise ValueError("--data and --tokens are two sources; give one of them")
        if scored is None and (fit is not None or aims is not None):
            raise ValueError(f"--{'targets' if fit is None else 'fit-tokens'} needs --tokens; give both")
        if scored is not None:
            return read_token_arrays(scored, fit, aims)
        if ((folder := Path(str(self.model))) / CONFIG).exists():
            tokenizer_folder(folder)  # weights take long to read
        return None

    def _fields(self) -> "Fields":
        from sparsedepth.config.load import parse_settings
        from sparsedepth.config.run import measures_named

        changes = parse_settings(self.set or [])
        measures = measures_named(self.measures) if self.measures is not None else None
        own = without_none({"seq_len": self.seq_len, "measures": measures})
        if twice := sorted({*own} & {*changes}):
            flag = twice[0].replace("_", "-")
            raise ValueError(f"--{flag} and --set {twice[0]}=... set the same field; give one of them")
        return {**own, **changes}

    def _series(self, given: "TokenArrays | None", fields: "Fields") -> "QueryResult":
        from sparsedepth.config.load import build
        from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
        from sparsedepth.watch.series import Series

        assert self.revisions is not None and self.out is not None, "asked for"
        of_run = RunConfig.model_fields.keys() - MeasureOnlyConfig.model_fields
        measuring = {name: value for name, value in fields.items() if name not in of_run}
        build(MeasureOnlyConfig, measuring, "measure")
        series = Series(
            model=str(self.model),
            name=self.name or Path(str(self.model).rstrip("/")).name,
            out=option.path(self.out),
            tokens_per_step=self.tokens_per_step,
            measuring=measuring,
            training={name: value for name, value in fields.items() if name in of_run},
            data=self.data,
            given=given,
            device=self.device,
            keeps_downloads=self.keep is None,
        )
        wanted = self.revisions.split(",") if isinstance(self.revisions, str) else self.revisions
        return series.measure(wanted, _tell)

    def _models(self, fields: "Fields") -> "QueryResult":
        from sparsedepth.config.load import build, read_yaml
        from sparsedepth.config.models_file import ModelsFile
        from sparsedepth.run.board import measure_models

        assert self.models is not None and self.out is not None, "asked for"
        text = {"text": self.data} if self.data else {}
        file = build(ModelsFile, {**read_yaml(Path(self.models)), **text}, str(self.models))
        return measure_models(file, option.path(self.out), fields, self.device, _tell)


def _first_given(given: MeasureCommand, names: str) -> str:
    """The first of these options that was given."""
    return next((name.replace("_", "-") for name in names.split() if getattr(given, name) is not None), "")


OF_SERIES = "name tokens_per_step keep"
RULES: tuple[Rule, ...] = (
    (lambda c: (c.model is None) is (c.models is None), "measure takes MODEL, or --models FILE; give one of them"),
    (lambda c: c.models and _first_given(c, f"tokens targets fit_tokens revisions {OF_SERIES}"),
     "--{found} is for one MODEL; leave it out with --models"),
    (lambda c: c.out is None and (c.models is not None or c.revisions is not None),
     "several models need -o DIR, their results folder"),
    (lambda c: c.models is None and c.revisions is None and _first_given(c, OF_SERIES),
     "--{found} is for several checkpoints; add --revisions"),
)  # fmt: skip


def _tell(name: str, known: "Mapping[str, Any]", left: int) -> None:
    option.aside(told_text(name, known, left))


@option.command
def measure(
    given: MeasureCommand,
    format: TableOrJson = "table",
) -> None:
    """Measure a run or a Hugging Face model: Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE, ..."""
    from sparsedepth.store.degeneracy import reasons_of_run

    result = given.compute()
    if isinstance(result, QueryResult):
        print(fitted_table(result, OPTIONAL).text if format == "table" else json.dumps(result.records(), indent=1))
        return
    if format == "table":
        summary = result.measurements.summary
        facts = result.loaded.facts
        print(model_text(result))
        if result.given is not None:
            print(tokens_text(result.given, result.config, is_halved=given.fit_tokens is None))
        print(summary_text(summary), end="")
        available = {column.measure for column, _, _ in with_intervals(summary)}
        requested = () if given.measures in (None, "all") else result.config.measures
        if missing := [name for name in requested if name not in available]:
            print(f"not defined for this model: {commas(missing)}; see `sparsedepth metrics` for their requirements")
        row = {"outcome": "ok", "n_layers": facts.n_layers, "vocab_size": facts.vocab_size, **summary}
        print(notes_text(notes_on_run(reasons_of_run(row))), end="")
    else:
        print(json.dumps([*_scores(result)], indent=1, allow_nan=False))
    if given.out is not None:
        print(f"written: {given.out}", file=sys.stdout if format == "table" else sys.stderr)


def _scores(result: "MeasurementResult") -> Iterator[Named]:
    """An object per score: definition, global value with interval, and values by layer or a matrix of pairs. Missing
    values are null. First the quantities of a run, then metrics with rows only."""
    summary = result.measurements.summary
    shown = set[str]()
    for column, value, ends in with_intervals(summary):
        quantity = column.quantity
        if quantity and not column.part and column.unit != "token":
            at = f"@{getattr(result.config, quantity.threshold)[0]:g}" if quantity.threshold else ""
            of_run = {"name": column.name, "global": value, "interval": ends and [*ends]}
            error = without_none({"standard_error": summary.get(f"{column.name}_se")})
            shown.add(quantity.metric + at)
            yield _score(result, column, quantity.metric + at) | of_run | error
    for rows, columns in ((result.measurements.layers, LAYERS), (result.measurements.pairs, PAIRS)):
        by_name = {column.name: column for column in columns}
        for metric in dict.fromkeys(row["metric"] for row in rows if row["metric"] not in shown):
            shown.add(metric)
            yield _score(result, by_name[metric.partition("@")[0]], metric)


def _score(result: "MeasurementResult", column: Column, metric: str) -> Named:
    """A metric with its rows."""
    layers = [row for row in result.measurements.layers if row["metric"] == metric]
    pairs = [row for row in result.measurements.pairs if row["metric"] == metric]
    score: Named = {
        "name": metric,
        "definition": column.meaning,
        "source": column.source,
        "unit": column.unit,
        "global": None,
        "interval": None,
        "n_tokens": _n_tokens(result, column, [*layers, *pairs]),
        "metric": metric if layers or pairs else None,
    }
    if layers:
        values = {row["layer"]: row["value"] for row in layers}
        first = min(values)
        score |= {"first_layer": first, "per_layer": [*map(values.get, range(first, max(values) + 1))]}
    if pairs:
        values = {(row["layer"], row["other_layer"]): row["value"] for row in pairs}
        every = range(min(1, min(values)[0]), result.loaded.facts.n_layers + 1)
        score["matrix_first_layer"] = every.start
        score["matrix"] = [[values.get((layer, other)) for other in every] for layer in every]
    return score


def _n_tokens(result: "MeasurementResult", column: Column, rows: list[Named]) -> int | None:
    """Number of tokens behind a value; None for measures of the weights."""
    if column.measure == "weights":
        return None
    if column.measure == "loss":
        tokens = result.measurements.summary["val_loss_tokens"]
        return None if tokens is None else int(tokens)
    is_counted = rows and column.measure != "attention"  # its rows count attention weights
    return max(row["n"] for row in rows) if is_counted else result.n_tokens
