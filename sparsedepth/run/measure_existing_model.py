"""Measure an existing model: load it, read the tokens, measure, write the record."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsedepth.config.load import build
from sparsedepth.config.run import MeasureConfig, MeasureOnlyConfig
from sparsedepth.data.ngram_losses import losses_of, losses_of_text, ngram_losses
from sparsedepth.data.sequences import Source, after_tokens
from sparsedepth.data.text import TextSource
from sparsedepth.measure.measurements import Measurements
from sparsedepth.measure.suite import measure_run
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.load import LoadedModel, load_model
from sparsedepth.probe.text import TokenArrays, check_length, check_tokens, measure_source
from sparsedepth.run.record import Stopwatch, device_facts, provenance
from sparsedepth.store.run_record import check_place, save_measured
from sparsedepth.store.subject import MeasuredModel
from sparsedepth.train.runtime import Runtime


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasurementResult:
    loaded: LoadedModel
    given: TokenArrays | None
    """tokens used instead of a corpus"""
    config: MeasureOnlyConfig
    measurements: Measurements
    n_tokens: int
    """scored positions"""


def measure_existing_model(
    model: str,
    *,
    settings: dict[str, Any],
    data: str | None = None,
    given: TokenArrays | None = None,
    out: Path | None = None,
    device: torch.device,
    report: Callable[[str, float], None],
) -> MeasurementResult:
    """All measures of the config on a model: a run folder, a local Hugging Face folder or a hub name.

    `settings`: fields of MeasureOnlyConfig set by the user; `data`: corpus, by default the run's own, else the default
    one; `given`: tokens to use instead; `out`: folder of the record; `report` gets the phase and the share done.

    Raises ValueError for an output folder that cannot be written (before the model is loaded), a missing or unsafe
    model, token ids outside its vocabulary, and incompatible settings.
    """
    watch = Stopwatch()
    if out is not None:
        check_place(out)
    loaded = load_model(model, device=device)
    config = measuring_config(loaded, given, settings)
    with tempfile.TemporaryDirectory() as scratch:
        if given is not None:
            check_tokens(given, loaded)
            source = given
        else:
            check_length(loaded, config.seq_len)
            report("reading the text", 0.0)
            root = Path(scratch) if loaded.config is None else loaded.folder.resolve().parent.parent / "data"
            source = measure_source(loaded, data, config.seq_len, config.measure_tokens + config.fit_tokens, root)
        scored = source.held_out(config.seq_len, config.measure_tokens)
        _check_states(loaded, torch.from_numpy(scored.inputs[:1]))
        measurements = measure_run(
            loaded.probed,
            config,
            source.held_out,
            source.bytes_per_token,
            step=0 if loaded.config is None else loaded.config.n_steps,
            eod=source.eod,
            progress=lambda done: report("measuring", done),
        )
        if "loss" in config.measures:
            measurements.summary.update(_ngram_losses(loaded, source, config, data))
    if out is not None:
        save_record(out, measured_model(loaded, config, source.data_hash), measurements, watch, device)
    return MeasurementResult(
        loaded=loaded, given=given, config=config, measurements=measurements, n_tokens=scored.n_scored
    )


def measuring_config(loaded: LoadedModel, given: TokenArrays | None, settings: dict[str, Any]) -> MeasureOnlyConfig:
    """A run's own measuring fields, overridden by those of given tokens, and then by the user's. Raises ValueError."""
    own = loaded.config
    fields = {} if own is None else {name: getattr(own, name) for name in (*MeasureConfig.model_fields, "seq_len")}
    if given is not None:
        n_scored, n_fit = given.scored.n_tokens, given.fit.n_tokens
        counts = {"val_tokens": n_scored, "measure_tokens": n_scored, "fit_tokens": n_fit}
        fields |= {**counts, "seq_len": given.seq_len, "eval_seq_len": None}
    config = build(MeasureOnlyConfig, {**fields, **settings}, "measure")
    if given is not None and not config.seq_len == given.seq_len == (config.eval_seq_len or given.seq_len):
        lengths = {"seq_len": config.seq_len, "eval_seq_len": config.eval_seq_len}
        named = [name for name in lengths if lengths[name] not in (None, given.seq_len)]
        told, fix = ", ".join(f"{name}={lengths[name]}" for name in named), f"leave {' and '.join(named)} out"
        raise ValueError(f"{told}: the given tokens have {given.seq_len} per sequence; {fix}")
    return config


def _check_states(loaded: LoadedModel, tokens_1T: Tensor) -> None:
    """Raises ValueError for a model that computes NaN or infinity on the first sequence."""
    with probing(loaded.probed):
        for layer, x_BTD in enumerate(stream(loaded.probed, tokens_1T.to(loaded.probed.device))):
            if not x_BTD.isfinite().all():
                where = f"after layer {layer} of {loaded.probed.n_layers}" if layer else "before its first layer"
                told = f"{loaded.source} computes NaN or infinity {where} on the first sequence"
                fix = "check its configuration for a wrong number, and its weights for too large values"
                raise ValueError(f"{told}, so it cannot be scored; {fix}")


def _ngram_losses(
    loaded: LoadedModel, source: TokenArrays | Source, config: MeasureOnlyConfig, corpus: str | None
) -> dict[str, float | None]:
    """Unigram, bigram and chance loss: of what a run was trained on, of the training part of another text, or of the
    fit tokens that were given."""
    run, vocab_size = loaded.config, loaded.facts.vocab_size
    held_out = source.held_out(config.seq_len, config.val_tokens)
    if isinstance(source, TokenArrays):
        return losses_of(after_tokens(held_out, [source.fit], vocab_size), vocab_size)
    if isinstance(source, TextSource) and (run is None or corpus not in (None, run.corpus)):
        return losses_of_text(source.corpus.train, held_out, vocab_size)
    assert run is not None, "only a run has a task or pairs"
    return ngram_losses(source, run.model_copy(update={"val_tokens": config.val_tokens}))


def measured_model(loaded: LoadedModel, config: MeasureOnlyConfig, data_hash: str) -> MeasuredModel:
    facts = {name: value for name, value in asdict(loaded.facts).items() if name != "max_len"}
    hashes = {"weights_hash": loaded.weights_hash, "data_hash": data_hash}
    return build(
        MeasuredModel, {**config.model_dump(mode="json"), **facts, **hashes, "model": loaded.source}, "measure"
    )


def save_record(
    out: Path, model: MeasuredModel, measurements: Measurements, watch: Stopwatch, device: torch.device
) -> None:
    runtime = Runtime(device=device, precision="fp32", threads=torch.get_num_threads())
    manifest = {**watch.facts(), **device_facts(runtime), **provenance(model.run_id, model.data_hash)}
    save_measured(out, model, measurements.summary, manifest, measurements.tables())
