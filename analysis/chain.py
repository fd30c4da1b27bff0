"""Do sparsity, residual variance, effectiveness and loss move together, over all knobs at once?

python analysis/chain.py RESULTS_DIR [...]
"""

import sys

from sparsedepth.effects.causal_evidence import weigh
from sparsedepth.effects.sentences import NOTHING, read_runs
from sparsedepth.effects.text_report import evidence_lines

CLAIM = (
    "sparser mechanisms tend to exhibit lower output variance and better layer differentiation (2603.15389 v2, "
    "abstract); its own tables are not monotone: weight decay 1.0 and 3.0 lower variance and usefulness both"
)


def main(paths: list[str]) -> int:
    runs = read_runs(paths)
    if runs is None:
        return NOTHING
    evidence = [one for one in weigh(runs) if any(link.rho is not None for link in one.links)]
    if not evidence:
        print(f"none of the links can be seen in these {len(runs)} runs: too few, or nothing varies", file=sys.stderr)
        return NOTHING
    print(f"Claimed: {CLAIM}\nMeasured, rank correlations over runs, interval over configurations:")
    for one in evidence:
        print(f"  {one.within.cause} -> {one.within.effect}: {one.word}")
        for line in evidence_lines(one):
            print(f"    {line}")
    n_intervals = sum(link.lo is not None for one in evidence for link in one.links)
    print(f"{n_intervals} intervals at 95%: chance alone makes about {0.05 * n_intervals:.1f} of them exclude 0")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
