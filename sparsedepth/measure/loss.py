"""Held-out cross-entropy and accuracy of the model, of forks of it, and of predictions from its early layers.

    loss = mean over the scored positions of -log softmax(logits)[target]   (nat/token; `Scored`)
    accuracy = share of them whose target has the largest logit

How far a task is solved:

    accuracy(d) = share of the positions of difficulty d whose most likely token is the target
    solved difficulty = the highest d such that accuracy is at least 0.9 at d and at every lower difficulty

If not even the lowest difficulty is solved, the result is one less than it, not missing. The lowest of many accuracies
is lower by noise, so with little above 0.9 at many difficulties the value is too low. The interval is over resampled
sequences; a difficulty absent from a resample counts as solved in it. As resamples add the same noise again, it is
widened to the highest d up to which no accuracy is surely below 0.9: by its interval, at 95% for all difficulties
together (Bonferroni).

Predictions from early layers: their loss (`early_exit`), and how far they are from the model's own (`lens`).

    logit lens(l) = loss of head(final norm(x_l)),   l = 0..L; at L it is the model's own loss
    last block(l) = loss of head(final norm(block_L(x_l))),   l = 0..L-1; at L - 1 the model's own loss
    score = mean over the exits before the model's own of (loss at the exit - loss) / loss

    p_l = softmax(head(final norm(x_l))),   p = p_L,   l = 0..L
    kl(l) = E_tokens sum_v p_l ln(p_l / p)      top-5 overlap(l) = E_tokens |top5(p_l) and top5(p)| / 5

Exits through the last block are of 2602.05970, the plain lens, kl and overlap of 2505.13898, which locates the layer
after which the model only refines its prediction: kl falls, and overlap rises, only over the last layers. A model may
be sure, and wrong, early: a low loss increase means that the blocks in between add little to the prediction, a low kl
that they no longer change it. Nothing is fitted, and head and last block were trained on deep states only, so an early
loss may exceed ln V, that of guessing, and a lens may miss information that is there.

Losses are over scored positions; kl and overlap over all tokens, their scores means over l < L.

Shapes: F forks, E exits; in `by_difficulty` D difficulties."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.task import IGNORED, SOLVED
from sparsedepth.measure.bootstrap import (
    LEVEL,
    BootstrapEstimate,
    Estimator,
    ScoreByLayer,
    finites,
    mean_of_last,
    ratio,
    shared_resamples,
)
from sparsedepth.measure.measurements import MeasureContext, Measurements, Row, Scored, position_mean
from sparsedepth.probe.fork import Fork, by_sequence, chunk_size, probing, run_forks, stream
from sparsedepth.probe.probed_model import ProbedModel

MAX_LOGITS = 2**21
"""Logits computed at a time (8 MiB in fp32; on a GPU more, `probe.fork.chunk_size`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutLoss:
    loss: BootstrapEstimate
    """nat/token, from 0; ln V is guessing"""
    accuracy: BootstrapEstimate
    """share; of equal logits the first counts as the prediction"""
    by_difficulty: list[Row]
    """difficulty, positions, loss (nat/token) and accuracy, by increasing difficulty; none for text"""
    solved: BootstrapEstimate | None
    """None for text"""


def held_out_loss(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> HeldOutLoss:
    """Cross-entropy and accuracy at the scored positions of sequences not used in training."""
    parts = []
    with probing(probed):
        for part in scored.parts(probed):
            (last_BTD,) = deque(stream(probed, part.inputs), maxlen=1)
            parts.append(position_scores(probed, last_BTD[None], part.targets))
        loss_NT, correct_NT = (torch.cat([scores[0] for scores in batches]) for batches in zip(*parts, strict=True))

    estimate = shared_resamples(rng)
    estimates = []
    for score_NT in (loss_NT, correct_NT):
        score_N = (score_NT.mean(-1, dtype=torch.float64) * scored.scale).cpu().numpy()
        estimates.append(position_mean(score_N, scored.weight, estimate))
    rows, solved = [], None
    if scored.difficulty is not None:
        arrays = (values.cpu().numpy() for values in (loss_NT, correct_NT, scored.targets, scored.difficulty))
        rows, solved = by_difficulty(*arrays, estimate)
    return HeldOutLoss(loss=estimates[0], accuracy=estimates[1], by_difficulty=rows, solved=solved)


def by_difficulty(
    loss_NT: np.ndarray, correct_NT: np.ndarray, targets_NT: np.ndarray, difficulty_NT: np.ndarray, estimate: Estimator
) -> tuple[list[Row], BootstrapEstimate]:
    """The rows and the solved difficulty of the scored positions; there must be one."""
    scored_NT = targets_NT != IGNORED
    levels_D, level_n = np.unique(difficulty_NT[scored_NT], return_inverse=True)
    shape = len(scored_NT), len(levels_D)
    place_n = np.nonzero(scored_NT)[0] * len(levels_D) + level_n
    n_ND, loss_ND, correct_ND = (
        np.bincount(place_n, value_NT[scored_NT], math.prod(shape)).reshape(shape)
        for value_NT in (scored_NT, loss_NT, correct_NT)
    )
    n_D = n_ND.sum(0)
    rows = [
        {"difficulty": int(level), "positions": int(n), "loss": float(loss / n), "accuracy": float(correct / n)}
        for level, n, loss, correct in zip(levels_D, n_D, loss_ND.sum(0), correct_ND.sum(0), strict=True)
    ]

    def solved(correct_RD: np.ndarray, n_RD: np.ndarray) -> np.ndarray:
        # Both are means over sequences; rounding must not decide at an accuracy of exactly 0.9.
        fails_RD = correct_RD < (SOLVED - 1e-9) * n_RD
        first_R = np.where(fails_RD.any(1), fails_RD.argmax(1), len(levels_D))
        return np.concatenate(([levels_D[0] - 1], levels_D))[first_R].astype(np.float64)

    estimated = estimate(solved, correct_ND, n_ND)
    if estimated.hi is None:
        return rows, estimated
    reached = levels_D[0] - 1
    for level, correct_N, n_N in zip(levels_D, correct_ND.T, n_ND.T, strict=True):
        accuracy = estimate(ratio, correct_N, n_N, level=1 - (1 - LEVEL) / len(levels_D))
        if accuracy.hi is not None and accuracy.hi < SOLVED - 1e-9:
            break
        reached = level
    return rows, replace(estimated, hi=max(estimated.hi, float(reached)))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """loss / ln 2 / bytes per token, from nat/token: comparable across tokenizers, unlike loss per token."""
    if not bytes_per_token > 0:
        raise ValueError(f"bytes_per_token={bytes_per_token} must be above 0: the held-out text has no bytes")
    return loss / math.log(2) / bytes_per_token


def fork_losses(
    probed: ProbedModel, scored: Scored, forks: Sequence[Fork], *, accuracy: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """base_N and changed_NF: each sequence's loss, nat/token, without and with each fork's change; with `accuracy`
    base_N2 and changed_NF2, of both. Scaled as in `Scored`: their means over sequences are the losses. For the interval
    of a difference in nat/token use `position_mean` with `scored.weight`."""
    score = partial(sequence_loss, accuracy=accuracy)
    base, changed = [], []
    with probing(probed):
        for part in scored.parts(probed):
            states = list(stream(probed, part.inputs))
            base.append(score(probed, states[-1][None], part.targets, scored.scale)[0])
            of_forks = base[-1].new_empty(len(forks), *base[-1].shape)
            for step in run_forks(probed, states, forks):
                if step.layer == probed.n_layers:
                    of_forks[step.forks] = score(probed, step.after, part.targets, scored.scale)
            changed.append(of_forks.transpose(0, 1))
        return torch.cat(base).cpu().numpy(), torch.cat(changed).cpu().numpy()


def relative_change(changed: np.ndarray, base: np.ndarray) -> np.ndarray:
    """(changed - base) / base, of losses of matching shape; NaN where the base is 0."""
    return ratio(changed - base, base)


def sequence_loss(
    probed: ProbedModel, x_FBTD: Tensor, targets_BT: Tensor, scale: float, *, accuracy: bool = False
) -> Tensor:
    """loss_FB in fp64, from states before the final norm: sum over scored positions / T x `Scored.scale`; with
    `accuracy` both, [F, B, 2]."""
    by_position = position_scores(probed, x_FBTD, targets_BT, accuracy=accuracy)
    means = torch.stack([score.mean(-1, dtype=torch.float64) for score in by_position], dim=-1) * scale
    return means if accuracy else means[..., 0]


def position_scores(
    probed: ProbedModel, x_FBTD: Tensor, targets_BT: Tensor, *, accuracy: bool = True
) -> tuple[Tensor, ...]:
    """loss_FBT and, with `accuracy`, correct_FBT (1 if the target has the largest logit): fp32, 0 where not scored."""
    rows = max(1, chunk_size(probed.device, MAX_LOGITS) // probed.vocab_size)
    targets = targets_BT.expand(len(x_FBTD), -1, -1).flatten().split(rows)
    losses, correct = [], []
    for x_nD, target_n in zip(x_FBTD.flatten(0, 2).split(rows), targets, strict=True):
        logits_nV = probed.logits(x_nD[None])[0].float()
        losses.append(F.cross_entropy(logits_nV, target_n, reduction="none", ignore_index=IGNORED))
        if accuracy:
            correct.append((logits_nV.argmax(-1) == target_n).float())
    return tuple(torch.cat(scores).view(x_FBTD.shape[:3]) for scores in (losses, correct) if scores)


def add_loss_rows(context: MeasureContext, rows: Measurements) -> None:
    """Loss, accuracy and loss by difficulty of held-out sequences; the loss at a common context if contexts differ."""
    config = context.config
    scored = context.sequences(config.seq_len, config.val_tokens)
    val = held_out_loss(context.probed, scored, context.rng())
    common = val
    if config.eval_seq_len not in (None, config.seq_len):
        at_common = context.sequences(config.eval_seq_len, config.val_tokens)
        common = held_out_loss(context.probed, at_common, context.rng())
    rows.add_score("val_loss", val.loss)
    rows.add_score("val_accuracy", val.accuracy)
    if val.solved is not None:
        rows.add_score("solved_difficulty", val.solved)
        rows.difficulty.extend({"step": rows.step, **row} for row in val.by_difficulty)
    rows.add_score("val_loss_common", common.loss)
    known = context.bytes_per_token is not None and val.loss.value is not None
    bits = bits_per_byte(val.loss.value, context.bytes_per_token) if known else None
    rows.summary.update({"val_loss_tokens": scored.n_scored, "val_bits_per_byte": bits})


TOP = 5
"""Number of most likely tokens compared, or all of a smaller vocabulary."""


def early_exit(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """lens_loss and early_exit_loss, by logit lens and through the last block, nat/token; the scores are None without
    other exits than the model's own. One forward pass, L - 1 extra blocks, 2 L heads."""
    with probing(probed):
        parts = [_exit_losses(probed, part, scored.scale) for part in scored.parts(probed)]
        losses = [torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)]
    estimate = shared_resamples(rng)

    def mean_increase(loss_RE: np.ndarray) -> np.ndarray:
        return mean_of_last(relative_change(loss_RE[:, :-1], loss_RE[:, -1:]))

    return {
        name: ScoreByLayer(by_layer=finites(loss_NE.mean(0)), score=estimate(mean_increase, loss_NE), first=0)
        for name, loss_NE in zip(("lens_loss", "early_exit_loss"), losses, strict=True)
    }


def _exit_losses(probed: ProbedModel, part: Scored, scale: float) -> tuple[Tensor, Tensor]:
    """Losses of each sequence: by logit lens [B, L + 1], through the last block [B, L]."""
    last = probed.n_layers
    lens, through = [], []
    for layer, x_BTD in enumerate(stream(probed, part.inputs)):
        lens.append(sequence_loss(probed, x_BTD[None], part.targets, scale)[0])
        if layer < last - 1:
            through.append(sequence_loss(probed, probed.block(last, x_BTD)[None], part.targets, scale)[0])
    through.append(lens[-1])  # block L of x_(L-1) is x_L
    return torch.stack(lens, dim=1), torch.stack(through, dim=1)


def lens(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """lens_kl (nat) and lens_overlap of layers 0..L. One forward pass and L + 1 heads."""
    kl_overlap_N2L = by_sequence(probed, tokens_NT, lambda tokens_BT: _batch_lens(probed, tokens_BT))
    estimate = shared_resamples(rng)

    def mean_before_last(value_RL: np.ndarray) -> np.ndarray:
        return value_RL[:, :-1].mean(-1)

    return {
        name: ScoreByLayer(by_layer=finites(value_NL.mean(0)), score=estimate(mean_before_last, value_NL), first=0)
        for name, value_NL in zip(("lens_kl", "lens_overlap"), np.moveaxis(kl_overlap_N2L, 1, 0), strict=True)
    }


def _batch_lens(probed: ProbedModel, tokens_BT: Tensor) -> Tensor:
    """Means over the tokens of each sequence: kl and overlap, [B, 2, L + 1]."""
    states = list(stream(probed, tokens_BT))
    n_sequences, n_tokens, _ = states[0].shape
    # The logits of all states exist at once. On a CPU each state still gets MAX_LOGITS: smaller chunks would cost more
    # in calls.
    chunk = max(1, max(MAX_LOGITS, chunk_size(probed.device, MAX_LOGITS) // len(states)) // probed.vocab_size)
    kl_overlap_2nL = states[0].new_zeros(2, n_sequences * n_tokens, len(states), dtype=torch.float64)
    top = min(TOP, probed.vocab_size)
    for start in range(0, n_sequences * n_tokens, chunk):
        logits = [probed.logits(x_BTD.flatten(0, 1)[None, start : start + chunk])[0].float() for x_BTD in states]
        final_nV, final_nK = logits[-1].log_softmax(-1), logits[-1].topk(top).indices
        for layer, logits_nV in enumerate(logits):
            log_p_nV = logits_nV.log_softmax(-1)
            kl_overlap_2nL[0, start : start + chunk, layer] = (log_p_nV.exp() * (log_p_nV - final_nV)).double().sum(-1)
            shared_nKK = logits_nV.topk(top).indices[:, :, None] == final_nK[:, None, :]
            kl_overlap_2nL[1, start : start + chunk, layer] = shared_nKK.any(-1).double().mean(-1)
    return kl_overlap_2nL.unflatten(1, (n_sequences, n_tokens)).mean(2).transpose(0, 1)


def add_exit_rows(context: MeasureContext, rows: Measurements) -> None:
    profiles = early_exit(context.probed, context.scored, context.rng())
    rows.add_profiles(profiles, context.scored.n_scored, {name: f"{name}_increase" for name in profiles})


def add_lens_rows(context: MeasureContext, rows: Measurements) -> None:
    rows.add_profiles(lens(context.probed, context.inputs, context.rng()), context.n_tokens)
