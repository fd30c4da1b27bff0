"""`sparsedepth measure`: every score of the papers on a model that exists already, ours or anybody's."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparsedepth.measure.suite import Measurements


def register(app: typer.Typer) -> None:
    app.command()(measure)


def measure(
    model: Annotated[str, typer.Argument(help="run folder, local Hugging Face folder, or hub name")],
    corpus: Annotated[
        str | None,
        typer.Option(help="text to measure on: stdlib, a path or hub:NAME; default a run's own, else stdlib"),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="context; default the run's own, else 256")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="folder for the scores per layer, head and pair")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="override a measuring field: --set measure_tokens=4096; repeatable"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0")] = "auto",
    fp32: Annotated[bool, typer.Option("--fp32", help="widen the weights when loading; default as stored")] = False,
) -> None:
    """Measure a run, or a Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE ... from safetensors."""
    import tempfile

    from sparsedepth.cli.show import bar, print_summary
    from sparsedepth.config.load import build, parse_settings
    from sparsedepth.config.run import MeasureConfig, MeasureOnlyConfig
    from sparsedepth.measure.suite import measure_run
    from sparsedepth.probe.load import load_stack
    from sparsedepth.probe.text import measure_source
    from sparsedepth.train.runtime import find_device

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; name a new one")
    loaded = load_stack(model, device=find_device(device), dtype="fp32" if fp32 else "checkpoint")
    own = loaded.config
    fields = {} if own is None else {name: getattr(own, name) for name in (*MeasureConfig.model_fields, "seq_len")}
    fields |= {} if seq_len is None else {"seq_len": seq_len}
    config = build(MeasureOnlyConfig, {**fields, **parse_settings(settings or [])}, "measure")
    with tempfile.TemporaryDirectory() as scratch, bar("reading the text") as report:
        root = Path(scratch) if own is None else loaded.folder.resolve().parent.parent / "data"
        n_tokens = config.measure_tokens + config.fit_tokens
        text = measure_source(loaded, corpus, config.seq_len, n_tokens, root)
        found = measure_run(
            loaded.stack,
            config,
            text,
            text.bytes_per_token,
            step=0 if own is None else own.n_steps,
            progress=lambda done: report("measuring", done),
        )
    facts = loaded.facts
    print(
        f"{model}: {facts.family}, {facts.n_layers} layers, d_model {facts.d_model}, {facts.params_total:,} parameters"
    )
    print_summary(found.summary)
    if out is not None:
        about = {"model": model, **asdict(facts), "data_hash": text.data_hash, "config": config.model_dump(mode="json")}
        _write(out, about, found)
        print(f"written: {out}")


def _write(out: Path, about: dict[str, Any], found: "Measurements") -> None:
    """about.json, summary.json, and a Parquet table each for layers, heads and pairs."""
    from sparsedepth import files
    from sparsedepth.store import folder as record

    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "about.json", about)
    files.write_json(out / "summary.json", found.summary)
    for table, rows in (("layers", found.layers), ("heads", found.heads), ("pairs", found.pairs)):
        record.write_table(out, table, rows)
