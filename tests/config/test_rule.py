"""Rules of records: the first that is broken is told, with the record and what was found."""

from types import SimpleNamespace

import pytest

from sparsedepth.config.rule import refuse_first

RULES = (
    (lambda c: c.size > 3, "size={c.size} is more than 3"),
    (lambda c: [name for name in c.names if name.isupper()], "{found[0]!r} must be small"),
)


def test_the_first_rule_that_is_broken_is_told():
    with pytest.raises(ValueError, match=r"^size=4 is more than 3$"):
        refuse_first(RULES, SimpleNamespace(size=4, names=["A"]))
    with pytest.raises(ValueError, match=r"^'A{}' must be small$"):
        refuse_first(RULES, SimpleNamespace(size=1, names=["a", "A{}"]))


def test_a_record_that_keeps_all_is_not_refused():
    refuse_first(RULES, SimpleNamespace(size=1, names=["a"]))
