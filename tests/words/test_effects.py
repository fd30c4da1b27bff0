"""What is said of effects, where only commands in processes of their own meet it."""

from sparsedepth.words.effects import swaps_line


def test_unlike_numbers_of_swaps_are_named_by_depth():
    told = swaps_line("permutation_score", [(4, [3, 6]), (16, [32, 120])])
    assert told.startswith("permutation_score is of 3 and 6 swaps at 4 layers, 32 and 120 swaps at 16 layers: fewer")
    assert swaps_line("permutation_score", []) == ""
