"""The measures by name, in the order in which they run, each with its cost in forward passes.

A fork costs the blocks behind it (`sparsedepth.probe.fork`): a score of L layers costs L / 2 passes, one of P pairs of
layers 2 P / 3. What `loss` and the fit of `usefulness` read besides is priced in `sparsedepth.plan.duration`.
"""

from sparsedepth.quantities.record import Measure, Sizes


def _all_pairs(sizes: Sizes) -> float:
    return sizes.n_layers * (sizes.n_layers - 1) / 2


def _once(sizes: Sizes) -> tuple[float, float]:
    return 1, 0


def _by_layer(sizes: Sizes) -> tuple[float, float]:
    return 1 + (sizes.n_layers - 1) / 2, sizes.n_layers + 1


def _by_pair(sizes: Sizes) -> tuple[float, float]:
    pairs = min(sizes.permutation_pairs or _all_pairs(sizes), _all_pairs(sizes))
    return 1 + 2 / 3 * pairs, pairs + 1


def _by_range(sizes: Sizes) -> tuple[float, float]:
    most = _all_pairs(sizes) + sizes.n_layers
    ranges = min(sizes.removal_ranges or most, most)
    return 1 + ranges / 3, ranges + 1


def _released_code(sizes: Sizes) -> tuple[float, float]:
    pairs = _all_pairs(sizes)
    return 2 * _by_layer(sizes)[0] + 2 / 3 * pairs, 2 * sizes.n_layers + pairs


MEASURES: tuple[Measure, ...] = (
    Measure("usefulness", _by_layer),  # first: it can refuse a text that is too short
    Measure("loss", lambda sizes: (0, 0)),
    Measure("weights", lambda sizes: (0, 0)),
    Measure("variance", _once),
    Measure("attention", lambda sizes: (2, 0)),
    Measure("geometry", _once),
    Measure("experts", lambda sizes: (1 if sizes.n_experts else 0, 0)),
    Measure("early_exit", lambda sizes: (2, 2 * sizes.n_layers + 2)),
    Measure("causal", _by_layer),
    Measure("permutation", _by_pair),
    Measure("neighbours", _by_layer, on_request=True),
    Measure("jacobian", lambda sizes: (1 + 3.0 * (sizes.jacobian_probes or sizes.d_model), 0), on_request=True),
    Measure("removal", _by_range, on_request=True),
    Measure("causal_maximum", lambda sizes: (4 * _by_layer(sizes)[0], 0), on_request=True),
    Measure("trajectories", _once, on_request=True),
    Measure("released_code", _released_code, on_request=True),
)
