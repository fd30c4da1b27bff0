"""What a run shares with the complete runs of its results folder, so that they can be compared: the text, the
code of plugins, and the precision that `precision: auto` stands for, which is bf16 on a GPU and fp32 elsewhere."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparsedepth.config.load import read_yaml
from sparsedepth.config.run import FIT, MeasureOnlyConfig, RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.data.pipeline import CorpusSource
from sparsedepth.data.sequences import ReadHeldOut, Source, open_source
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.files import parse_json, read_regular
from sparsedepth.plugins import used
from sparsedepth.quantities.measured import PLUGINS
from sparsedepth.store import run_record

if TYPE_CHECKING:
    from sparsedepth.train.runtime import Runtime

ENOUGH_FIT_TOKENS = 16
"""Per dimension of the stream: least squares on n tokens err by D / n of the variance that they leave."""


def checked_source(config: RunConfig, results: Path, tokenizer: Tokenizer | None = None) -> Source:
    """The source of a run. Raises ValueError as `open_source`, and for text too short, or not that of other runs."""
    source = open_source(config, results / "data", tokenizer)
    source.batch(config, 0)  # this and the following raise for a text that is too short
    source.held_out(config.seq_len, config.measure_tokens)
    if "loss" in config.measures:
        source.held_out(config.eval_seq_len or config.seq_len, config.val_tokens)
    check_enough_to_fit(source.held_out, config, config.stream_width)
    check_same_text(source, results)
    check_same_plugins(config, results)
    return source


def check_enough_to_fit(
    held_out: ReadHeldOut, config: RunConfig | MeasureOnlyConfig, width: int, fix: str = ""
) -> None:
    """Raises ValueError, with the `fix` of a text that has no more, for fewer tokens than the maps of a measure need,
    and warns of few: before the training, not after it."""
    fitted = [("measure_tokens", 0, config.measure_tokens)] if "released_code" in config.measures else []
    if not FIT.isdisjoint(config.measures):
        fitted.append(("fit_tokens", config.measure_tokens, config.fit_tokens))
    for name, skipped, asked in fitted:
        n_fit = held_out(config.seq_len, asked, skipped).n_tokens
        has_more = held_out(config.seq_len, asked + config.seq_len, skipped).n_tokens > n_fit
        advice = f"raise {name}" if has_more else fix or "use a longer corpus or a larger val_fraction"
        if n_fit <= width + 1:
            raise ValueError(
                f"{n_fit} held-out tokens to fit maps to ({name}={asked}, after the first {skipped}), "
                f"but d_model={width} needs more than {width + 1}; {advice}"
            )
        if n_fit < (enough := ENOUGH_FIT_TOKENS * width):
            told = (
                f"{n_fit} tokens fit maps of width {width}: the error of the maps is {width / n_fit:.0%} of what they "
                f"leave; {enough} tokens make it {1 / ENOUGH_FIT_TOKENS:.0%}: {advice}"
            )
            warnings.warn(told, stacklevel=4)


def check_same_text(source: Source, results: Path) -> None:
    """Raises ValueError if the first complete run on this corpus read other tokens: the tokens were deleted, and the
    text changed. The new tokens are deleted, since no run of this folder may read them."""
    if not isinstance(source, CorpusSource):
        return
    corpus = source.corpus
    for folder, manifest in _manifests(results):
        data = manifest.get("data")
        if not isinstance(data, dict) or data.get("data_id") != corpus.manifest.data_id:
            continue
        if data.get("data_hash") == source.data_hash:
            return
        if not corpus.folder.is_symlink():
            shutil.rmtree(corpus.folder, ignore_errors=True)
        raise ValueError(
            f"corpus={corpus.manifest.corpus!r} has changed since run {folder.name} of {results}: "
            "runs on the two texts cannot be compared; restore the text, or choose another --out"
        )


def check_same_plugins(config: RunConfig, results: Path) -> None:
    """Raises ValueError if the first complete run with a measure of a plugin has it from other code."""
    for measure, made in used(PLUGINS, config.measures).items():
        for folder, manifest in _manifests(results):
            plugins = manifest.get("plugins")
            before = plugins.get(measure) if isinstance(plugins, dict) else None
            if not isinstance(before, dict):
                continue
            if before.get("code") == made["code"]:
                break
            raise ValueError(
                f"the plugin {made['file']} has changed since run {folder.name} of {results} was measured with it: "
                f"{measure} of the two cannot be compared; restore it, or choose another --out"
            )


def check_same_precision(config: RunConfig, runtime: "Runtime", results: Path) -> None:
    """Raises ValueError if the first complete run with precision=auto was computed in another than this would be."""
    if config.precision != "auto":
        return
    for folder, manifest in _manifests(results):
        before = manifest.get("precision")
        if not before or not _has_auto_precision(folder):
            continue
        if before == runtime.precision:
            return
        raise ValueError(
            f"precision=auto is {runtime.precision} on {runtime.device.type}, "
            f"but run {folder.name} of {results} was computed in {before}: the two cannot be compared; "
            f"continue on the same kind of device, or set precision={before} and another --out"
        )


def check_same_stream(runtime: "Runtime", results: Path) -> None:
    """Raises ValueError if a complete run in bf16 had its residual stream in another precision than this one."""
    stream = runtime.kernels.get("stream", "fp32")
    for folder, manifest in _manifests(results):
        before = manifest.get("stream", "fp32")
        if manifest.get("precision") == runtime.precision == "bf16" and before != stream:
            raise ValueError(
                f"stream={stream}, but run {folder.name} of {results} was computed with stream={before}: their "
                f"variances cannot be compared; choose another --out, or stream={before}"
            )


def _has_auto_precision(folder: Path) -> bool:
    try:
        return read_yaml(folder / "config.yaml").get("precision", "auto") == "auto"
    except (OSError, ValueError, AttributeError):
        return False


def _manifests(results: Path) -> Iterator[tuple[Path, Fields]]:
    """Folder and manifest of each run; not of one that was removed meanwhile, or is damaged and will be repeated."""
    for path in sorted(results.glob(f"{run_record.RUNS}/*/manifest.json")):
        try:
            content = parse_json(read_regular(path))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            yield path.parent, content
