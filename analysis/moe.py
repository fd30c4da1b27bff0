"""Does routing make deep layers useful, or do the added parameters?

Experts against the narrowest dense model, and against wider dense models: compare the ratios of parameters and FLOPs.

    python analysis/moe.py RESULTS_DIR [...]
"""

import itertools
from collections.abc import Iterator

import pandas as pd

from sparsedepth.effects.all_effects import effects_of
from sparsedepth.effects.knobs import find_knob, joint_knob
from sparsedepth.effects.script import answer, run_script
from sparsedepth.effects.sentences import contrast_sentence

CLAIM = (
    "usefulness 0.87 -> 0.94 and perplexity 17.56 -> 15.89 from Dense-400M to MoE-2B/400M; 0.81 -> 0.94 and 14.52 -> "
    "13.82 from Dense-1B to MoE-7B/1B (2603.15389, table of MoE; one run each; matched in active parameters only)"
)
OUTCOMES = ("val_loss", "usefulness", "residual_variance_last")


def against_wide_dense(runs: pd.DataFrame) -> Iterator[str]:
    experts, width = find_knob(runs, "n_experts"), find_knob(runs, "d_ff")
    if experts is None or width is None or not width.is_pure:
        yield "no wider dense model was run: a gain may come from total parameters"
        return
    for wide in list(width.settings.values())[1:]:
        both = joint_knob(runs, (experts, width), {**experts.settings[experts.baseline], **wide})
        for contrast in itertools.chain.from_iterable(effects_of(runs, [both], outcome) for outcome in OUTCOMES):
            if "n_experts=0" not in contrast.setting:
                yield contrast_sentence(contrast)


if __name__ == "__main__":
    run_script(lambda paths: answer(paths, "n_experts", OUTCOMES, CLAIM, against_wide_dense))
