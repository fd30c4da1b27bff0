"""Successor: a cycle of N nodes as shuffled pairs (node, next), then queries for the k-th successor of a node.

    inputs   a b  c d  ...   k x  k x ...                   target at x of a query: the node k steps after x

Difficulty: k, uniform in min_hops..max_hops for each query. Only answers are scored. Needed depth: about log2 k, by
doubling. Tokens: nodes 0..N-1, k N+k. Depo of 2512.17351 in label form; Depo also draws N, and writes answers as text.

Shapes: N sequences, T tokens of one sequence, C nodes of a cycle, Q queries of a sequence.
"""

import numpy as np

from sparsedepth.config.task import IGNORED, TaskConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.data.tasks.draws import Draws


def draw(task: TaskConfig, draws: Draws, n_sequences: int, seq_len: int, held_out: bool) -> Sequences:
    """The pairs of the cycle, then as many queries as fit."""
    assert task.cycle_len is not None and task.min_hops is not None and task.max_hops is not None
    nodes, n_queries = task.cycle_len, (seq_len - 2 * task.cycle_len) // 2
    cycle_NC = draws.permutations(n_sequences, nodes)
    shuffled_NC = draws.permutations(n_sequences, nodes)
    pairs_NC2 = np.stack(
        [np.take_along_axis(cycle_NC, (shuffled_NC + step) % nodes, axis=1) for step in (0, 1)], axis=2
    )
    k_NQ = task.min_hops + draws.below(task.max_hops - task.min_hops + 1, n_sequences, n_queries)
    place_NQ = draws.below(nodes, n_sequences, n_queries)  # of the queried node on its cycle
    node_NQ, answer_NQ = (np.take_along_axis(cycle_NC, place % nodes, axis=1) for place in (place_NQ, place_NQ + k_NQ))
    queries_NQ2 = np.stack((nodes + k_NQ, node_NQ), axis=2)
    targets_NT = np.full((n_sequences, seq_len), IGNORED)
    targets_NT[:, 2 * nodes + 1 :: 2] = answer_NQ
    difficulty_NT = np.zeros((n_sequences, seq_len), dtype=np.int64)
    difficulty_NT[:, 2 * nodes + 1 :: 2] = k_NQ
    inputs_NT = np.concatenate((pairs_NC2.reshape(n_sequences, -1), queries_NQ2.reshape(n_sequences, -1)), axis=1)
    return Sequences(inputs=inputs_NT, targets=targets_NT, difficulty=difficulty_NT)
