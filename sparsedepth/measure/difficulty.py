"""How far a task is solved: loss and accuracy by difficulty, and the highest solved difficulty.

    accuracy(d) = share of the positions of difficulty d whose most likely token is the target
    solved difficulty = the highest d such that accuracy is at least 0.9 at d and at every lower difficulty

If not even the lowest difficulty is solved, the result is one less than it, not missing. The lowest of many accuracies
is lower by noise, so with little above 0.9 at many difficulties the value is too low. The interval is over resampled
sequences; a difficulty absent from a resample counts as solved in it. As resamples add the same noise again, it is
widened to the highest d up to which no accuracy is surely below 0.9: by its interval, at 95% for all D together
(Bonferroni).

Shapes: N sequences, T tokens of one sequence, D difficulties, R resamples.
"""

from dataclasses import dataclass, replace

import numpy as np

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import LEVEL, BootstrapEstimate, Estimator, ratio
from sparsedepth.measure.rows import Row

SOLVED = 0.9
"""Minimum accuracy of a solved difficulty."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ByDifficulty:
    rows: list[Row]
    """difficulty, positions, loss (nat/token) and accuracy, by increasing difficulty"""
    solved: BootstrapEstimate


def by_difficulty(
    loss_NT: np.ndarray,
    correct_NT: np.ndarray,
    targets_NT: np.ndarray,
    difficulty_NT: np.ndarray,
    estimate: Estimator,
) -> ByDifficulty:
    """Of the scored positions; there must be one."""
    scored_NT = targets_NT != IGNORED
    levels_D = np.unique(difficulty_NT[scored_NT])
    of_level_DNT = (difficulty_NT == levels_D[:, None, None]) & scored_NT
    n_ND, loss_ND, correct_ND = ((value * of_level_DNT).sum(-1).T for value in (1, loss_NT, correct_NT))
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
        return ByDifficulty(rows=rows, solved=estimated)
    reached = levels_D[0] - 1
    for level, correct_N, n_N in zip(levels_D, correct_ND.T, n_ND.T, strict=True):
        accuracy = estimate(ratio, correct_N, n_N, level=1 - (1 - LEVEL) / len(levels_D))
        if accuracy.hi is not None and accuracy.hi < SOLVED - 1e-9:
            break
        reached = level
    return ByDifficulty(rows=rows, solved=replace(estimated, hi=max(estimated.hi, float(reached))))
