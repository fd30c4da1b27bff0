"""Runs the measures that a config asks for, and returns rows named as in `sparsedepth.quantities`.

Data are held-out text or a task's held-out sequences: scores read the first measure_tokens tokens; usefulness fits its
maps on the next fit_tokens, so on no scored token; the validation loss reads the first val_tokens. Sequences have
seq_len tokens, as in training, and eval_seq_len for val_loss_common. Pairs and resamples are drawn from one seed, so
all runs are compared on the same draws."""

import warnings
from collections.abc import Callable

from torch import Tensor

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.data.sequences import ReadHeldOut
from sparsedepth.measure import (
    derivatives,
    geometry,
    interventions,
    loss,
    released_code,
    sparsity,
    usefulness,
    variance,
)
from sparsedepth.measure.bootstrap import finites
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities.measured import MEASURES, PLUGINS
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import error_text

AddRows = Callable[[MeasureContext, Measurements], None]

SUITE: dict[str, AddRows] = {
    "usefulness": usefulness.add_usefulness_rows,
    "loss": loss.add_loss_rows,
    "weights": sparsity.add_weight_rows,
    "variance": variance.add_variance_rows,
    "attention": sparsity.add_attention_rows,
    "geometry": geometry.add_geometry_rows,
    "experts": sparsity.add_expert_rows,
    "early_exit": loss.add_exit_rows,
    "causal": interventions.add_causal_rows,
    "permutation": interventions.add_permutation_rows,
    "jacobian": derivatives.add_jacobian_rows,
    "jacobian_map": derivatives.add_jacobian_map_rows,
    "removal": interventions.add_removal_rows,
    "trajectories": geometry.add_trajectory_rows,
    "participation": variance.add_participation_rows,
    "joint": usefulness.add_joint_rows,
    "spans": usefulness.add_span_rows,
    "trace": interventions.add_trace_rows,
    "trace_map": interventions.add_trace_map_rows,
    "activations": sparsity.add_activation_rows,
    "gradients": derivatives.add_gradient_rows,
    "lens": loss.add_lens_rows,
    "released_code": released_code.add_released_rows,
}
"""By the names in `sparsedepth.quantities.measured`, whose order they run in. Each function runs its measure on the
context's tokens and names its numbers."""

OF_PLUGINS: dict[str, AddRows] = {
    measure.name: plugin.get("add_rows") for plugin in PLUGINS if (measure := plugin.get("MEASURE"))
}


def measure_run(
    probed: ProbedModel,
    config: RunConfig | MeasureOnlyConfig,
    held_out: ReadHeldOut,
    bytes_per_token: float | None = None,
    *,
    step: int,
    eod: int | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> Measurements:
    """The measures in config.measures, in fp32; the model is left unchanged. Without `bytes_per_token` of the held-out
    text bits per byte are missing; without `eod` ends of documents are unknown. `progress` gets the share of measures
    done. Raises ValueError unless there are more than d_model + 1 fit tokens."""
    context = MeasureContext(probed=probed, config=config, held_out=held_out, bytes_per_token=bytes_per_token, eod=eod)
    measurements = Measurements(step=step)
    names = [measure.name for measure in MEASURES if measure.name in config.measures]
    for done, name in enumerate(names, start=1):
        rows = Measurements(step=step)
        try:
            (SUITE | OF_PLUGINS)[name](context, rows)
            rows.add_depth_columns(name, probed.n_layers)
            rows.check_records(name)
            if name in OF_PLUGINS:
                rows.check_values(probed.n_layers)
            measurements.extend(rows)
        except Exception as error:
            if name in SUITE:
                raise
            warnings.warn(
                f"the measure {name} of a plugin failed, and its numbers are missing: {error_text(error)}", stacklevel=2
            )
        progress(done / len(names))
    return measurements


def observe_variance(probed: ProbedModel, tokens_NT: Tensor, step: int) -> list[Named]:
    """Layer rows of the residual variance on a small fixed batch: one pass, called during training."""
    rows = Measurements(step=step)
    by_layer = variance.variance_by_sequence(probed, tokens_NT).mean(0)
    rows.add_layers("residual_variance", finites(by_layer), tokens_NT.numel(), first=0)
    return rows.layers
