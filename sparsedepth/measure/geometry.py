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

Shapes: P positions along depth.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, finites, mean_of_last, ratio, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import batches, chunk_size, probing, updates
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS

MAX_COSINES = 2**21
"""Cosines of pairs of states computed at a time (16 MiB in fp64; on a GPU more, `probe.fork.chunk_size`)."""

Angles = dict[tuple[int, int], float | None]
"""theta(x_a, x_b) by pair of layers 0 <= a < b <= L, rad"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    profiles: dict[str, ScoreByLayer]
    """by the names above; those of branches only if the model is a sum of known branches; of angular_distance_middle
    (None below three layers) and angular_distance_last_token the score alone"""
    angles: Angles
    angles_last_token: Angles


def geometry(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator, eod: int | None = None) -> Geometry:
    """One forward pass; it keeps the L + 1 directions of the stream in fp64, so takes a quarter of the
    usual tokens. `eod` ends a document, and pads sequences of prompts and answers; None = unknown."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT, memory=4):
            for name, moments in _batch_moments(probed, tokens_BT, eod).items():
                parts[name].append(moments)
        moments = {name: torch.cat(values).cpu().numpy() for name, values in parts.items()}
    mean = partial(shared_resamples(rng), lambda moments_RP2: mean_of_last(_mean(moments_RP2)))
    pairs, last = moments.pop("pairs"), moments.pop("pairs_last")
    next_to = (slice(None), range(probed.n_layers), range(1, probed.n_layers + 1))
    moments |= {"angular_distance": pairs[next_to], "angle_to_end": pairs[:, :-1, -1]}
    profiles = {
        "angular_distance_middle": ScoreByLayer(by_layer=[], score=mean(moments["angular_distance"][:, 1:-1])),
        "angular_distance_last_token": ScoreByLayer(by_layer=[], score=mean(last[next_to])),
    }
    for name, values in moments.items():
        first = int(name not in ("state_norm", "angle_to_end"))
        profiles[name] = ScoreByLayer(by_layer=finites(_mean(values.mean(0))), score=mean(values), first=first)
    return Geometry(profiles=profiles, angles=_by_pair(pairs), angles_last_token=_by_pair(last))


def _batch_moments(probed: ProbedModel, tokens_BT: Tensor, eod: int | None) -> dict[str, Tensor]:
    """By name, for each sequence: the sum over tokens where the quantity is defined, and their number: [B, P, 2]."""
    n_layers = probed.n_layers
    unit_BTLD, last_update = None, None
    sums: dict[str, Tensor] = {}

    # Each result has one tensor, allocated at the first layer: small tensors between large ones fragment the heap.
    def add(name: str, position: int, moments_BT2: Tensor, n_positions: int = n_layers) -> None:
        if name not in sums:
            sums[name] = moments_BT2.new_zeros(len(moments_BT2), n_positions, 2)
        sums[name][:, position] = moments_BT2.sum(1)

    for update in updates(probed, tokens_BT):
        position = update.layer - 1
        before, after = update.before.double(), update.after.double()
        u_BTD = after - before
        if unit_BTLD is None:
            unit_BTLD = before.new_empty(*before.shape[:2], n_layers + 1, before.shape[2])
            unit_BTLD[:, :, 0] = _unit(before)
            add("state_norm", 0, _moments(_norm(before)), n_layers + 1)
        unit_BTLD[:, :, update.layer] = _unit(after)
        add("state_norm", update.layer, _moments(_norm(after)))
        cosine, defined = _cosine(after, before)
        add("state_cosine", position, _moments(cosine, defined))
        add("block_influence", position, _moments(1 - cosine, defined))
        added = [("update", u_BTD, before)]
        if update.branches is not None:
            attention, ffn = (branch.double() for branch in update.branches)
            added += [("attention", attention, before), ("ffn", ffn, before + attention)]
        for name, part, stream in added:
            add(f"{name}_norm", position, _moments(_norm(part)))
            add(f"{name}_ratio", position, _moments(_norm(part) / _norm(stream), _norm(stream) != 0))
            add(f"{name}_cosine", position, _moments(*_cosine(part, stream)))
        if last_update is not None:
            cosine, defined = _cosine(last_update, u_BTD)
            add("update_angle", position - 1, _moments(cosine.arccos(), defined), n_layers - 1)
        last_update = u_BTD
    assert unit_BTLD is not None
    sums.setdefault("update_angle", sums["update_norm"][:, :0])  # a single block has no neighbour
    sums["pairs"], sums["pairs_last"] = _pairs(unit_BTLD, last_positions(tokens_BT, eod))
    return sums


def last_positions(tokens_BT: Tensor, eod: int | None) -> list[int]:
    """Position of the last token of each sequence, from 0: before the padding `eod`s after the end of a document."""
    last = tokens_BT.shape[1] - 1
    if eod is None or tokens_BT.ndim > 2:
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
    cosine = (_unit(a) * _unit(b)).sum(-1).clamp(-1, 1)
    return cosine, (_norm(a) != 0) & (_norm(b) != 0)


def _moments(value: Tensor, defined: Tensor | None = None) -> Tensor:
    """[..., 2]: the value and a count of 1, or 0 and 0 where undefined. NaN counts, and makes the mean None."""
    if defined is None:
        defined = torch.ones_like(value, dtype=torch.bool)
    return torch.stack((torch.where(defined, value, 0), defined.to(value.dtype)), dim=-1)


def _mean(moments: np.ndarray) -> np.ndarray:
    """sum / count over the last dimension; NaN for a count of 0."""
    return ratio(moments[..., 0], moments[..., 1])


def _by_pair(moments_NLL2: np.ndarray) -> Angles:
    angle_LL = _mean(moments_NLL2.mean(0))
    pairs = itertools.combinations(range(len(angle_LL)), 2)
    return dict(zip(pairs, finites(angle_LL[np.triu_indices(len(angle_LL), 1)]), strict=True))


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    found = geometry(context.probed, context.inputs, context.rng(), context.eod)
    rows.add_pairs("angular_distance", found.angles, context.n_tokens)
    if context.probed.causal:
        rows.add_pairs("angular_distance_last_token", found.angles_last_token, len(context.inputs))
    else:  # the last token is not special
        del found.profiles["angular_distance_last_token"]
    for name, profile in found.profiles.items():
        rows.add_layers(name, profile.by_layer, context.n_tokens, profile.first)
        if name in IN_RUNS:
            rows.add_score(name, profile.score)
