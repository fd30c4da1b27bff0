"""Plain values and their order."""

import numpy as np
import pandas as pd
from lr_transfer import keys

from sparsedepth.effects.cells import plain
from sparsedepth.effects.importance import value_order


def test_plain_values_and_keys():
    assert [plain(value) for value in (np.nan, None, pd.NA, np.int64(3), 2.0, 0.5, "a")] == [
        *(None, None, None, 3, 2, 0.5, "a"),
    ]
    assert plain("[0.1, 2]") == (0.1, 2) and plain(np.array([1.0, 2.5])) == (1, 2.5)
    runs = pd.DataFrame({"a": [1, 1, 2], "b": [None, np.nan, "x"]})
    first, second, third = keys(runs, ["a", "b"])
    assert first == second != third
    assert sorted(["b", 10, None, 2.0], key=value_order) == [2.0, 10, "b", None]
