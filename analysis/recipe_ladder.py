"""Does each ingredient of the recipe still help with the others, and do all together beat the best one alone?

python analysis/recipe_ladder.py RESULTS_DIR [...]
"""

from dataclasses import replace

from sparsedepth.effects.ladder import ladder
from sparsedepth.effects.script import NoAnswer, read_runs, run_script
from sparsedepth.effects.sentences import contrast_sentence
from sparsedepth.store.comparable_loss import loss_of

CLAIM = (
    "at 32 layers T 4096, lambda 0.3, G 2 and experts, one on top of the other, take usefulness 0.53 -> 0.59 -> 0.63 "
    "-> 0.66 -> 0.75 and downstream accuracy 39.5 -> 40.0 -> 41.4 -> 42.1 -> 44.1 (2603.15389, leading figure; one run "
    "each)"
)


def main(paths: list[str]) -> None:
    runs = read_runs(paths)
    objective = loss_of(runs)
    ladders = {depth: ladder(at_depth, objective) for depth, at_depth in runs.groupby(runs["n_layers"].astype(int))}
    if not any(steps.rungs for steps in ladders.values()):
        raise NoAnswer(f"no two of these {len(runs)} runs differ by one step of the ladder; run a recipe ladder")
    print(f"Claimed: {CLAIM}")
    for depth, steps in ladders.items():
        together = (steps.whole,) if steps.whole else ()
        parts = (("added next", steps.rungs), ("added last", steps.last_in), ("all together", together))
        for heading, contrasts in parts:
            for contrast in contrasts:
                print(f"  {heading}: {contrast_sentence(replace(contrast, n_layers=depth))}")


if __name__ == "__main__":
    run_script(main)
