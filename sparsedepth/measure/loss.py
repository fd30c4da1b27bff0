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
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.task import IGNORED, SOLVED
from sparsedepth.measure.bootstrap import (
    LEVEL,
    BootstrapEstimate,
    Estimator,
    finites,
    mean_of_last,
    ratio,
    shared_resamples,
)
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored, per_position
from sparsedepth.model.linear import TensorPair
from sparsedepth.probe.fork import Fork, batches, by_sequence, chunk_size, run_forks, stream
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities.quantity import Named

MAX_LOGITS = 2**21
"""Logits computed at a time (8 MiB in fp32; on a GPU more, `probe.fork.chunk_size`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutLoss:
    loss: BootstrapEstimate
    """nat/token, from 0; ln V is guessing"""
    accuracy: BootstrapEstimate
    """share; of equal logits the first counts as the prediction"""
    by_difficulty: list[Named]
    """difficulty, positions, loss (nat/token) and accuracy, by increasing difficulty; none for text"""
    solved: BootstrapEstimate | None
    """None for text"""


def held_out_loss(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> HeldOutLoss:
    """Cross-entropy and accuracy at the scored positions of sequences not used in training."""

    def of_part(part: Scored) -> list[Tensor]:
        (last_BTD,) = deque(stream(probed, part.inputs), maxlen=1)
        return [score_FBT[0] for score_FBT in position_scores(probed, last_BTD[None], part.targets)]

    loss_NT, correct_NT = scores = by_sequence(probed, scored.parts(probed), of_part)
    estimate = shared_resamples(rng)
    loss, accuracy = (
        estimate(per_position, score_NT.mean(-1, dtype=np.float64) * scored.scale, scored.weight) for score_NT in scores
    )
    rows, solved = [], None
    if scored.difficulty is not None:
        known = (values_NT.numpy(force=True) for values_NT in (scored.targets, scored.difficulty))
        rows, solved = by_difficulty(loss_NT, correct_NT, *known, estimate)
    return HeldOutLoss(loss=loss, accuracy=accuracy, by_difficulty=rows, solved=solved)


def by_difficulty(
    loss_NT: np.ndarray, correct_NT: np.ndarray, targets_NT: np.ndarray, difficulty_NT: np.ndarray, estimate: Estimator
) -> tuple[list[Named], BootstrapEstimate]:
    """The rows and the solved difficulty of the scored positions; there must be one."""
    scored_NT = targets_NT != IGNORED
    levels_D = np.unique(difficulty_NT[scored_NT])
    is_level_NTD = scored_NT[..., None] & (difficulty_NT[..., None] == levels_D)
    n_ND, loss_ND, correct_ND = (
        np.einsum("nt,ntd->nd", value_NT, is_level_NTD, dtype=float) for value_NT in (scored_NT, loss_NT, correct_NT)
    )
    n_D = n_ND.sum(0)
    columns = {"difficulty": levels_D, "positions": n_D.astype(int)}
    columns |= {"loss": loss_ND.sum(0) / n_D, "accuracy": correct_ND.sum(0) / n_D}

    def highest(passes_RD: np.ndarray) -> np.ndarray:
        n_passed_R = np.logical_and.accumulate(passes_RD, axis=1).sum(1)
        return np.append(levels_D[0] - 1, levels_D)[n_passed_R].astype(np.float64)

    least = SOLVED - 1e-9  # rounding must not decide at an accuracy of exactly 0.9
    solved = estimate(lambda correct_RD, n_RD: highest(correct_RD >= least * n_RD), correct_ND, n_ND)
    if solved.hi is not None:
        level = 1 - (1 - LEVEL) / len(levels_D)
        upper = [estimate(ratio, *each, level=level).hi for each in zip(correct_ND.T, n_ND.T, strict=True)]
        (reached,) = highest(np.array([[hi is None or hi >= least for hi in upper]]))
        solved = replace(solved, hi=max(solved.hi, float(reached)))
    return pd.DataFrame(columns).to_dict("records"), solved


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
    of a difference in nat/token use `per_position` with `scored.weight`."""

    def of_part(part: Scored) -> TensorPair:
        score = partial(sequence_loss, probed, targets_BT=part.targets, scale=scored.scale, accuracy=accuracy)
        states = list(stream(probed, part.inputs))
        (base_B,) = score(states[-1][None])
        changed_FB = base_B.new_empty(len(forks), *base_B.shape)
        for step in run_forks(probed, states, forks):
            if step.layer == probed.n_layers:
                changed_FB[step.forks] = score(step.after)
        return base_B, changed_FB.transpose(0, 1)

    base_N, changed_NF = by_sequence(probed, scored.parts(probed), of_part)
    return base_N, changed_NF


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
    own_losses = getattr(probed, "own_losses", None)  # a sequence's at each position, where the module itself gives it
    if own_losses and (loss_FB := own_losses(x_FBTD, targets_BT)) is not None:
        loss_FBT = loss_FB[..., None].expand(x_FBTD.shape[:3])
        return (loss_FBT, torch.full_like(loss_FBT, torch.nan)) if accuracy else (loss_FBT,)
    rows = max(1, chunk_size(probed.device, MAX_LOGITS) // probed.vocab_size)
    targets = targets_BT.expand(len(x_FBTD), -1, -1).flatten().split(rows)
    losses, correct = [], []
    for x_nD, target_n in zip(x_FBTD.flatten(0, 2).split(rows), targets, strict=True):
        logits_nV = probed.logits(x_nD[None])[0].float()
        losses.append(F.cross_entropy(logits_nV, target_n, reduction="none", ignore_index=IGNORED))
        if accuracy:
            is_correct_n = (logits_nV.argmax(-1) == target_n).float()
            correct.append(torch.where(losses[-1].isnan(), losses[-1], is_correct_n))
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


def add_exit_rows(context: MeasureContext, rows: Measurements) -> None:
    """lens_loss and early_exit_loss, by logit lens and through the last block, nat/token; the scores are None without
    other exits than the model's own. One forward pass, L - 1 extra blocks, 2 L heads."""
    probed, scored, last = context.probed, context.scored, context.probed.n_layers

    def losses(part: Scored) -> TensorPair:
        """Of each sequence: by logit lens [B, L + 1], through the last block [B, L]."""
        score = partial(sequence_loss, probed, targets_BT=part.targets, scale=scored.scale)
        lens, through = [], []
        for layer, x_BTD in enumerate(stream(probed, part.inputs)):
            lens.append(score(x_BTD[None])[0])
            if layer < last - 1:
                through.append(score(probed.block(last, x_BTD)[None])[0])
        through.append(lens[-1])  # block L of x_(L-1) is x_L
        return torch.stack(lens, dim=1), torch.stack(through, dim=1)

    def mean_increase(loss_RE: np.ndarray) -> np.ndarray:
        return mean_of_last(relative_change(loss_RE[:, :-1], loss_RE[:, -1:]))

    found, estimate = by_sequence(probed, scored.parts(probed), losses), shared_resamples(context.rng())
    for name, loss_NE in zip(("lens_loss", "early_exit_loss"), found, strict=True):
        increase = estimate(mean_increase, loss_NE)
        by_exit = finites(loss_NE.mean(0))
        rows.add_profile(name, by_exit, increase, scored.n_scored, first=0, called=f"{name}_increase")


def add_lens_rows(context: MeasureContext, rows: Measurements) -> None:
    """lens_kl (nat) and lens_overlap of layers 0..L. One forward pass and L + 1 heads."""
    probed, estimate = context.probed, shared_resamples(context.rng())
    found = by_sequence(probed, batches(probed, context.inputs), partial(_batch_lens, probed))
    for name, value_NL in zip(("lens_kl", "lens_overlap"), found, strict=True):
        score = estimate(lambda value_RL: value_RL[:, :-1].mean(-1), value_NL)
        rows.add_profile(name, finites(value_NL.mean(0)), score, context.n_tokens, first=0)


def _batch_lens(probed: ProbedModel, tokens_BT: Tensor) -> Tensor:
    """Means over the tokens of each sequence: kl and overlap, [2, B, L + 1]."""
    x_BTLD = torch.stack([*stream(probed, tokens_BT)], dim=2)
    # The logits of all states of a token exist at once.
    chunk = max(1, chunk_size(probed.device, MAX_LOGITS) // (probed.vocab_size * x_BTLD.shape[2]))
    parts = []
    for x_nLD in x_BTLD.flatten(0, 1).split(chunk):
        logits_nLV = probed.logits(x_nLD).float()
        log_p_nLV = logits_nLV.log_softmax(-1)
        kl_nL = (log_p_nLV.exp() * (log_p_nLV - log_p_nLV[:, -1:])).double().sum(-1)
        top_nLK = logits_nLV.topk(min(TOP, probed.vocab_size)).indices
        shared_nLK = (top_nLK[..., None] == top_nLK[:, -1:, None]).any(-1)
        overlap_nL = torch.where(kl_nL.isnan(), torch.nan, shared_nLK.double().mean(-1))
        parts.append(torch.stack((kl_nL, overlap_nL)))
    return torch.cat(parts, dim=1).unflatten(1, tokens_BT.shape).mean(2)
