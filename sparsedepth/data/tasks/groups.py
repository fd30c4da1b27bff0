"""Finite groups as permutations of points, and the state transition tables of their operations.

    state after operation g:   g(x) of a point x;   g s (first s, then g) of an element s

S5 and A5 are not solvable, so tracking them is complete for NC1 and out of reach of a fixed depth (2404.08819); S3,
Z60 and A4xZ5 are solvable. A5, Z60 and A4xZ5 have 60 elements each.

Shapes: G elements of the group, P points, K operations, S states.
"""

import itertools
from functools import lru_cache

import numpy as np

from sparsedepth.config.task import Group, TaskConfig
from sparsedepth.data.tasks.draws import Draws

OPERATION_STREAM = 2**63 + 1
"""The random stream that chooses operations, different from training seeds and the held-out stream."""


@lru_cache
def elements(group: Group) -> np.ndarray:
    """All elements, int64 [G, P], in the order of their images; the identity is the first."""
    if group in ("S3", "S5"):
        return _all(int(group[1]))
    if group == "A5":
        return _even(5)
    if group == "Z60":
        return (np.arange(60)[:, None] + np.arange(60)) % 60
    assert group == "A4xZ5"
    cycle = (np.arange(5)[:, None] + np.arange(5)) % 5
    pairs = [a_4[:, None] * 5 + z_5 for a_4, z_5 in itertools.product(_even(4), cycle)]  # (a, z) is point 5 a + z
    return np.array([pair.ravel() for pair in pairs])


def _all(n: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(n))), dtype=np.int64)


def _even(n: int) -> np.ndarray:
    permutations = _all(n)
    inversions = sum(permutations[:, i] > permutations[:, j] for i in range(n) for j in range(i + 1, n))
    return permutations[inversions % 2 == 0]


def products(left_GP: np.ndarray, right_HP: np.ndarray) -> np.ndarray:
    """left after right, for every pair: [G, H, P]."""
    return left_GP[np.arange(len(left_GP))[:, None, None], right_HP[None]]


def generates(operations_KP: np.ndarray, order: int) -> bool:
    """Whether the operations generate the whole group."""
    reached = {tuple(range(operations_KP.shape[1]))}
    frontier = np.array(list(reached))
    while len(frontier):
        images = {
            tuple(image) for image in products(operations_KP, frontier).reshape(-1, operations_KP.shape[1]).tolist()
        }
        frontier = np.array(list(images - reached))
        reached |= images
    return len(reached) == order


def operations(task: TaskConfig) -> np.ndarray:
    """The operations [K, P]: all elements, or `n_operations` distinct generators without the identity.

    A function of group, n_operations and operation_seed only, so runs of all seeds learn the same task.
    """
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
