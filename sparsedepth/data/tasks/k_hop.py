"""k-hop induction: follow 'what came after the last time this letter occurred' k times (2402.09268, definition 4.1).

    inputs   k  x_1  x_2 ... x_(T-1),   x_i != x_(i-1)
    find(i) = 1 + max {j < i: x_j = x_i},   target at i: x at find(find(... i)), k times; 'none' where there is no j

Difficulty: k, one per sequence, uniform in min_hops..max_hops. All letters are scored, the first token is not. Needed
depth: floor(log2 k) + 2, by doubling. Tokens: letters 0..A-1, 'none' A, k A+1+k.

Shapes: N sequences, T tokens of one sequence."""

import numpy as np

from sparsedepth.config.task import IGNORED, TaskConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.data.tasks.draws import Draws


def draw(task: TaskConfig, draws: Draws, n_sequences: int, seq_len: int, held_out: bool) -> Sequences:
    """Sequences with one k each."""
    assert task.letters is not None and task.min_hops is not None and task.max_hops is not None
    k_N = task.min_hops + draws.below(task.max_hops - task.min_hops + 1, n_sequences)
    first_N1 = draws.below(task.letters, n_sequences, 1)
    moves_NT = 1 + draws.below(task.letters - 1, n_sequences, seq_len - 2)  # no letter repeats directly
    letter_NT = np.concatenate((first_N1, moves_NT), axis=1).cumsum(axis=1) % task.letters
    ignored_N1 = np.full((n_sequences, 1), IGNORED)
    return Sequences(
        inputs=np.concatenate((task.letters + 1 + k_N[:, None], letter_NT), axis=1),
        targets=np.concatenate((ignored_N1, hop(letter_NT, k_N, none=task.letters)), axis=1),
        difficulty=np.broadcast_to(k_N[:, None], (n_sequences, seq_len)),
    )


def hop(letter_NT: np.ndarray, k_N: np.ndarray, none: int) -> np.ndarray:
    """The letter k hops from each place, or `none`: [N, T]."""
    n_sequences, length = letter_NT.shape
    # Position 0 means 'none', and leads to itself; position i + 1 is letter i.
    find_NT = np.concatenate((np.zeros((n_sequences, 1), dtype=np.int64), _find(letter_NT)), axis=1)
    position_NT = np.broadcast_to(np.arange(1, length + 1), letter_NT.shape).copy()
    for n_hops in range(int(k_N.max(initial=0))):
        active_N = k_N > n_hops
        position_NT[active_N] = np.take_along_axis(find_NT[active_N], position_NT[active_N], axis=1)
    padded_NT = np.concatenate((np.full((n_sequences, 1), none), letter_NT), axis=1)
    return np.take_along_axis(padded_NT, position_NT, axis=1)


def _find(letter_NT: np.ndarray) -> np.ndarray:
    """The position, from 1, after the letter's last occurrence; 0 without one."""
    order_NT = letter_NT.argsort(axis=1, kind="stable")  # equal letters are adjacent, in order of position
    sorted_NT = np.take_along_axis(letter_NT, order_NT, axis=1)
    next_NT = np.zeros_like(letter_NT)
    next_NT[:, 1:] = np.where(sorted_NT[:, 1:] == sorted_NT[:, :-1], order_NT[:, :-1] + 2, 0)
    unsorted_NT = np.empty_like(next_NT)
    np.put_along_axis(unsorted_NT, order_NT, next_NT, axis=1)
    return unsorted_NT
