"""What is said of effects, where only commands in processes of their own meet it."""

from sparsedepth.words.effects import measured_nowhere, swaps_line


def test_unlike_numbers_of_swaps_are_named_by_depth():
    told = swaps_line("permutation_score", [(4, [3, 6]), (16, [32, 120])])
    assert told.startswith("permutation_score is of 3 and 6 swaps at 4 layers, 32 and 120 swaps at 16 layers: fewer")
    assert swaps_line("permutation_score", []) == ""


def test_what_was_not_measured_is_told_with_its_measure():
    assert measured_nowhere("val_loss") == "val_loss was measured in no finished run (measure: loss)"
    assert measured_nowhere("acc:x") == "acc:x was measured in no finished run"
