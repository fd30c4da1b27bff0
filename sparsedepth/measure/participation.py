"""Participation ratio and effective rank: the number of directions over which the residual stream, and each block's
update, spread their variance, by layer.

    C_l = covariance over tokens of the entries of x_l, with eigenvalues e_i;   p_i = e_i / sum e
    participation ratio of layer l = (tr C_l)^2 / tr C_l^2 = 1 / sum p_i^2,   l = 0..L
    effective rank of layer l      = exp(-sum p_i ln p_i)                     (Roy & Vetterli 2007)
    update rank of layer l         = effective rank of u_l = x_l - x_(l-1),   l = 1..L

Each is 1 if one direction holds all variance, and k if k directions hold equal shares; the effective rank gives more
weight to small shares, and is never below the ratio. Unlike residual variance neither depends on the scale of the
stream: if a few growing directions take over, the variance grows and the ratio falls. Source of the ratio:
Litwin-Kumar et al. 2017 (Neuron 93, 1153); along the layers of networks 1906.00443. Deviates: Roy & Vetterli take
shares of singular values, the roots of these.

For n tokens both are biased downwards: 1 / ratio is too large by about 1 / n for independent tokens. There are no
intervals: resamples of sequences would need a D x D matrix per sequence.
"""

import itertools
import math

import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import complete_mean, finite
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.measure.spectra import batched
from sparsedepth.probe.fork import batches, probing, record_states, token_count
from sparsedepth.probe.probed_model import ProbedModel


def participation(probed: ProbedModel, tokens_NT: Tensor) -> dict[str, list[float | None]]:
    """participation_ratio and effective_rank of layers 0..L, update_rank of layers 1..L; None
    without variance. One forward pass without the head, with 8 (2 L + 1) D^2 bytes of sums."""
    sums: list[tuple[Tensor, Tensor]] = []
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT):
            states = record_states(probed, tokens_BT)
            updates = (after - before for before, after in itertools.pairwise(states))
            values_nD = (x_BTD.flatten(0, 1).double() for x_BTD in itertools.chain(states, updates))
            moments = [(x_nD.sum(0), x_nD.T @ x_nD) for x_nD in values_nD]
            sums = [(a + c, b + d) for (a, b), (c, d) in zip(sums, moments, strict=True)] if sums else moments
    n_tokens, ratios, ranks = token_count(tokens_NT), [], []
    covariances = [
        product_DD / n_tokens - torch.outer(sum_D / n_tokens, sum_D / n_tokens) for sum_D, product_DD in sums
    ]
    spectra = batched(torch.linalg.eigvalsh, covariances)
    for (_, product_DD), covariance_DD, energy_D in zip(sums, covariances, spectra, strict=True):
        trace = covariance_DD.trace()
        is_constant = bool(trace <= 1e-12 * product_DD.trace() / n_tokens)  # but for rounding errors
        ratios.append(None if is_constant else finite((trace**2 / covariance_DD.square().sum()).item()))
        share_D = energy_D.clamp(min=0) / energy_D.clamp(min=0).sum()  # negative ones are rounding errors
        ranks.append(None if is_constant else finite(math.exp(-torch.special.xlogy(share_D, share_D).sum().item())))
    n_states = probed.n_layers + 1
    of_states = {"participation_ratio": ratios[:n_states], "effective_rank": ranks[:n_states]}
    return of_states | {"update_rank": ranks[n_states:]}


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name, values in participation(context.probed, context.inputs).items():
        first = int(name == "update_rank")
        rows.summary[name] = complete_mean(values[1 - first :])
        rows.add_layers(name, values, context.n_tokens, first=first)
