"""A sweep in words: notes on its plan, its machine, the state of its runs and of its Slurm tasks, the best so far."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sparsedepth import quantities
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.plain_text import commas, counted, visible
from sparsedepth.words.values import assignment

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import URL

    from sparsedepth.cluster.array import Probe
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.machine import Machine

HIGH_LR = 0.5
"""Ten times the highest that trained in our results."""
MOST_LISTED = 7
"""Cells whose solved sizes are listed; the table of `plan` shows all."""


def plan_notes(plan: "Plan") -> Iterator[str]:
    """What to know before the start: matched sizes, skipped cells, what has no effect, what will not answer."""
    definition = plan.definition
    drawn = len(plan.matches) + len(plan.infeasible)
    yield from matched_lines(plan)
    yield from (f"skipped: {cell}: {reason}" for cell, reason in plan.infeasible)
    n_trials = definition.n_trials or 0
    if definition.sampler == "grid":
        unmet, unused = definition.idle_conditions()
        yield from (f"exclude {where}: no cell has this, so nothing is left out" for where in unmet)
        for name, where in unused.items():
            yield f"only.{name} {where}: no cell has this, so {name} is varied nowhere"
    elif not definition.adaptive and drawn < n_trials:
        yield f"n_trials={n_trials} gives {drawn} cells; the others are repeats or excluded"
    elif definition.adaptive and n_trials <= plan.n_random:
        yield (
            f"sampler={definition.sampler} draws its first {plan.n_random} proposals at random, so that n_trials="
            f"{n_trials} learns nothing from earlier ones; use more trials, or sampler 'qmc'"
        )
    if not definition.adaptive and all(len(one.seeds) < 2 for one in plan.matches):
        yield "one seed: no difference has an interval, but for a ladder of three sizes or budgets; use 3 seeds"
    for name in definition.objectives:
        if quantities.rankable(name).is_relative:
            yield (
                f"objective {name} is relative to the loss of the run, so it also rises if only the loss falls; "
                "its absolute form is affine_loss_added (nat/token)"
            )
    if (highest := max((run.lr for run in plan.expected_runs()), default=0)) > HIGH_LR:
        yield f"lr={highest:g} is above {HIGH_LR:g}: such runs hardly ever train; our own used 0.001 to 0.05"


def matched_lines(plan: "Plan") -> Iterator[str]:
    """A line for each cell whose size was solved for, up to MOST_LISTED, with the remaining mismatch."""
    solved = [one for one in plan.matches if one.free]
    if not solved:
        return
    worst = max((one.ratio - 1 for one in plan.matches), key=abs)
    matched = plan.definition.matched
    more = "; the table has them" if len(solved) > MOST_LISTED else ""
    yield f"matched in {matched}: sizes of {counted(len(solved), 'cell')}, largest mismatch {worst:+.2%}{more}"
    for one in () if more else solved:
        fields = commas(f"{name}={value}" for name, value in one.cell.items() if name != one.free)
        yield f"  {fields or 'base'}: {one.free}={one.size} ({one.ratio - 1:+.2%})"


def mismatch_fix(definition: "SweepDefinition", ratio: float, free: str | None) -> str:
    """What helps where the amounts of two cells differ by more than the tolerance."""
    if free is None:
        example = "train_tokens" if definition.matched == "flops" else "d_ff"
        return f"name a size to solve for: 'free: {example}', or change the cells"
    return (
        f"that is {ratio - 1:+.1%}, tolerance {definition.tolerance:.1%}, at the best {free}; choose another 'free', "
        f"{'more train_tokens' if free == 'train_tokens' else 'a larger model'}, or a larger 'tolerance'"
    )


def excess_text(excess: Mapping[Any, float], bounds: Mapping[Any, float]) -> str:
    """The constraints that a run breaks: 'params_total is 20.0% above 15400'. `excess`: amount / bound - 1."""
    return commas(f"{name} is {value:.1%} above {bounds[name]:g}" for name, value in excess.items() if value > 0)


def at_a_time_text(workers: int, stacked: int) -> str:
    """'2 at a time on'; where runs train as one model '2 stacks of up to 8 equal shapes at a time on'."""
    stacks = f" {'stack' if workers == 1 else 'stacks'} of up to {stacked} equal shapes" if stacked > 1 else ""
    return f"{workers}{stacks} at a time on"


def machine_text(machine: "Machine") -> str:
    """'cpu with 2 threads each'."""
    device = "cpu" if not machine.gpus else f"GPU {commas('+'.join(group) for group in machine.gpus)}"
    processes = machine.processes_per_run * machine.nodes
    threads = counted(machine.runtime.threads or 1, "thread")
    return f"{device} with {threads} each" + f" and {processes} processes per run" * (processes > 1)


def storage_text(address: "URL | None", journal: "Path") -> str:
    """Where the study is, without user and password."""
    return f"--storage postgresql://{address.host or ''}/{address.database or ''}" if address else str(journal)


def probe_text(probe: "Probe", results: "Path", python: str) -> str:
    """Why the task that checked a node of the cluster failed."""
    node = probe.node
    state = probe.state
    if state == "COMPLETED":
        return f"a file written by the probe task on {node} is not visible here; give an --out on shared storage"
    if not probe.has_ended:
        return (
            f"the probe task on {node} has not ended in {probe.limit:.0f} s and was cancelled; "
            f"check that {node} can read {results} and start {python}"
        )
    texts = {
        "3": f"{results} is not visible on {node}; give an --out on storage shared by all nodes",
        "4": f"{node} cannot run {python} with sparsedepth; install it on storage that nodes share",
    }
    return texts.get(probe.code, f"the probe task on {node} ended {state.lower()} (exit code {probe.code})")


def run_text(values: Row) -> str:
    """'n_layers=4 n_kv_heads=1 lr=0.001 seed=0'."""
    texts = (
        f"{name}={value:.4g}"
        if isinstance(value, float)
        else f"{name}={value}"
        if value is None
        else assignment(name, value)
        for name, value in values.items()
    )
    return visible(" ".join(texts))
