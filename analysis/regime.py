"""Which regime are the models in: compositional, procedural, ensemble averaging, or undecided? With the evidence.

python analysis/regime.py RESULTS_DIR [...]
"""

from sparsedepth.effects.regime import regime_lines, regimes
from sparsedepth.effects.script import NoAnswer, read_runs, run_script
from sparsedepth.store.connection import open_store

CLAIM = (
    "most layers of a language model do the same small thing and average their errors: the angle between neighbouring "
    "states falls as 1 / depth, neighbouring updates are nearly orthogonal, few tokens stop early (2602.05970)"
)


def main(paths: list[str]) -> None:
    runs = read_runs(paths)
    with open_store(*paths) as store:
        layers = store.frame("select run_id, layer, value from layers where metric = 'angular_distance'")
    families = regimes(runs, layers)
    if not families:
        raise NoAnswer(f"no two of these {len(runs)} runs differ only in n_layers; run a sweep over n_layers")
    print(f"Claimed: {CLAIM}\nMeasured, over runs that differ only in depth and seed:")
    for family in families:
        for line in regime_lines(family):
            print(f"  {line}")


if __name__ == "__main__":
    run_script(main)
