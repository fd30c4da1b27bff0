"""Words of a search: what each axis does to each objective."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparsedepth import quantities
from sparsedepth.words.degeneracy import degeneracy_text
from sparsedepth.words.effects import title
from sparsedepth.words.plain_text import counted

if TYPE_CHECKING:
    from sparsedepth.effects.importance import OfObjective

EXPLAINED = (
    "Rarely do two proposals differ in one field only, so there are no paired effects. Importance (Optuna's) has no "
    "direction: fANOVA is the share of an axis in the variance of the objective over the space, by a random forest. Of "
    "few proposals an axis that does nothing has a share, too. An adaptive sampler favours promising regions: its "
    "proposals are not a random sample."
)


def best_values(values: Sequence[Any], n: int, is_range: bool) -> str:
    """Of the first `n` of all values, the best: '0.002 to 0.009, where 40% of all proposals are' of a range;
    'lns in 5 of 6 (54% of all proposals); none in 1 of 6 (46%)' of a choice."""
    if not is_range:
        names = ["null" if value is None else str(value) for value in values]
        every, texts = Counter(names), list[str]()
        for name, times in Counter(names[:n]).most_common():
            of = "" if texts else " of all proposals"  # said once
            texts.append(f"{name} in {times} of {n} ({every[name] / len(names):.0%}{of})")
        return "; ".join(texts)
    numbers = [value for value in values[:n] if value is not None]
    if not numbers:
        return "none"
    low, high = min(numbers), max(numbers)
    share = sum(value is not None and low <= value <= high for value in values) / len(values)
    return f"{low:.3g} to {high:.3g}, where {share:.0%} of all proposals are"


def importance_lines(found: Sequence["OfObjective"], search: str) -> Iterator[str]:
    """The importance of every axis, by objective; `search`: what was searched."""
    yield f"{search}\n{EXPLAINED}"
    for of in found:
        unit = quantities.IN_RUNS[of.objective].unit
        yield f"\n{title(of.objective, unit)}: {of.n_finished} of {of.n_proposals} proposals finished"
        if caution := degeneracy_text(of.degeneracy):
            yield f"  {caution}"
        if of.is_constant:
            yield "  no analysis: all values are equal"
        elif not of.importances:
            yield f"  no analysis: it needs {of.min_proposals} finished proposals and an axis that varies"
        for each in of.importances:
            share = "not known, as some proposals lack it" if each.fanova is None else f"{each.fanova:.0%}"
            yield f"  {each.axis}: importance fANOVA {share}; the best {counted(of.n_best, 'proposal')}: {each.best}"
