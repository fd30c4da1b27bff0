"""Made-up rows of `runs` with the column `setting` that figures read: how each differs from the baseline."""

import pandas as pd
from support.runs_frame import grid

from sparsedepth.effects.cells import cells_of


def labelled(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.assign(setting=cells_of(runs, "val_loss").rows["setting"])


def labelled_grid(axes, outcome, **base) -> pd.DataFrame:
    return labelled(grid(axes, outcome, **base))
