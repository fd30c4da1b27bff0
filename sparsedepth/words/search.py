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
    "direction: PED-ANOVA is the share of an axis in what makes the best proposals differ from the others. Of few "
    "proposals an axis that does nothing has a share, too. An adaptive sampler favours promising regions: its "
    "proposals are not a random sample."
)


def best_values(values: Sequence[Any], is_range: bool) -> str:
    """'0.002 to 0.009' of a range; 'lns 5x, none 1x' of a choice."""
    if not is_range:
        return ", ".join(f"{value} {n}x" for value, n in Counter(map(str, values)).most_common())
    numbers = [value for value in values if value is not None]
    return f"{min(numbers):.3g} to {max(numbers):.3g}" if numbers else "none"


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
            yield (
                f"  {each.axis}: importance PED-ANOVA {each.ped_anova:.0%}; the best "
                f"{counted(of.n_best, 'proposal')}: {each.best}"
            )
