"""A task of one's own: is the number of ones so far even? Tokens: 0, 1; targets: 0 even, 1 odd."""

TASKS = {"parity": {"n_tokens": 2, "shortest": 2}}


def draw(task, draws, n_sequences, seq_len, held_out):
    from sparsedepth.data.sequences import Sequences

    bit_NT = draws.below(2, n_sequences, seq_len)
    ones_NT = bit_NT.cumsum(axis=1)
    return Sequences(inputs=bit_NT, targets=ones_NT % 2, difficulty=ones_NT)
