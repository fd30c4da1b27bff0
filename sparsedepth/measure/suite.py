"""The measures of one model that its config asks for, as rows under the names of `sparsedepth.quantities`.

Held-out text, or a task's held-out sequences: the scores read the first measure_tokens tokens; usefulness fits its maps
on the fit_tokens after them, so on no scored token; the validation loss reads the first val_tokens. A loss is taken
over the positions that count. All at seq_len, the context that the model was trained at; val_loss_common at
eval_seq_len. Pairs and resamples depend on `seed` alone, so runs are compared on the same draws.

Shapes: N sequences, T tokens of one sequence.
"""

from collections.abc import Callable

from torch import Tensor

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.config.runtime import MAX_TOKENS
from sparsedepth.measure import (
    activations,
    attention_sparsity,
    causal,
    causal_maximum,
    composite_gain,
    early_exit,
    erasure,
    experts,
    geometry,
    gradients,
    jacobian,
    joint_replacement,
    lens,
    loss,
    participation,
    permutation,
    released_code,
    removal,
    trajectories,
    usefulness,
    variance,
    weight_sparsity,
    weight_updates,
)
from sparsedepth.measure.bootstrap import finite
from sparsedepth.measure.context import MeasureContext, ReadHeldOut
from sparsedepth.measure.rows import Measurements, Row
from sparsedepth.probe.fork import token_count
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities.measured import MEASURES

SUITE: dict[str, Callable[[MeasureContext, Measurements], None]] = {
    "usefulness": usefulness.add_rows,
    "loss": loss.add_rows,
    "weights": weight_sparsity.add_rows,
    "variance": variance.add_rows,
    "attention": attention_sparsity.add_rows,
    "geometry": geometry.add_rows,
    "experts": experts.add_rows,
    "early_exit": early_exit.add_rows,
    "causal": causal.add_rows,
    "permutation": permutation.add_rows,
    "neighbours": permutation.add_neighbour_rows,
    "jacobian": jacobian.add_rows,
    "removal": removal.add_rows,
    "causal_maximum": causal_maximum.add_rows,
    "trajectories": trajectories.add_rows,
    "participation": participation.add_rows,
    "joint": joint_replacement.add_rows,
    "activations": activations.add_rows,
    "gradients": gradients.add_rows,
    "lens": lens.add_rows,
    "erasure": erasure.add_rows,
    "weight_updates": weight_updates.add_rows,
    "composite_gain": composite_gain.add_rows,
    "released_code": released_code.add_rows,
}
"""By the names of `sparsedepth.quantities.measured`, in whose order they run. `add_rows`, last in the file of a
measure, runs it on the context's tokens, and says which names its numbers go by."""


def measure_run(
    probed: ProbedModel,
    config: RunConfig | MeasureOnlyConfig,
    held_out: ReadHeldOut,
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
    without it the ends are not known. `progress` is given the share of the measures that is done. Raises ValueError
    where the fit tokens do not exceed d_model + 1.
    """
    context = MeasureContext(
        probed=probed,
        config=config,
        held_out=held_out,
        seed=seed,
        max_tokens=max_tokens,
        bytes_per_token=bytes_per_token,
        eod=eod,
    )
    measurements = Measurements(step=step)
    wanted = [measure.name for measure in MEASURES if measure.name in config.measures]
    for done, name in enumerate(wanted, start=1):
        made = Measurements(step=step)
        SUITE[name](context, made)
        made.add_depth_columns(name, probed.n_layers)
        made.check_records(name)
        measurements.extend(made)
        if progress:
            progress(done / len(wanted))
    return measurements


def observe_variance(probed: ProbedModel, tokens_NT: Tensor, step: int) -> list[Row]:
    """Layer rows of the residual variance alone: one pass over a small fixed batch, to be called along training."""
    made = Measurements(step=step)
    by_layer = variance.variance_by_sequence(probed, tokens_NT).mean(0)
    made.add_layers("residual_variance", [finite(value) for value in by_layer], token_count(tokens_NT), first=0)
    return made.layers
