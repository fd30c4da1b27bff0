"""`sparsedepth measure`: every score of the papers on a model that exists already, ours or anybody's."""

import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparsedepth.config.run import MeasureOnlyConfig
    from sparsedepth.measure.rows import Measurements
    from sparsedepth.probe.load import Loaded
    from sparsedepth.probe.text import GivenTokens


def register(app: typer.Typer) -> None:
    app.command()(measure)


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
    fit_tokens: Annotated[
        Path | None,
        typer.Option(help="ids to fit usefulness's maps on; default: the last half of --tokens, which is not scored"),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="context; default the run's own, else 256")] = None,
    scores: Annotated[
        str | None, typer.Option(help="all, or groups: causal,permutation,...; default what a run measures")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="override a measuring field: --set measure_tokens=4096; repeatable"),
    ] = None,
    format: Annotated[str, typer.Option(help="table, json or csv")] = "table",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="folder for the record, which query, best and plot read")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0")] = "auto",
    fp32: Annotated[bool, typer.Option("--fp32", help="widen the weights when loading; default as stored")] = False,
) -> None:
    """Measure a run, or a Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE ... from safetensors."""
    from sparsedepth.cli.progress import print_summary
    from sparsedepth.cli.score_export import FORMATS, Scores
    from sparsedepth.config.load import parse_settings
    from sparsedepth.probe.load import load_stack
    from sparsedepth.probe.text import given_tokens
    from sparsedepth.store.measured_folder import check_place
    from sparsedepth.train.runtime import find_device

    if format not in ("table", *FORMATS):
        raise ValueError(f"--format {format!r} is not one of table, {', '.join(FORMATS)}")
    _check_source(data, tokens, fit_tokens)
    chosen = parse_settings(settings or [])
    chosen |= _groups(scores, chosen)
    given = None if tokens is None else given_tokens(tokens, fit_tokens)
    if out is not None:
        check_place(out)
    started, clock = datetime.now(UTC), time.perf_counter()
    where = find_device(device)
    loaded = load_stack(model, device=where, dtype="fp32" if fp32 else "checkpoint")
    config = _config(loaded, given, seq_len, chosen)
    found, n_scored, data_hash = _measured(loaded, config, given, data)
    if format == "table":
        print(_title(loaded, given, fit_tokens))
        print_summary(found.summary)
    else:
        print(FORMATS[format](Scores(found=found, config=config, n_layers=loaded.facts.n_layers, n_tokens=n_scored)))
    if out is not None:
        made = {"started": started.isoformat(timespec="seconds"), "seconds": round(time.perf_counter() - clock, 3)}
        _save(out, loaded, config, found, data_hash, made, where)
        print(f"written: {out}", file=sys.stdout if format == "table" else sys.stderr)


def _measured(
    loaded: "Loaded", config: "MeasureOnlyConfig", given: "GivenTokens | None", data: str | None
) -> "tuple[Measurements, int, str]":
    """What was found, on how many tokens, and the name of the text."""
    import tempfile

    from sparsedepth.cli.progress import bar
    from sparsedepth.measure.suite import measure_run
    from sparsedepth.probe.text import check_tokens, measure_source

    if given is not None:
        check_tokens(given, loaded)
    with tempfile.TemporaryDirectory() as scratch, bar("reading the text") as report:
        root = Path(scratch) if loaded.config is None else loaded.folder.resolve().parent.parent / "data"
        text = given or measure_source(loaded, data, config.seq_len, config.measure_tokens + config.fit_tokens, root)
        found = measure_run(
            loaded.stack,
            config,
            text,
            text.bytes_per_token,
            step=0 if loaded.config is None else loaded.config.n_steps,
            eod=text.eod,
            progress=lambda done: report("measuring", done),
        )
        return found, text(config.seq_len, config.measure_tokens, 0)[:, 1:].size, text.data_hash


def _check_source(data: str | None, tokens: Path | None, fit_tokens: Path | None) -> None:
    if data is not None and tokens is not None:
        raise ValueError("--data and --tokens are two sources; give one of them")
    if fit_tokens is not None and tokens is None:
        raise ValueError("--fit-tokens needs --tokens, the sequences to score")


def _groups(scores: str | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """--scores as the field `measures`."""
    from sparsedepth.quantities.measures import MEASURES

    if scores is None:
        return {}
    if "measures" in chosen:
        raise ValueError("--scores and --set measures=... say the same; give one of them")
    known = [measure.name for measure in MEASURES]
    names = known if scores == "all" else [name.strip() for name in scores.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--scores {unknown[0]!r} is not one of all, {', '.join(known)}")
    return {"measures": list(dict.fromkeys(names))}


def _config(
    loaded: "Loaded", given: "GivenTokens | None", seq_len: int | None, chosen: dict[str, Any]
) -> "MeasureOnlyConfig":
    """A run's own measuring fields, those that given tokens decide, and what the command line says. ValueError."""
    from sparsedepth.config.load import build
    from sparsedepth.config.run import MeasureConfig, MeasureOnlyConfig

    own = loaded.config
    fields = {} if own is None else {name: getattr(own, name) for name in (*MeasureConfig.model_fields, "seq_len")}
    if given is not None:
        counts = {"val_tokens": given.n_scored, "measure_tokens": given.n_scored, "fit_tokens": given.n_fit}
        fields |= {**counts, "seq_len": given.seq_len, "eval_seq_len": None}
    fields |= {} if seq_len is None else {"seq_len": seq_len}
    config = build(MeasureOnlyConfig, {**fields, **chosen}, "measure")
    if given is not None and not config.seq_len == given.seq_len == (config.eval_seq_len or given.seq_len):
        raise ValueError(
            f"seq_len={config.seq_len}, eval_seq_len={config.eval_seq_len}: the given tokens have {given.seq_len} and "
            f"a target per sequence; leave both out"
        )
    return config


def _title(loaded: "Loaded", given: "GivenTokens | None", fit_tokens: Path | None) -> str:
    facts = loaded.facts
    sizes = f"{facts.n_layers} layers, d_model {facts.d_model}, {facts.params_total:,} parameters"
    title = f"{loaded.source}: {facts.family}, {sizes}"
    if given is None:
        return title
    split = "" if fit_tokens else ", the last half of the file"
    return (
        f"{title}\n{len(given.scored)} sequences of {given.seq_len} tokens scored; "
        f"maps fitted on {len(given.fit)} others{split}"
    )


def _save(
    out: Path,
    loaded: "Loaded",
    config: "MeasureOnlyConfig",
    found: "Measurements",
    data_hash: str,
    made: dict[str, Any],
    device: Any,
) -> None:
    """The record in place of a run's."""
    import torch

    from sparsedepth.config.load import build
    from sparsedepth.probe.load import weights_hash
    from sparsedepth.run.manifest import code_version, device_facts, package_versions
    from sparsedepth.store.measured_folder import save_measured
    from sparsedepth.store.measured_model import MeasuredModel
    from sparsedepth.train.runtime import Runtime

    facts = {name: value for name, value in asdict(loaded.facts).items() if name != "max_len"}
    hashes = {"weights_hash": weights_hash(loaded.folder), "data_hash": data_hash}
    about = {**config.model_dump(mode="json"), **facts, **hashes, "model": loaded.source}
    model = build(MeasuredModel, about, "measure")
    runtime = Runtime(device=device, precision="fp32", threads=torch.get_num_threads())
    manifest = {
        "run_id": model.run_id,
        "code": code_version(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **made,
        **device_facts(runtime),
        "data_hash": data_hash,
        "packages": package_versions(),
    }
    save_measured(
        out,
        model,
        found.summary,
        manifest,
        {"layers": found.layers, "heads": found.heads, "pairs": found.pairs, "tokens": found.tokens},
    )
