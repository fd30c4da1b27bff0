"""How far a task is solved: loss and accuracy by difficulty, and the highest difficulty that is solved.

    accuracy(d) = share of the positions of difficulty d whose most likely token is the target
    solved difficulty = the highest d such that accuracy is at least 0.9 at d and at every lower difficulty

One less than the lowest difficulty where not even that is solved: a result, not a missing value. Its interval is that
of the statistic over resampled sequences; a difficulty that a resample does not hold has no say in it.

Shapes: N sequences, T tokens of one sequence, D difficulties, R resamples.
"""

from dataclasses import dataclass

import numpy as np

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import BootstrapEstimate, Estimate
from sparsedepth.measure.rows import Row

SOLVED = 0.9
"""Least accuracy of a difficulty that counts as solved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ByDifficulty:
    rows: list[Row]
    """difficulty, positions, loss (nat/token) and accuracy, from the lowest difficulty on"""
    solved: BootstrapEstimate


def by_difficulty(
    loss_NT: np.ndarray,
    correct_NT: np.ndarray,
    targets_NT: np.ndarray,
    difficulty_NT: np.ndarray,
    estimate: Estimate,
) -> ByDifficulty:
    """Of the positions that count; there must be one."""
    counts_NT = targets_NT != IGNORED
    levels_D = np.unique(difficulty_NT[counts_NT])
    of_level_DNT = (difficulty_NT == levels_D[:, None, None]) & counts_NT
    n_ND, loss_ND, correct_ND = ((value * of_level_DNT).sum(-1).T for value in (1, loss_NT, correct_NT))
    n_D = n_ND.sum(0)
    rows = [
        {"difficulty": int(level), "positions": int(n), "loss": float(loss / n), "accuracy": float(correct / n)}
        for level, n, loss, correct in zip(levels_D, n_D, loss_ND.sum(0), correct_ND.sum(0), strict=True)
    ]

    def solved(correct_RD: np.ndarray, n_RD: np.ndarray) -> np.ndarray:
        # Both are means over sequences, whose rounding must not decide where the accuracy is 0.9 itself.
        fails_RD = correct_RD < (SOLVED - 1e-9) * n_RD
        first_R = np.where(fails_RD.any(1), fails_RD.argmax(1), len(levels_D))
        return np.concatenate(([levels_D[0] - 1], levels_D))[first_R].astype(np.float64)

    return ByDifficulty(rows=rows, solved=estimate(solved, correct_ND, n_ND))
