from decimal import Decimal

from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.formats import to_csv
from sparsedepth.words.values import readable


def test_what_a_query_rounded_has_its_digits_and_what_it_did_not_has_four():
    """round(x, 2), round(x, 6), an average, round(x, 0), a cost; in a column the most digits that any value has."""
    rows = ((0.81, 0.123456, 0.1 + 0.2, 4.0, 6.4e11), (0.5, 0.75, 1 / 3, 10.0, 8e10), (None, 1.0, None, 3.0, 1e9))
    shown = QueryResult(columns=tuple("abcde"), rows=rows).with_decimals()
    assert [[readable(value) for value in row] for row in shown.rows] == [
        ["0.81", "0.123456", "0.3000", "4", "6.400e+11"],
        ["0.50", "0.750000", "0.3333", "10", "8.000e+10"],
        ["-", "1.000000", "-", "3", "1.000e+09"],
    ]
    assert to_csv(QueryResult(columns=("a",), rows=((Decimal("0.50"),),))) == "a\n0.5"
