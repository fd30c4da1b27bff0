"""`sparsedepth measure`: every score of the papers on a model that exists already, ours or anybody's."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsedepth.cli.train_sweep import Device

if TYPE_CHECKING:
    from sparsedepth.probe.load import LoadedModel
    from sparsedepth.probe.text import GivenTokens


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
    from sparsedepth.cli.score_export import FORMATS, Scores

    if format not in ("table", *FORMATS):
        raise ValueError(f"--format {format!r} is not one of table, {', '.join(FORMATS)}")
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
    else:
        print(FORMATS[format](Scores(measured)))
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
