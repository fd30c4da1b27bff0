"""Does sparsity change how fast loss falls with depth? The loss per doubling of depth, for every setting.

    python analysis/depth_exponent.py RESULTS_DIR [...]

The baseline's slope is that of each seed's losses on log2 n_layers, over the depths that every seed has. The settings'
are the rows 'depth slope' of the frame `effects`. For an exponent, fit the law: `sparsedepth scaling fit`.
"""

import numpy as np
from estimate import estimate
from script import read_runs, run_script

from sparsedepth.effects.cells import BASELINE, Cells, cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.effects.listing import listing
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.words.effects import effects_text

CLAIM = (
    "loss falls about as 1 / depth, exponent 1.2 +- 0.3 over dense models, because most layers average their errors "
    "(2602.05970). It does not ask whether sparsity changes the exponent"
)


def baseline_slopes(cells: Cells) -> tuple[list[float], list[int]]:
    """The slope of each seed of the baseline, and the depths."""
    rows = cells.rows[(cells.rows["setting"] == BASELINE) & (cells.rows["role"] == "result")].dropna(subset=["value"])
    loss_SL = rows.pivot_table(index="seed", columns="n_layers", values="value").dropna()
    x_L = np.log2(loss_SL.columns.to_numpy(dtype=float))
    x_L = x_L - x_L.mean()
    return list(loss_SL.to_numpy() @ x_L / (x_L @ x_L)) if len(x_L) > 1 else [], [*map(int, loss_SL.columns)]


def main(paths: list[str]) -> None:
    runs = read_runs(paths)
    cells = cells_of(runs, loss_of(runs))
    slopes, depths = baseline_slopes(cells)
    if not slopes:
        raise ValueError(f"no two of these {len(runs)} runs differ only in n_layers; run a sweep over n_layers")
    print(f"Claimed: {CLAIM}\nMeasured, over n_layers {', '.join(map(str, depths))}, per doubling:")
    print(f"  {cells.outcome} of the baseline {estimate(slopes)} {cells.unit}")
    effects = effects_frame(cells)
    effects = effects[effects["question"] == "depth slope"]
    if effects.empty:
        print("  no setting and its baseline were both run at two depths: slopes cannot be compared")
    else:
        print(effects_text(listing(effects, cells)))


if __name__ == "__main__":
    run_script(main)
