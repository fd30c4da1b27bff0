"""State tracking, the word problem of a group: token 0 is a start state, then come operations.

    labels   inputs   s_0  g_1  g_2  ... g_(T-1)            targets  s_0  s_1  s_2 ... s_(T-1),   s_t = g_t(s_(t-1))
    text     tokens   s_0  g_1 .. g_n  =  s_n  g_(n+1) ...  the target is the next token

Difficulty: the number of operations so far, in text form since the last written state. Tokens: states 0..S-1,
operations S..S+K-1, in text form '=' S+K. All positions are scored, also the first (difficulty 0, a copy); in text form
held-out sequences are scored only at '=', since all other tokens are random operations.

Needed depth: a group that is not solvable (A5, S5) cannot be followed by a fixed depth at any length; in trained models
the length that can be tracked grows with depth (2404.08819; 2503.03961). Z60 and A4xZ5 are solvable controls of order
60. The state after operation g is g(x) of a point x; g s (first s, then g) of an element s.

Shapes: N sequences, T tokens of one sequence, K operations, S states, G elements of the group, P points."""

import itertools
from functools import lru_cache

import numpy as np

from sparsedepth.config.task import IGNORED, TaskConfig, n_states
from sparsedepth.data.sequences import Sequences
from sparsedepth.data.tasks.draws import Draws

OPERATION_STREAM = 2**63 + 1
"""The random stream that chooses operations, different from training seeds and the held-out stream."""


def draw(task: TaskConfig, draws: Draws, n_sequences: int, seq_len: int, held_out: bool) -> Sequences:
    """Sequences of the task's form."""
    table_SK = next_state(task)
    if task.task_form == "text":
        return _text(task, table_SK, draws, n_sequences, seq_len, held_out)
    states = len(table_SK)
    start_N = draws.below(states, n_sequences)
    operation_NT = draws.below(table_SK.shape[1], n_sequences, seq_len - 1)
    state_NT = follow(table_SK, start_N, operation_NT)
    return Sequences(
        inputs=np.concatenate((start_N[:, None], states + operation_NT), axis=1),
        targets=state_NT,
        difficulty=np.broadcast_to(np.arange(seq_len), state_NT.shape),
    )


def follow(table_SK: np.ndarray, start_N: np.ndarray, operation_NT: np.ndarray) -> np.ndarray:
    """The state before the first operation and after each: [N, T + 1]."""
    n_operations = table_SK.shape[1]
    flat_SK = table_SK.ravel()
    state_TN = np.empty((operation_NT.shape[1] + 1, len(start_N)), dtype=np.int64)
    state_TN[0] = start_N
    for place, operation_N in enumerate(np.ascontiguousarray(operation_NT.T)):
        np.take(flat_SK, state_TN[place] * n_operations + operation_N, out=state_TN[place + 1])
    return state_TN.T


def _text(
    task: TaskConfig, table_SK: np.ndarray, draws: Draws, n_sequences: int, seq_len: int, held_out: bool
) -> Sequences:
    assert task.max_gap is not None
    n_segments = -(-seq_len // 3)  # the shortest has an operation, '=' and the state
    gap_NM = 1 + draws.below(task.max_gap, n_sequences, n_segments)
    equals_NM = np.cumsum(gap_NM + 2, axis=1) - 1  # position of each '=', after s_0, g_1 .. g_n
    length = seq_len + 1
    is_equals_NS = np.zeros((n_sequences, length + 1), dtype=bool)  # the last column takes positions past the end
    np.put_along_axis(is_equals_NS, np.minimum(equals_NM, length), True, axis=1)
    is_equals_NS = is_equals_NS[:, :length]
    is_state_NS = np.roll(is_equals_NS, 1, axis=1)
    is_state_NS[:, 0] = True
    is_operation_NS = ~(is_equals_NS | is_state_NS)
    states = n_states(task)
    n_operations = table_SK.shape[1]
    operation_NS = draws.below(n_operations, n_sequences, length)
    # The identity is used at positions without an operation.
    extended_SK = np.concatenate((table_SK, np.arange(states)[:, None]), axis=1)
    start_N = draws.below(states, n_sequences)
    state_NS = follow(extended_SK, start_N, np.where(is_operation_NS, operation_NS, n_operations)[:, 1:])
    tokens_NS = np.where(is_state_NS, state_NS, np.where(is_equals_NS, states + n_operations, states + operation_NS))
    so_far_NS = is_operation_NS.cumsum(axis=1)
    written_NS = np.maximum.accumulate(np.where(is_state_NS, so_far_NS, 0), axis=1)  # until the last written state
    scored_NT = is_equals_NS[:, :-1] if held_out else np.ones((n_sequences, seq_len), dtype=bool)
    return Sequences(
        inputs=tokens_NS[:, :-1],
        targets=np.where(scored_NT, tokens_NS[:, 1:], IGNORED),
        difficulty=(so_far_NS - written_NS)[:, :-1],
    )


@lru_cache
def elements(group: str) -> np.ndarray:
    """All elements, int64 [G, P], in the order of their images; the identity is the first."""
    if group == "A4xZ5":
        factors = itertools.product(elements("A4"), elements("Z5"))
        return np.array([(a_4[:, None] * 5 + z_5).ravel() for a_4, z_5 in factors])  # (a, z) is point 5 a + z
    kind = group[0]
    n = int(group[1:])
    if kind == "Z":
        return (np.arange(n)[:, None] + np.arange(n)) % n
    permutations = np.array(list(itertools.permutations(range(n))), dtype=np.int64)
    inversions = sum(permutations[:, i] > permutations[:, j] for i in range(n) for j in range(i + 1, n))
    return permutations if kind == "S" else permutations[inversions % 2 == 0]


def products(left_GP: np.ndarray, right_HP: np.ndarray) -> np.ndarray:
    """left after right, for every pair: [G, H, P]."""
    return left_GP[np.arange(len(left_GP))[:, None, None], right_HP[None]]


def generates(operations_KP: np.ndarray, order: int) -> bool:
    """Whether the operations generate the whole group: products of any number of them are all its elements."""
    reached_GP = operations_KP
    n_before = 0
    while len(reached_GP) > n_before:
        n_before = len(reached_GP)
        further_NP = products(operations_KP, reached_GP).reshape(-1, operations_KP.shape[1])
        reached_GP = np.unique(np.concatenate((reached_GP, further_NP)), axis=0)
    return n_before == order


def operations(task: TaskConfig) -> np.ndarray:
    """The operations [K, P]: all elements, or `n_operations` distinct generators without the identity. A function of
    group, n_operations and operation_seed only, so runs of all seeds learn the same task."""
    assert task.task_group is not None
    group_elements = elements(task.task_group)
    if task.n_operations is None:
        return group_elements
    draws = Draws(task.operation_seed or 0, OPERATION_STREAM)
    while True:
        chosen = group_elements[1 + draws.permutations(1, len(group_elements) - 1)[0, : task.n_operations]]
        if generates(chosen, len(group_elements)):
            return chosen


def next_state(task: TaskConfig) -> np.ndarray:
    """The state after an operation in a state, int64 [S, K]."""
    assert task.task_group is not None
    operations_KP = operations(task)
    if task.tracked == "point":
        return operations_KP.T.copy()
    group_elements = elements(task.task_group)
    index = {image.tobytes(): place for place, image in enumerate(group_elements)}
    after_KSP = products(operations_KP, group_elements)
    return np.array([[index[image.tobytes()] for image in after_SP] for after_SP in after_KSP]).T.copy()
