"""The measures of one trained model that its config asks for, as rows under the glossary's names.

Held-out text: the scores read its first measure_tokens tokens; usefulness fits its maps on the fit_tokens after them,
so on no scored token; the validation loss reads its first val_tokens. All at seq_len, the context that the model was
trained at; val_loss_common at eval_seq_len. Pairs and resamples depend on `seed` alone, so runs are compared on the
same draws.

Shapes: N sequences, T tokens of one sequence.
"""

from collections.abc import Callable

from torch import Tensor

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.measure.bootstrap import finite
from sparsedepth.measure.parts import PARTS, HeldOut, Task
from sparsedepth.measure.rows import Measurements, Row, layer_rows
from sparsedepth.measure.variance import variance_by_sequence
from sparsedepth.probe.fork import MAX_TOKENS
from sparsedepth.probe.stack import Stack
from sparsedepth.quantities import ALL


def observe_variance(stack: Stack, tokens_NT: Tensor, step: int) -> list[Row]:
    """Layer rows of the residual variance alone: one pass over a small fixed batch, to be called along training."""
    by_layer = variance_by_sequence(stack, tokens_NT).mean(0)
    return layer_rows(step, "residual_variance", [finite(value) for value in by_layer], tokens_NT.numel(), first=0)


def check_records(measure: str, made: Measurements) -> None:
    """Whatever a measure makes has a record in `sparsedepth.quantities` that names this measure."""
    names = {("runs", name) for name in made.summary} | {("tokens", name) for row in made.tokens for name in row}
    for view in ("layers", "heads", "pairs"):
        names |= {(view, row["metric"].partition("@")[0]) for row in getattr(made, view)}
    unknown = names - {(column.view, column.name) for column in ALL if column.measure == measure}
    assert not unknown, f"measure {measure!r} makes {sorted(unknown)}, which sparsedepth.quantities has no record of"


def measure_run(
    stack: Stack,
    config: RunConfig | MeasureOnlyConfig,
    held_out: HeldOut,
    bytes_per_token: float | None = None,
    *,
    step: int,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    eod: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Measurements:
    """The measures in config.measures, in fp32; the model is left as it was found.

    `bytes_per_token` is that of the held-out text; without it bits per byte are missing. `eod` ends a document of it;
    without it the ends are not known. `progress` is told the share of the parts that is done. Raises ValueError where
    the fit tokens do not exceed d_model + 1.
    """
    task = Task(
        stack=stack,
        config=config,
        held_out=held_out,
        step=step,
        seed=seed,
        max_tokens=max_tokens,
        bytes_per_token=bytes_per_token,
        eod=eod,
    )
    whole = Measurements()
    wanted = [(name, part) for name, part in PARTS.items() if name in config.measures]
    for done, (name, part) in enumerate(wanted, start=1):
        made = part(task)
        check_records(name, made)
        whole.extend(made)
        if progress:
            progress(done / len(wanted))
    return whole
