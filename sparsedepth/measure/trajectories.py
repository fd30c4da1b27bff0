"""Trajectories: how the rotation of each token's state is distributed over the layers.

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

Shapes: M middle layers, V valid tokens, P points.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, finite, finites, ratio, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements, Row
from sparsedepth.probe.fork import batches, probing, stream
from sparsedepth.probe.probed_model import ProbedModel

NO_ID = -1
"""Id of image patches, which have none."""
MIN_LAYERS = 4
"""With fewer there are no two middle layers."""
MAX_POINTS = 2000
"""Tokens kept individually, drawn at random: as many as in the published figure."""
MIN_ROTATION = 1e-6
"""rad, root of the sum of squares over layers; smaller rotations are rounding errors of fp32
states: without a shape, and, as differences between tokens, without principal components."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryShapes:
    by_layer: dict[str, np.ndarray]
    """trajectory_mean, early_stop_ideal and even_ideal, [L], rad; the components trajectory_pc1 and
    _pc2, unit vectors whose largest entry is positive, NaN if all tokens are equal"""
    variance_shares: tuple[float | None, float | None]
    """of the components, from 0 to 1"""
    scores: dict[str, BootstrapEstimate]
    """early_stop_share and even_share, of tokens near each ideal"""
    points: list[Row]
    """single tokens: the columns of quantities.TOKENS but the step"""
    n_tokens: int
    """valid tokens"""


def trajectories(
    probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator, eod: int | None = None
) -> TrajectoryShapes | None:
    """One forward pass. `eod` ends a document; None = unknown. None for fewer than MIN_LAYERS
    layers, without a valid token, and if a state is not finite."""
    if probed.n_layers < MIN_LAYERS:
        return None
    with probing(probed):
        # Half as many tokens at once: their states are fp64 here.
        parts = [_angles(probed, tokens_BT) for tokens_BT in batches(probed, tokens_NT, memory=2)]
        angles_NTL, exists_NT = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    ids_NT = tokens_NT.numpy(force=True) if tokens_NT.ndim == 2 else np.full(tokens_NT.shape[:2], NO_ID)
    valid_NT = exists_NT & (ids_NT != eod) if eod is not None else exists_NT
    angles_VL = angles_NTL[valid_NT]
    if not len(angles_VL) or not np.isfinite(angles_VL).all():
        return None
    early_L, even_L = ideals(probed.n_layers, float(angles_VL[:, 1:-1].mean()))
    to_ideals_V2 = _angles_to(angles_VL[:, 1:-1], np.stack((early_L, even_L))[:, 1:-1])
    nearest_V = nearest(to_ideals_V2, probed.n_layers)
    mean_L = angles_VL.mean(0)
    components_2L, shares = _components(angles_VL - mean_L)
    value_V4 = np.hstack((to_ideals_V2, (angles_VL - mean_L) @ components_2L.T))
    chosen_P = np.sort(rng.permutation(len(angles_VL))[:MAX_POINTS])
    estimate = shared_resamples(rng)

    def share(name: str) -> BootstrapEstimate:
        near_NT = np.zeros(valid_NT.shape, dtype=bool)
        near_NT[valid_NT] = nearest_V == name
        return estimate(ratio, near_NT.sum(1), valid_NT.sum(1))

    return TrajectoryShapes(
        by_layer={
            "trajectory_mean": mean_L,
            "trajectory_pc1": components_2L[0],
            "trajectory_pc2": components_2L[1],
            "early_stop_ideal": early_L,
            "even_ideal": even_L,
        },
        variance_shares=shares,
        scores={"early_stop_share": share("early stop"), "even_share": share("even")},
        points=_points(ids_NT, eod, np.argwhere(valid_NT)[chosen_P], nearest_V[chosen_P], value_V4[chosen_P]),
        n_tokens=len(angles_VL),
    )


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


def _angles(probed: ProbedModel, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """theta_BTL in fp64, and exists_BT: no state of the token has length 0."""
    shape = tokens_BT.shape[:2]
    unit_BTD, exists_BT = torch.empty(0), torch.ones(shape, dtype=torch.bool, device=tokens_BT.device)
    angles_BTL = torch.empty(*shape, probed.n_layers, dtype=torch.float64, device=tokens_BT.device)
    for layer, x_BTD in enumerate(stream(probed, tokens_BT)):
        norm_BT = torch.linalg.vector_norm(x_BTD.double(), dim=-1)
        exists_BT &= norm_BT != 0
        last_BTD, unit_BTD = unit_BTD, x_BTD.double() / norm_BT[..., None]
        if layer:
            angles_BTL[:, :, layer - 1] = (last_BTD * unit_BTD).sum(-1).clamp(-1, 1).arccos()
    return angles_BTL, exists_BT


def _angles_to(angles_VM: np.ndarray, ideals_2M: np.ndarray) -> np.ndarray:
    """Angle (rad) of each trajectory's middle layers with each ideal's: [V, 2]; pi/2 for one of length 0."""
    units = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x in (angles_VM, ideals_2M)]
    to_ideals_V2 = np.arccos((units[0] @ units[1].T).clip(-1, 1))
    turns_V = np.linalg.norm(angles_VM, axis=1) > MIN_ROTATION
    return np.where(turns_V[:, None], to_ideals_V2, math.pi / 2)


def _components(centred_VL: np.ndarray) -> tuple[np.ndarray, tuple[float | None, float | None]]:
    """The first two principal components [2, L] and their shares of the variance."""
    values_L, vectors_LL = np.linalg.eigh(centred_VL.T @ centred_VL / len(centred_VL))
    if values_L.sum() < MIN_ROTATION**2:
        return np.full((2, centred_VL.shape[1]), np.nan), (None, None)
    components_2L = vectors_LL.T[[-1, -2]]
    largest_2 = np.abs(components_2L).round(6).argmax(1)  # rounded, so that ties are resolved alike
    components_2L *= np.sign(components_2L[[0, 1], largest_2])[:, None]
    first, second = (max(float(value), 0.0) / float(values_L.sum()) for value in values_L[[-1, -2]])
    return components_2L, (first, second)


def _points(
    ids_NT: np.ndarray, eod: int | None, place_P2: np.ndarray, nearest_P: np.ndarray, value_P4: np.ndarray
) -> list[Row]:
    """`value_P4`: the angles to both ideals, and the places along both components."""
    begin_NT = np.zeros(ids_NT.shape, dtype=np.int64)  # of each token's document; 0 = before the sequence, or unknown
    if eod is not None:
        begin_NT[:, 1:] = np.where(ids_NT[:, :-1] == eod, np.arange(1, ids_NT.shape[1]), 0)
    begin_NT = np.maximum.accumulate(begin_NT, axis=1)
    return [
        {
            "sequence": int(n),
            "position": int(t),
            "token_id": None if ids_NT[n, t] == NO_ID else int(ids_NT[n, t]),
            "document_position": int(t - begin_NT[n, t]) if begin_NT[n, t] else None,
            "nearest": str(name),
            "to_early_stop": float(to_early),
            "to_even": float(to_even),
            "pc1": finite(pc1),
            "pc2": finite(pc2),
        }
        for (n, t), name, (to_early, to_even, pc1, pc2) in zip(place_P2, nearest_P, value_P4, strict=True)
    ]


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    """The model's scores and a row per kept token; nothing without valid tokens."""
    result = trajectories(context.probed, context.inputs, context.rng(), context.eod)
    if result is None:
        return
    for name, estimate in result.scores.items():
        rows.add_score(name, estimate)
    for name, values in result.by_layer.items():
        rows.add_layers(name, finites(values), result.n_tokens)
    for i, share in enumerate(result.variance_shares, start=1):
        rows.summary[f"trajectory_pc{i}_share"] = share
    rows.tokens.extend({"step": rows.step, **point} for point in result.points)
