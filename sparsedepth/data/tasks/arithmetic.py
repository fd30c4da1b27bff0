"""Modular arithmetic: prefix expressions of + - x, concatenated, each followed by '=', where its value is the target.

    inputs   + 3 x 5 2 =  - 7 7 = ...                        target at '=': the value modulo p

Difficulty: the number of operations, uniform in 1..expression_len. An expression of n operations is an operation, an
expression of m operations and one of n - 1 - m, m uniform in 0..n-1. Only answers are scored. Needed depth: that of the
expression's tree. Tokens: numbers 0..p-1, + p, - p+1, x p+2, = p+3. Mano of 2512.17351 in label form.

Shapes: N sequences, T tokens of one sequence, E expressions of all sequences together, W tokens of the longest.
"""

import numpy as np

from sparsedepth.config.task import IGNORED, TaskConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.data.tasks.draws import Draws


def draw(task: TaskConfig, draws: Draws, n_sequences: int, seq_len: int, held_out: bool) -> Sequences:
    """As many expressions as fit; the last one is cut."""
    assert task.modulus is not None and task.expression_len is not None
    equals = task.modulus + 3
    n_operations_NM = 1 + draws.below(task.expression_len, n_sequences, -(-seq_len // 4))  # 4 tokens are the shortest
    end_NM = np.cumsum(2 * n_operations_NM + 2, axis=1)
    begin_NM = end_NM - 2 * n_operations_NM - 2
    row_E, index_E = np.nonzero(begin_NM < seq_len)
    n_operations_E, begin_E = n_operations_NM[row_E, index_E], begin_NM[row_E, index_E]
    tokens_EW = _expressions(task.modulus, n_operations_E, draws)
    value_E = values(tokens_EW, n_operations_E, task.modulus)
    inputs_NT = np.full((n_sequences, seq_len), equals)
    targets_NT = np.full((n_sequences, seq_len), IGNORED)
    difficulty_NT = np.zeros((n_sequences, seq_len), dtype=np.int64)
    expression_X, place_X = np.nonzero(np.arange(tokens_EW.shape[1]) < (2 * n_operations_E + 1)[:, None])
    column_X = begin_E[expression_X] + place_X
    fits_X = column_X < seq_len
    inputs_NT[row_E[expression_X][fits_X], column_X[fits_X]] = tokens_EW[expression_X, place_X][fits_X]
    answer_E = begin_E + 2 * n_operations_E + 1
    whole_E = answer_E < seq_len
    targets_NT[row_E[whole_E], answer_E[whole_E]] = value_E[whole_E]
    difficulty_NT[row_E[whole_E], answer_E[whole_E]] = n_operations_E[whole_E]
    return Sequences(inputs=inputs_NT, targets=targets_NT, difficulty=difficulty_NT)


def _expressions(modulus: int, n_operations_E: np.ndarray, draws: Draws) -> np.ndarray:
    """Prefix expressions [E, W], generated from the left; entries after the end of one are meaningless. A stack holds
    the sizes of the expressions still to generate: of size 0 a number, of n an operation and sizes m and n - 1 - m."""
    n_expressions, longest = len(n_operations_E), int(n_operations_E.max(initial=1))
    numbers_EW = draws.below(modulus, n_expressions, 2 * longest + 1)
    signs_EW = modulus + draws.below(3, n_expressions, 2 * longest + 1)
    stack_EW = np.zeros((n_expressions, longest + 2), dtype=np.int64)
    stack_EW[:, 0] = n_operations_E
    top_E = np.zeros(n_expressions, dtype=np.int64)
    rows_E = np.arange(n_expressions)
    tokens_EW = numbers_EW
    for position in range(2 * longest + 1):
        size_E = stack_EW[rows_E, top_E]
        splits_E = size_E > 0
        tokens_EW[:, position] = np.where(splits_E, signs_EW[:, position], numbers_EW[:, position])
        left_E = draws.below(np.maximum(size_E, 1), n_expressions)
        stack_EW[rows_E, top_E] = np.where(splits_E, size_E - 1 - left_E, 0)
        top_E = np.maximum(top_E + np.where(splits_E, 1, -1), 0)
        stack_EW[rows_E, top_E] = np.where(splits_E, left_E, stack_EW[rows_E, top_E])
    return tokens_EW


def values(tokens_EW: np.ndarray, n_operations_E: np.ndarray, modulus: int) -> np.ndarray:
    """The value of each prefix expression, evaluated from the right with a stack."""
    rows_E, length_E = np.arange(len(tokens_EW)), 2 * n_operations_E + 1
    stack_EW = np.zeros((len(tokens_EW), tokens_EW.shape[1] + 2), dtype=np.int64)
    top_E = np.ones(len(tokens_EW), dtype=np.int64)  # two values of 0 below, for entries past the end
    for position in reversed(range(tokens_EW.shape[1])):
        token_E = tokens_EW[:, position]
        is_inside_E, is_number_E = position < length_E, token_E < modulus
        left_E, right_E = stack_EW[rows_E, top_E], stack_EW[rows_E, top_E - 1]
        results = (left_E + right_E, left_E - right_E, left_E * right_E)
        value_E = np.where(is_number_E, token_E, np.choose(np.clip(token_E - modulus, 0, 2), results) % modulus)
        top_E = np.where(is_inside_E, top_E + np.where(is_number_E, 1, -1), top_E)
        stack_EW[rows_E, top_E] = np.where(is_inside_E, value_E, stack_EW[rows_E, top_E])
    return stack_EW[rows_E, top_E]
