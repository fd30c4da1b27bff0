"""Which sizes are named as slow on a GPU, and what is offered instead."""

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.plan.gpu_shapes import slow_shapes


def lines(*runs: dict) -> list[str]:
    return slow_shapes(build(RunConfig, {"fit_tokens": 16384, **fields}, "x") for fields in runs)


def test_odd_widths_and_narrow_heads_are_named_once_with_the_nearest_good_ones():
    odd = {"d_model": 2048, "n_heads": 64, "d_ff": 5461}
    assert lines(odd, {**odd, "seed": 1}) == [
        "d_ff=5461 is slow on a GPU: use a multiple of 64, such as 5440 or 5504",
        "n_heads=64 gives heads of width 32, slow on a GPU: use n_heads=32",
    ]
    assert lines({"d_model": 512, "n_heads": 8, "n_experts": 4, "top_k": 2, "d_expert": 100}) == [
        "d_expert=100 is slow on a GPU: use a multiple of 64, such as 64 or 128"
    ]
    assert lines({"d_model": 256, "n_experts": 16, "top_k": 12}) == [
        "d_expert=57 is slow on a GPU: use a multiple of 64, such as 64"
    ]


def test_good_and_small_shapes_are_not_named():
    assert not lines({"d_model": 2048, "n_heads": 16, "d_ff": 5504}, {"d_model": 32, "n_heads": 2, "d_ff": 85})
