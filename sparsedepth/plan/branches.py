"""Several budgets from one run: the cells of a sweep with `branch_at`.

With schedule wsd (2404.06395) the learning rate is constant between warm-up and decay, so that a run of n steps shares
all steps before its decay with a longer one. Each share s of `branch_at` becomes a cell that trains for s n steps with
the same steps of warm-up: the run that would train to this budget alone, with that run's id. The longer run goes on
from the state before the shorter one's decay (`TrainConfig.trunk_key`), so that all budgets together cost one trunk and
their decays. Branches of one trunk share its seed and its noise: they are one unit to the statistics.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sparsedepth.config.plain_text import counted
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.match import Match


def with_branches(definition: SweepDefinition, match: Match) -> list[Match]:
    """A cell after its branches, shortest first. Raises ValueError without a trunk, and for a branch too short."""
    if not definition.branch_at:
        return [match]
    whole = match.config
    if whole.schedule != "wsd":
        raise ValueError(
            f"branch_at={definition.branch_at} needs schedule=wsd, not {whole.schedule}; set schedule: wsd in the base"
        )
    if whole.warmup_tokens is None:
        tokens = max(1, whole.warmup_steps) * whole.batch_tokens
        raise ValueError(
            f"branch_at={definition.branch_at} needs one warm-up for all budgets; set warmup_tokens: {tokens} in the "
            f"base in place of warmup_frac"
        )
    cells = [{**match.cell, "train_tokens": _branch_tokens(whole, share)} for share in definition.branch_at]
    configs = [definition.run_config(cell, definition.seeds[0]) for cell in cells]
    branches = [replace(match, cell=cell, config=config) for cell, config in zip(cells, configs, strict=True)]
    return [*branches, match]


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


def trunk_names(runs: Sequence[RunConfig]) -> dict[str, str]:
    """run_id -> 'trunk 3f2a1b' of the longest of the runs that share a trunk, 'branch 1 of 3 of trunk 3f2a1b' of the
    others, shortest first; none for a run that shares no steps with another."""
    names = {}
    for (key, _), shared in _by_trunk(runs).items():
        *branches, whole = sorted(shared, key=lambda config: config.train_tokens)
        if branches:
            names[whole.run_id] = f"trunk {str(key)[:6]}"
        for number, branch in enumerate(branches, start=1):
            names[branch.run_id] = f"branch {number} of {len(branches)} of trunk {str(key)[:6]}"
    return names


def trunk_line(names: Mapping[str, str], complete: Collection[str]) -> str:
    """'4 trunks (3 complete) with 12 branches (9 complete)'; '' without any."""
    trunks = [run_id for run_id, name in names.items() if name.startswith("trunk")]
    branches = [run_id for run_id in names if run_id not in trunks]
    done = [sum(run_id in complete for run_id in ids) for ids in (trunks, branches)]
    counts = counted(len(trunks), "trunk"), f"{len(branches)} branch{'es' * (len(branches) != 1)}"
    return " with ".join(f"{count} ({n} complete)" for count, n in zip(counts, done, strict=True)) if names else ""


def shared_steps(runs: Sequence[RunConfig]) -> list[int]:
    """For each run the steps that it takes over from the next shorter run of its trunk among `runs`; 0 if none."""
    trunks = _by_trunk(runs)
    lengths = {trunk: sorted(config.stable_steps for config in shared) for trunk, shared in trunks.items()}
    shorter = [
        [steps for steps in lengths.get((config.trunk_key, config.seed), ()) if steps < config.stable_steps]
        for config in runs
    ]
    return [steps[-1] if steps else 0 for steps in shorter]


def _by_trunk(runs: Sequence[RunConfig]) -> dict[tuple[str | None, int], list[RunConfig]]:
    """The runs with a trunk by its key and seed."""
    trunks: dict[tuple[str | None, int], list[RunConfig]] = {}
    for config in runs:
        if key := config.trunk_key:
            trunks.setdefault((key, config.seed), []).append(config)
    return trunks
