"""The CSV of a figure: exact, missing values empty, nothing that a spreadsheet would run."""

import io

import numpy as np
import pandas as pd

from sparsedepth.plots.page import csv_bytes


def test_numbers_are_exact_and_formulas_escaped():
    data = pd.DataFrame(
        {
            "name": ["=cmd()", "plain", None],
            "value": [0.1 + 0.2, np.nan, -1e-300],
            "n": pd.array([1, None, 3], dtype="Int64"),
        }
    )
    text = csv_bytes(data).decode()
    assert text.splitlines() == ["name,value,n", "'=cmd(),0.30000000000000004,1", "plain,,", ",-1e-300,3"]
    assert pd.read_csv(io.StringIO(text))["value"].tolist()[0] == 0.1 + 0.2
