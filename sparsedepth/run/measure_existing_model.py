"""Measure an existing model: source of tokens -> model -> measures -> record.

model = load_model(NAME)                                           `probe.load`
config = measuring_config(model, settings)
with tokens_to_measure(model, config, corpus) as tokens:           `probe.text`
    measure_existing_model(model, tokens, config, out=FOLDER)
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsedepth.config.load import build
from sparsedepth.config.run import MeasureConfig, MeasureOnlyConfig, known_measures
from sparsedepth.config.section import Fields
from sparsedepth.data.ngram_losses import losses_of
from sparsedepth.data.text import TextSource
from sparsedepth.measure.measurements import Measurements
from sparsedepth.measure.suite import measure_run
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.load import LoadedModel
from sparsedepth.probe.text import MeasuredTokens, TokenArrays
from sparsedepth.run.comparable import check_enough_to_fit
from sparsedepth.run.publish import Stopwatch, write_measured
from sparsedepth.store.subject import MeasuredModel


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
    model: LoadedModel,
    tokens: MeasuredTokens,
    config: MeasureOnlyConfig,
    *,
    out: Path | None = None,
    watch: Stopwatch | None = None,
    report: Callable[[float], None] = lambda done: None,
    step: int = 0,
) -> MeasurementResult:
    """All measures of the config on a model, of this `step` if it is no run; `out`: folder of the record, whose time is
    that of `watch`; `report` gets the share done. Raises ValueError for a model that computes NaN or infinity."""
    watch = watch or Stopwatch()
    source = tokens.source
    scored = source.held_out(config.seq_len, config.measure_tokens)
    fix = "give more sequences of tokens" if isinstance(source, TokenArrays) else ""
    check_enough_to_fit(source.held_out, config, model.probed.stream_width, fix)
    _check_states(model, torch.from_numpy(scored.inputs[:1]))
    found = measure_run(
        model.probed,
        config,
        source.held_out,
        source.bytes_per_token,
        step=step if model.config is None else model.config.n_steps,
        eod=source.eod,
        progress=report,
    )
    if "loss" in config.measures:
        found.summary.update(losses_of(tokens.counted()))
    if out is not None:
        facts = measured_model(model, config, source.data_hash)
        write_measured(out, facts, found, watch, model.probed.device, model_facts(model, tokens))
    given = source if isinstance(source, TokenArrays) else None
    return MeasurementResult(loaded=model, given=given, config=config, measurements=found, n_tokens=scored.n_scored)


def measuring_config(loaded: LoadedModel, settings: Fields, given: TokenArrays | None = None) -> MeasureOnlyConfig:
    """A run's own measuring fields, overridden by those of given tokens, and then by the user's. Raises ValueError."""
    own = loaded.config
    fields = {} if own is None else {name: getattr(own, name) for name in (*MeasureConfig.model_fields, "seq_len")}
    if own is not None:
        fields["measures"] = known_measures(own.measures)
    elif loaded.facts.max_len:
        fields["seq_len"] = min(MeasureOnlyConfig.model_fields["seq_len"].default, loaded.facts.max_len)
    if given is not None:
        fields |= {
            "val_tokens": given.scored.n_tokens,
            "measure_tokens": given.scored.n_tokens,
            "fit_tokens": given.fit.n_tokens,
            "seq_len": given.seq_len,
            "eval_seq_len": None,
        }
    config = build(MeasureOnlyConfig, {**fields, **settings}, "measure")
    if given is not None and not config.seq_len == given.seq_len == (config.eval_seq_len or given.seq_len):
        lengths = {"seq_len": config.seq_len, "eval_seq_len": config.eval_seq_len}
        named = [name for name in lengths if lengths[name] not in (None, given.seq_len)]
        told = ", ".join(f"{name}={lengths[name]}" for name in named)
        raise ValueError(f"{told}: the given tokens have {given.seq_len} per sequence; leave {' and '.join(named)} out")
    return config


def _check_states(loaded: LoadedModel, tokens_1T: Tensor) -> None:
    """Raises ValueError for a model that computes NaN or infinity on the first sequence."""
    with probing(loaded.probed):
        for layer, x_BTD in enumerate(stream(loaded.probed, tokens_1T.to(loaded.probed.device))):
            if not x_BTD.isfinite().all():
                where = f"after layer {layer} of {loaded.probed.n_layers}" if layer else "before its first layer"
                raise ValueError(
                    f"{loaded.source} computes NaN or infinity {where} on the first sequence, so it cannot be scored; "
                    "check its configuration for a wrong number, and its weights for too large values"
                )


def model_facts(loaded: LoadedModel, tokens: MeasuredTokens) -> Fields:
    """What a record's manifest says of a model of others, and of the text."""
    source = tokens.source
    return {
        "checkpoint": loaded.source,
        "family": loaded.facts.family,
        "weights_dtype": loaded.facts.dtype,
        "weights_hash": loaded.weights_hash,
        "text": source.corpus.manifest.corpus if isinstance(source, TextSource) else None,
    }


def measured_model(loaded: LoadedModel, config: MeasureOnlyConfig, data_hash: str) -> MeasuredModel:
    facts = {name: value for name, value in asdict(loaded.facts).items() if name != "max_len"}
    values = {
        **config.model_dump(mode="json"),
        **facts,
        "weights_hash": loaded.weights_hash,
        "data_hash": data_hash,
        "model": loaded.source,
    }
    return build(MeasuredModel, values, "measure")
