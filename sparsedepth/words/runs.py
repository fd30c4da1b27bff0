"""What runs have in common, or do not: who made them, with which packages, on what search."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.words.plain_text import commas, counted, counted_are, visible

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.store.checksums import DamagedRun
    from sparsedepth.store.subject import Imported


def import_note(imported: "Imported | None") -> str:
    """Whose runs are imported and how much of them is unknown; '' for None."""
    if imported is None:
        return ""
    origins = commas(sorted(imported.origins))
    made = "of a loop elsewhere" if origins == WATCHED else f"imported from {origins}"
    return f"{counted_are(imported.n_runs, 'run')} {made}, with {unknown_text(imported.unknown)}"


def unknown_text(names: Collection[str]) -> str:
    """'47 of their choices unknown (seed, lr, ...)', with those that matter most."""
    examples = [name for name in ("seed", "lr", "weight_decay", "init", "corpus") if name in names]
    return f"{len(names)} of their choices unknown ({commas([*examples, '...'])})"


def version_text(differences: Mapping[str, Mapping[str, int]]) -> str:
    """The packages of several versions, and the number of runs with each; '' where there are none."""
    texts = []
    for name, versions in sorted(differences.items()):
        runs = (f"{version} ({counted(n, 'run') if n else 'here'})" for version, n in sorted(versions.items()))
        texts.append(f"{name} {commas(runs)}")
    return visible(f"packages differ between the runs: {'; '.join(texts)}") if texts else ""


def search_text(search: "SweepDefinition") -> str:
    """'a TPE search over lr, without a baseline; ...'."""
    kind = {"tpe": "TPE", "nsga2": "NSGA-II", "qmc": "quasi-Monte Carlo"}.get(search.sampler, "random")
    front = ", and which proposals are on the front is partly chance," if len(search.objectives) > 1 else ""
    return (
        f"a {kind} search over {commas(search.varied)}, without a baseline; "
        f"the best of many is optimistic{front} until run with new seeds"
    )


def layers_hint(outcome: str) -> str:
    """How a number of needed layers is to be compared; '' for another outcome."""
    if outcome not in IN_RUNS or IN_RUNS[outcome].unit != "layer":
        return ""
    return f"a better model needs more layers: `sparsedepth effects DIR --by {outcome}` compares at equal loss"


def damage_text(damaged: "Sequence[DamagedRun]") -> str:
    """'1 damaged run left out: ...'; '' where there is none."""
    names = commas(visible(f"{damage.folder.name} ({damage.name})") for damage in damaged[:5])
    more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
    return f"{counted(len(damaged), 'damaged run')} left out: {names}{more}" if damaged else ""
