"""Does sparsity change how fast loss falls with depth? The depth slope (and exponent) of every setting, paired by seed.

python analysis/depth_exponent.py RESULTS_DIR [...]
"""

from script import read_runs, run_script

from sparsedepth.effects.all_effects import measure_slopes
from sparsedepth.effects.depth_slope import depth_slope, exponent_text, slope_sentence
from sparsedepth.effects.knobs import find_knobs
from sparsedepth.effects.sentences import estimate_text

CLAIM = (
    "loss falls about as 1 / depth, exponent 1.2 +- 0.3 over dense models, because most layers average their errors "
    "(2602.05970). It does not ask whether sparsity changes the exponent"
)


def main(paths: list[str]) -> None:
    runs = read_runs(paths)
    overall = depth_slope(runs)
    if overall is None:
        raise ValueError(f"no two of these {len(runs)} runs differ only in n_layers; run a sweep over n_layers")
    depths = ", ".join(map(str, overall.depths))
    print(f"Claimed: {CLAIM}\nMeasured, over n_layers {depths}, all settings of all knobs:")
    print(
        f"  depth slope of val_loss {estimate_text(overall.slope, 'nat/token per doubling of n_layers')}; "
        f"exponent {exponent_text(overall)}"
    )
    slopes = measure_slopes(runs) if find_knobs(runs) else []
    for contrast in slopes:
        print(f"  {slope_sentence(contrast)}")
    if not slopes:
        print("  no setting and its baseline were both run at two depths: slopes cannot be compared")


if __name__ == "__main__":
    run_script(main)
