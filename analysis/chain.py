"""Are sparsity, residual variance, effectiveness and loss correlated over all knobs?

python analysis/chain.py RESULTS_DIR [...]
"""

from sparsedepth.effects.causal_evidence import chain_evidence
from sparsedepth.effects.script import NoAnswer, read_runs, run_script
from sparsedepth.effects.text_report import evidence_lines, link_heading

CLAIM = (
    "sparser mechanisms tend to exhibit lower output variance and better layer differentiation (2603.15389 v2, "
    "abstract); its own tables are not monotone: weight decay 1.0 and 3.0 lower variance and usefulness both"
)


def main(paths: list[str]) -> None:
    runs = read_runs(paths)
    chain = [link for link in chain_evidence(runs) if any(scope.rho is not None for scope in link.links)]
    if not chain:
        raise NoAnswer(f"these {len(runs)} runs show none of the links: too few, or nothing varies")
    print(f"Claimed: {CLAIM}\nMeasured, rank correlations over runs, interval over configurations:")
    for link in chain:
        print(f"  {link_heading(link)}")
        for line in evidence_lines(link):
            print(f"    {line}")
    print("'associated': Holm over the links of a scope; without any link, chance makes one of them so in 5% of stores")


if __name__ == "__main__":
    run_script(main)
