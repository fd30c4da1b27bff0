"""Cost of measuring: passes over all blocks, and over the head, for each of measure_tokens tokens.

A fork of the residual stream costs the blocks behind it (`sparsedepth.probe.fork`): on average L / 2 of L blocks for
each layer, two thirds of a pass for each pair of layers.
"""

from sparsedepth.quantities.record import RunSizes


def once(sizes: RunSizes) -> tuple[float, float]:
    return 1, 0


def by_layer(sizes: RunSizes) -> tuple[float, float]:
    return 1 + (sizes.n_layers - 1) / 2, sizes.n_layers + 1


def by_pair(sizes: RunSizes) -> tuple[float, float]:
    pairs = min(sizes.permutation_pairs or _all_pairs(sizes), _all_pairs(sizes))
    return 1 + 2 / 3 * pairs, pairs + 1


def by_range(sizes: RunSizes) -> tuple[float, float]:
    most = _all_pairs(sizes) + sizes.n_layers
    ranges = min(sizes.removal_ranges or most, most)
    return 2 + ranges / 3, ranges + 1


def jointly(sizes: RunSizes) -> tuple[float, float]:
    """Upper bound: all blocks are replaced, one after another."""
    passes = _all_pairs(sizes) + 2 * sizes.n_layers
    return passes, passes


def jacobian(sizes: RunSizes) -> tuple[float, float]:
    """Without probes: one pass for each dimension at each position, and one for each dimension at all."""
    exact = sizes.stream_width * (sizes.seq_len + 1)
    return 1 + (3 * sizes.jacobian_probes if sizes.jacobian_probes else exact), 0


def released_code(sizes: RunSizes) -> tuple[float, float]:
    pairs = _all_pairs(sizes)
    return 2 * by_layer(sizes)[0] + 2 / 3 * pairs, 2 * sizes.n_layers + pairs


def _all_pairs(sizes: RunSizes) -> float:
    return sizes.n_layers * (sizes.n_layers - 1) / 2
