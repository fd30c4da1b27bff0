"""Several budgets from one run: the cells of a sweep with `branch_at`.

With schedule wsd (2404.06395) the learning rate is constant between warm-up and decay, so that a run of n steps shares
all steps before its decay with a longer one. Each share s of `branch_at` becomes a cell that trains for s n steps with
the same steps of warm-up: the run that would train to this budget alone, with that run's id. The longer run goes on
from the state before the shorter one's decay (`TrainConfig.trunk_key`), so that all budgets together cost one trunk and
their decays. Branches of one trunk share its seed and its noise: they are one unit to the statistics.
"""

from collections.abc import Sequence
from dataclasses import replace

from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.match import Match


def with_branches(definition: SweepDefinition, match: Match) -> list[Match]:
    """A cell after its branches, shortest first. Raises ValueError for a schedule without a trunk, and for a branch
    that is too short."""
    if not definition.branch_at:
        return [match]
    whole = definition.run_config(match.cell, definition.seeds[0])
    if whole.schedule != "wsd":
        raise ValueError(
            f"branch_at={definition.branch_at} needs schedule=wsd, whose runs share what comes before the decay, not "
            f"schedule={whole.schedule}; set schedule: wsd in the base"
        )
    if whole.warmup_tokens is None:
        tokens = max(1, whole.warmup_steps) * whole.batch_tokens
        raise ValueError(
            f"branch_at={definition.branch_at} needs a warm-up that is the same for all budgets; set warmup_tokens: "
            f"{tokens} in the base in place of warmup_frac"
        )
    tokens = [_branch_tokens(whole, share) for share in definition.branch_at]
    return [*(replace(match, cell={**match.cell, "train_tokens": some}) for some in tokens), match]


def _branch_tokens(whole: RunConfig, share: float) -> int:
    """The tokens of the branch at a share of the whole run's."""
    steps = round(share * whole.n_steps)
    if steps < 1 or steps == whole.n_steps:
        raise ValueError(f"branch_at={share:g} of {whole.n_steps} steps is no step between them; train for longer")
    branch = whole.model_copy(update={"train_tokens": steps * whole.batch_tokens})
    if branch.warmup_steps > branch.stable_steps:
        raise ValueError(
            f"branch_at={share:g} ends after {steps} steps, of which {branch.warmup_steps} are warm-up and "
            f"{steps - branch.stable_steps} decay; lower warmup_tokens={whole.warmup_tokens}, or branch later"
        )
    return branch.train_tokens


def shared_steps(runs: Sequence[RunConfig]) -> list[int]:
    """For each run the steps that it takes over from the next shorter run of its trunk among `runs`; 0 if none."""
    trunks: dict[tuple[str, int], list[int]] = {}
    keys = [config.trunk_key for config in runs]
    for key, config in zip(keys, runs, strict=True):
        if key:
            trunks.setdefault((key, config.seed), []).append(config.stable_steps)
    return [
        max((steps for steps in trunks[key, config.seed] if steps < config.stable_steps), default=0) if key else 0
        for key, config in zip(keys, runs, strict=True)
    ]
