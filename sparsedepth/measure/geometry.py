"""Geometry of the residual stream: the length of each block's update, and the angle by which it turns the stream.

With u_l = x_l - x_(l-1) = a_l + f_l (attention, feed-forward), means over tokens of one of these:

    state_norm          ||x_l||, l = 0..L      update_norm, attention_norm, ffn_norm  ||u_l||, ||a_l||, ||f_l||
    update_ratio        ||u_l|| / ||x_(l-1)||  attention_ratio, ffn_ratio   of a_l; of f_l to x_(l-1) + a_l
    update_cosine       cos(u_l, x_(l-1))      attention_cosine, ffn_cosine   of a_l; of f_l with x_(l-1) + a_l
    state_cosine        cos(x_l, x_(l-1))      block_influence   1 - cos(x_l, x_(l-1))
    angular_distance    theta(x_(l-1), x_l)    and theta(x_l, x_(l+n)) for every pair
    update_angle        theta(u_l, u_(l+1)), l < L     angle_to_end   theta(x_l, x_L), l < L

theta = arccos cos, in radians: divide by pi for the units of 2403.17887 and 2502.05795. x_L is taken before the final
norm. Sources: norms, ratios and cosines 2505.13898; block influence ShortGPT (2403.03853); angular distance 2403.17887,
2502.05795; angles of neighbouring states and updates, to the end, and over 1 < l < L (angular_distance_middle)
2602.05970. Deviates: angular distance is averaged over all tokens; 2403.17887 and 2502.05795 take the last token of
each sequence, here `angular_distance_last_token` (of prompts and answers that of the last document).

A ratio to, or angle with, a vector of length 0 is undefined: such tokens are left out of the mean, which is None
without any token. A score is the mean over layers, None if one of them is None. States are fp32, products and arccos
fp64: the fp32 number next to 1 is 3.5e-4 rad away.

Trajectories: how the rotation of each token's state is distributed over the layers.

    theta_t = (theta(x_0, x_1), ..., theta(x_(L-1), x_L)) of token t, rad;  theta = arccos cos

Over all tokens: the mean, the first two principal components with their shares of variance, and two ideal shapes
(2602.05970). With M = L - 2 middle layers, a = mean angle of the middle layers over the tokens, k = round(6 M / 22):

    early stop   (pi/2, a x k, 0 x (M - k), pi/2)      a few layers do the work, the next ones idle
    even         (pi/2, a x M, pi/2)                   every middle layer does the same share

With L = 24 and a = 0.45 these are the published ones. Deviates: a is measured, as it depends on depth.

A token is near an ideal if its middle angles, as a vector of M numbers, are within half the angle between the two
ideals, arccos sqrt(k / M), of it; else near neither. So classes depend only on the shape, not on the total rotation,
and exclude each other.

States are fp32, angles fp64; x_L is taken before the final norm. The last token of a document, which predicts the next
document's first, is left out if the end-of-document id is known (the published code leaves out padding and the token
before it); so is a token with a state of length 0.

Shapes: P positions along depth, or points; M middle layers, V valid tokens."""

import itertools
import math
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import Estimator, by_pair, finites, mean_of_last, ratio, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import batches, by_sequence, chunk_size, stream, updates
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS

MAX_COSINES = 2**21
"""Cosines of pairs of states computed at a time (16 MiB in fp64; on a GPU more, `probe.fork.chunk_size`)."""


def add_geometry_rows(context: MeasureContext, rows: Measurements) -> None:
    """One forward pass; it keeps the L + 1 directions of the stream in fp64, so takes a quarter of the usual tokens.
    Values of branches only if the model is a sum of known ones."""
    probed, n_layers = context.probed, context.probed.n_layers
    pairs, last, embedded_N12, sums_NLQ2 = by_sequence(
        probed, batches(probed, context.inputs, memory=4), lambda tokens_BT: _token_sums(probed, tokens_BT, context.eod)
    )
    moments = dict(zip(_SUMS, np.moveaxis(sums_NLQ2, 2, 0), strict=True))
    if not moments["ffn_norm"][..., 1].any():
        moments = dict(itertools.islice(moments.items(), _SUMS.index("attention_norm")))
    next_to = (slice(None), range(n_layers), range(1, n_layers + 1))
    moments |= {
        "state_norm": np.concatenate((embedded_N12, moments["state_norm"]), axis=1),
        "block_influence": moments["state_cosine"] @ [[-1, 0], [1, 1]],  # the sum of 1 - cosine
        "update_angle": moments["update_angle"][:, 1:],  # a first block has none before it
        "angular_distance": pairs[next_to],
        "angle_to_end": pairs[:, :-1, -1],
    }
    mean = partial(shared_resamples(context.rng()), lambda moments_RP2: mean_of_last(_mean(moments_RP2)))
    rows.add_pairs("angular_distance", by_pair(_mean(pairs.mean(0)), first=0), context.n_tokens)
    rows.add_score("angular_distance_middle", mean(moments["angular_distance"][:, 1:-1]))
    rows.add_pairs("angular_distance_last_token", by_pair(_mean(last.mean(0)), first=0), len(context.inputs))
    rows.add_score("angular_distance_last_token", mean(last[next_to]))
    for name, values in moments.items():
        first = int(name not in ("state_norm", "angle_to_end"))
        rows.add_layers(name, finites(_mean(values.mean(0))), context.n_tokens, first)
        if name in IN_RUNS:
            rows.add_score(name, mean(values))


_PARTS = ("update", "attention", "ffn")
_SUMS = [
    "state_norm",
    "state_cosine",
    "update_angle",
    *(f"{p}_{v}" for p in _PARTS for v in ("norm", "ratio", "cosine")),
]


def _token_sums(probed: ProbedModel, tokens_BT: Tensor, eod: int | None) -> list[Tensor]:
    """For each sequence sums over the tokens where a quantity is defined, and their number: of angles of pairs, of
    those at the last token, of the embedding's norm, and [B, L, Q, 2] of _SUMS, 0 for branches that are not known."""
    unit_BTLD = torch.empty(0)
    for update in updates(probed, tokens_BT):
        before, after = update.before.double(), update.after.double()
        if update.layer == 1:  # all is allocated here, as small tensors between large ones fragment the heap
            unit_BTLD = before.new_zeros(*tokens_BT.shape, probed.n_layers + 1, probed.stream_width)
            unit_BTLD[:, :, 0], last_u = _unit(before), torch.zeros_like(before)
            sums_BLQ2 = before.new_zeros(len(before), probed.n_layers, len(_SUMS), 2)
            embedded_B12 = _moments(_norm(before)).sum(1, keepdim=True)
        unit_BTLD[:, :, update.layer] = _unit(after)
        u = after - before
        added = [(u, before)]
        if update.branches is not None:
            attention, ffn = (branch.double() for branch in update.branches)
            added += [(attention, before), (ffn, before + attention)]
        cosine, defined = _cosine(last_u, u)
        moments = [_moments(_norm(after)), _moments(*_cosine(after, before)), _moments(cosine.arccos(), defined)]
        for part, base in added:
            ratio = _moments(_norm(part) / _norm(base), _norm(base) != 0)
            moments += [_moments(_norm(part)), ratio, _moments(*_cosine(part, base))]
        sums_BLQ2[:, update.layer - 1, : len(moments)] = torch.stack(moments, dim=2).sum(1)
        last_u = u
    return [*_pairs(unit_BTLD, last_positions(tokens_BT, eod)), embedded_B12, sums_BLQ2]


def last_positions(tokens_BT: Tensor, eod: int | None) -> list[int]:
    """Position of the last token of each sequence, from 0: before the padding `eod`s after the end of a document."""
    last = tokens_BT.shape[1] - 1
    if eod is None:
        return [last] * len(tokens_BT)
    at_end_B = (tokens_BT == eod).flip(1).int().cumprod(1).sum(1)
    return (last - (at_end_B - 1).clamp(min=0)).tolist()


def _pairs(unit_BTLD: Tensor, last_B: list[int]) -> tuple[Tensor, Tensor]:
    """Angles of all pairs of states: sums and counts [B, L1, L1, 2] over all tokens, and at the last one."""
    n_states = unit_BTLD.shape[2]
    over_all = unit_BTLD.new_zeros(len(unit_BTLD), n_states, n_states, 2)
    for sum_LL2, unit_TLD in zip(over_all, unit_BTLD, strict=True):
        for unit_tLD in unit_TLD.split(max(1, chunk_size(unit_TLD.device, MAX_COSINES) // n_states**2)):
            sum_LL2 += _angles(unit_tLD).sum(0)
    return over_all, _angles(unit_BTLD[range(len(unit_BTLD)), last_B])


def _angles(unit_tLD: Tensor) -> Tensor:
    """[t, L1, L1, 2]: the angle of each two states of a token, if both are not 0."""
    exists_tL = (unit_tLD != 0).any(-1)
    angle_tLL = (unit_tLD @ unit_tLD.mT).clamp(-1, 1).arccos()
    return _moments(angle_tLL, exists_tL[:, :, None] & exists_tL[:, None, :])


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _unit(x: Tensor) -> Tensor:
    """x / ||x||, or 0."""
    norm = _norm(x)[..., None]
    return x / torch.where(norm == 0, 1, norm)


def _cosine(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """cos(a, b) over the last dimension, and where it is defined."""
    return (_unit(a) * _unit(b)).sum(-1).clamp(-1, 1), (_norm(a) != 0) & (_norm(b) != 0)


def _moments(value: Tensor, defined: bool | Tensor = True) -> Tensor:
    """[..., 2]: the value and a count of 1, or 0 and 0 where undefined. NaN counts, and makes the mean None."""
    return torch.stack((value, torch.ones_like(value)), dim=-1).where(
        torch.as_tensor(defined, device=value.device)[..., None], 0
    )


def _mean(moments: np.ndarray) -> np.ndarray:
    """sum / count over the last dimension; NaN for a count of 0."""
    return ratio(moments[..., 0], moments[..., 1])


MIN_LAYERS = 4
"""With fewer there are no two middle layers."""
MAX_POINTS = 2000
"""Tokens kept individually, drawn at random: as many as in the published figure."""
MIN_ROTATION = 1e-6
"""rad, root of the sum of squares over layers; smaller rotations are rounding errors of fp32
states: without a shape, and, as differences between tokens, without principal components."""


def add_trajectory_rows(context: MeasureContext, rows: Measurements) -> None:
    """One forward pass. The components are unit vectors whose largest entry is positive. Nothing for fewer than
    MIN_LAYERS layers, without a valid token, and if a state is not finite."""
    probed, tokens_NT, eod, rng = context.probed, context.inputs, context.eod, context.rng()
    if probed.n_layers < MIN_LAYERS:
        return
    # Half as many tokens at once: their states are fp64 here.
    angles_NTL, exists_NT = by_sequence(probed, batches(probed, tokens_NT, memory=2), partial(_angles_by_layer, probed))
    ids_NT = tokens_NT.numpy(force=True)
    valid_NT = exists_NT & (ids_NT != eod) if eod is not None else exists_NT
    angles_VL = angles_NTL[valid_NT]
    if not len(angles_VL) or not np.isfinite(angles_VL).all():
        return
    ideals_2L = np.stack(ideals(probed.n_layers, float(angles_VL[:, 1:-1].mean())))
    to_ideals_V2 = _angles_to(angles_VL[:, 1:-1], ideals_2L[:, 1:-1])
    nearest_V = nearest(to_ideals_V2, probed.n_layers)
    mean_L = angles_VL.mean(0)
    components_2L, shares = _components(angles_VL - mean_L)
    places_V2 = (angles_VL - mean_L) @ components_2L.T
    points = _points(ids_NT, eod, np.argwhere(valid_NT), nearest_V, np.hstack((to_ideals_V2, places_V2)))
    chosen_P = np.sort(rng.permutation(len(angles_VL))[:MAX_POINTS])
    chosen = points.iloc[chosen_P].astype(object)
    rows.tokens.extend({"step": rows.step, **row} for row in chosen.where(chosen.notna(), None).to_dict("records"))
    _add_shares(rows, valid_NT, nearest_V, shared_resamples(rng))
    names = ("trajectory_mean", "trajectory_pc1", "trajectory_pc2", "early_stop_ideal", "even_ideal")
    for name, values_L in zip(names, (mean_L, *components_2L, *ideals_2L), strict=True):
        rows.add_layers(name, finites(values_L), len(angles_VL))
    rows.summary.update(trajectory_pc1_share=shares[0], trajectory_pc2_share=shares[1])


def _add_shares(rows: Measurements, valid_NT: np.ndarray, nearest_V: np.ndarray, estimate: Estimator) -> None:
    for name, ideal in (("early_stop_share", "early stop"), ("even_share", "even")):
        near_NT = np.zeros(valid_NT.shape, dtype=bool)
        near_NT[valid_NT] = nearest_V == ideal
        rows.add_score(name, estimate(ratio, near_NT.sum(1), valid_NT.sum(1)))


def ideals(n_layers: int, middle_angle: float) -> tuple[np.ndarray, np.ndarray]:
    """'early stop' and 'even', [L] each, rad."""
    even_L = np.full(n_layers, middle_angle)
    even_L[[0, -1]] = math.pi / 2
    early_L = even_L.copy()
    early_L[1 + _n_acting(n_layers) : -1] = 0
    return early_L, even_L


def nearest(to_ideals_V2: np.ndarray, n_layers: int) -> np.ndarray:
    """'early stop', 'even' or 'neither' from the angles (rad) to the two ideals."""
    limit = math.acos(math.sqrt(_n_acting(n_layers) / (n_layers - 2))) / 2
    names = np.array(["early stop", "even"])[to_ideals_V2.argmin(1)]
    return np.where(to_ideals_V2.min(1) < limit, names, "neither")


def _n_acting(n_layers: int) -> int:
    """k: middle layers that rotate the state before an early stop."""
    assert n_layers >= MIN_LAYERS
    return max(1, round(6 * (n_layers - 2) / 22))


def _angles_by_layer(probed: ProbedModel, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """theta_BTL in fp64, and exists_BT: no state of the token has length 0."""
    shape = tokens_BT.shape
    unit_BTD, exists_BT = torch.empty(0), torch.ones(shape, dtype=torch.bool, device=tokens_BT.device)
    angles_BTL = torch.empty(*shape, probed.n_layers, dtype=torch.float64, device=tokens_BT.device)
    for layer, x_BTD in enumerate(stream(probed, tokens_BT)):
        last_BTD, unit_BTD = unit_BTD, _unit(x_BTD.double())
        exists_BT &= (unit_BTD != 0).any(-1)
        if layer:
            angles_BTL[:, :, layer - 1] = (last_BTD * unit_BTD).sum(-1).clamp(-1, 1).arccos()
    return angles_BTL, exists_BT


def _angles_to(angles_VM: np.ndarray, ideals_2M: np.ndarray) -> np.ndarray:
    """Angle (rad) of each trajectory's middle layers with each ideal's: [V, 2]; pi/2 for one of length 0."""
    units = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x in (angles_VM, ideals_2M)]
    to_ideals_V2 = np.arccos((units[0] @ units[1].T).clip(-1, 1))
    turns_V = np.linalg.norm(angles_VM, axis=1) > MIN_ROTATION
    return np.where(turns_V[:, None], to_ideals_V2, math.pi / 2)


def _components(centred_VL: np.ndarray) -> tuple[np.ndarray, list[float | None]]:
    """The first two principal components [2, L] and their shares of the variance."""
    values_L, vectors_LL = np.linalg.eigh(centred_VL.T @ centred_VL / len(centred_VL))
    if values_L.sum() < MIN_ROTATION**2:
        return np.full((2, centred_VL.shape[1]), np.nan), [None, None]
    components_2L = vectors_LL.T[[-1, -2]]
    largest_2 = np.abs(components_2L).round(6).argmax(1)  # rounded, so that ties are resolved alike
    components_2L *= np.sign(components_2L[[0, 1], largest_2])[:, None]
    return components_2L, finites(values_L[[-1, -2]].clip(0) / values_L.sum())


def _points(
    ids_NT: np.ndarray, eod: int | None, place_V2: np.ndarray, nearest_V: np.ndarray, value_V4: np.ndarray
) -> pd.DataFrame:
    """`value_V4`: the angles to both ideals, and the places along both components."""
    begin_NT = np.zeros(ids_NT.shape, dtype=np.int64)  # of each token's document; 0 = before the sequence, or unknown
    if eod is not None:
        begin_NT[:, 1:] = np.where(ids_NT[:, :-1] == eod, np.arange(1, ids_NT.shape[1]), 0)
    n_V, t_V = place_V2.T
    begin_V = np.maximum.accumulate(begin_NT, axis=1)[n_V, t_V]
    places = {"sequence": n_V, "position": t_V, "token_id": ids_NT[n_V, t_V]}
    places |= {"document_position": np.where(begin_V > 0, t_V - begin_V, None), "nearest": nearest_V}
    return pd.DataFrame(places | dict(zip(("to_early_stop", "to_even", "pc1", "pc2"), value_V4.T, strict=True)))
