"""What a sweep costs on this machine or another, as a record that `words.price` tells."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sparsedepth.cli.option import aside
from sparsedepth.cli.preflight import check_machine
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.plain_text import commas, duration, visible
from sparsedepth.words.price import price_text, shortage_text, size
from sparsedepth.words.sweep import plan_notes
from sparsedepth.words.values import assignment

if TYPE_CHECKING:
    from sparsedepth.config.section import Fields
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.forecast import Forecast
    from sparsedepth.plan.price import Price, PricingSetup
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.machine import Machine


MOST_READ = 2**23
"""Tokens of the text read for a forecast, so that `plan` answers in seconds."""
MOST_LEARNED = 10**8
"""Bytes of text from which it learns a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class MemoryShortage:
    """The largest run needs more memory than its share of the device."""

    needed: float
    available: float
    micro_batch: int | None
    """Sequences per forward pass with which it fits, if any: those of a run for which no other number is asked."""
    is_shared: bool
    """Whether several runs share the device."""


@dataclass(frozen=True, kw_only=True)
class PricedSweep:
    definition: "SweepDefinition"
    price: "Price"
    shapes: QueryResult
    """A row per shape of runs."""
    step_seconds: Mapping[int, float]
    """By depth, where all depths were timed."""
    shortage: MemoryShortage | None
    results: Path | None
    """The folder of which the rest is priced, too."""
    remaining: "Price | None"
    """None also where no run is left."""
    flops_tuned_everywhere: float | None = None
    """Where values are carried: those of the same sweep with every shape tuned."""

    def as_json(self) -> "Fields":
        from sparsedepth.plan.price import as_json

        shortage = self.shortage and shortage_text(self.shortage)
        left = {} if self.remaining is None else {"left": as_json(self.remaining)}
        everywhere = {"flops_tuned_everywhere": self.flops_tuned_everywhere} if self.definition.tune_at else {}
        return {"sweep": self.definition.name, **as_json(self.price), "shortage": shortage, **everywhere, **left}


def priced_sweep(plan: "Plan", setup: "PricingSetup", results: Path | None = None) -> PricedSweep:
    """The price of a sweep and, with `results`, of its remaining runs."""
    from sparsedepth.plan.estimate import shape_id
    from sparsedepth.plan.price import price

    total = price(plan, setup)
    examples = {config.n_layers: config for config in reversed(plan.expected_runs())}
    known = {depth: (setup.timings or {}).get(shape_id(examples[depth], step_only=True)) for depth in sorted(examples)}
    timed = {depth: timing.step for depth, timing in known.items() if timing}
    return PricedSweep(
        definition=plan.definition,
        price=total,
        shapes=_shapes(total),
        step_seconds=timed if len(timed) == len(known) > 1 else {},
        shortage=_memory_shortage(plan, total),
        results=results,
        remaining=remaining_price(plan, setup, results) if results else None,
        flops_tuned_everywhere=_flops_tuned_everywhere(plan),
    )


def _flops_tuned_everywhere(plan: "Plan") -> float | None:
    from sparsedepth.plan.price import PricingSetup, price
    from sparsedepth.plan.tasks import Plan

    if not plan.definition.tune_at:
        return None
    everywhere = Plan(plan.definition.model_copy(update={"tune_at": {}}))
    return price(everywhere, PricingSetup()).train_flops


def print_price(plan: "Plan", priced: PricedSweep, format: str = "table", **more: Any) -> None:
    """The text, or the JSON with `more` of it."""
    for note in plan_notes(plan):
        aside(f"note: {visible(note)}")
    print(json.dumps({**priced.as_json(), **more}, indent=1) if format == "json" else price_text(priced).rstrip())


def forecasts(plan: "Plan") -> "list[Forecast]":
    """Of the shortest run of each depth on local text, from the tables of its first tokens; none of a text
    that is elsewhere, or too long to learn a tokenizer from it meanwhile."""
    from sparsedepth.config.corpus import TEXT, corpus_name, is_learned
    from sparsedepth.data.corpus import local_files
    from sparsedepth.data.ngram_losses import losses_ahead
    from sparsedepth.data.sequences import open_source
    from sparsedepth.plan.forecast import forecast

    runs = sorted(plan.expected_runs(), key=lambda run: -run.n_steps)
    name = corpus_name(runs[0].corpus)
    if name.kind is not TEXT or name.origin == "hub" or len({(run.corpus, run.tokenizer) for run in runs}) > 1:
        return []
    if name.origin == "files" and not Path(name.place).exists():  # a results folder has its tokens
        return []
    size = sum(path.stat().st_size for path in local_files(name.place)) if name.origin == "files" else 0
    if runs[0].tokenizer != "byte" and (size > MOST_LEARNED or not is_learned(runs[0].tokenizer)):
        return []
    with TemporaryDirectory() as folder:
        config = runs[0].model_copy(update={"max_corpus_tokens": MOST_READ})
        source = open_source(config, Path(folder))
        losses, text = losses_ahead(source, config), source.facts
    unigram, bigram = losses["unigram_loss"], losses["bigram_loss"]
    if unigram is None or bigram is None:  # a batch of more tokens than are counted
        return []
    share_read = min(1, (text["train"]["bytes"] + text["val"]["bytes"]) / max(1, size))
    passes = max(run.train_tokens for run in runs) / text["train"]["tokens"] * share_read
    return [forecast(run, unigram, bigram, passes) for _, run in sorted({run.n_layers: run for run in runs}.items())]


def remaining_price(plan: "Plan", setup: "PricingSetup", results: Path) -> "Price | None":
    """The price of the runs that have not ended; None if there are none."""
    from sparsedepth.plan.price import price_of
    from sparsedepth.sweep.status import remaining_and_trunks

    runs, done = remaining_and_trunks(plan, results)
    return price_of(runs, setup, plan.bound, done) if runs else None


def _memory_shortage(plan: "Plan", price: "Price") -> MemoryShortage | None:
    from sparsedepth.plan.price import price_of

    place = price.setup.place
    available = price.setup.memory
    if available is None or price.memory_bytes <= available:
        return None
    free = price_of(plan.expected_runs(), replace(price.setup, place=replace(place, micro_batch=None)))
    sizes = filter(None, (kind.micro_batch for kind in free.kinds))
    return MemoryShortage(
        needed=price.memory_bytes,
        available=available,
        micro_batch=min(sizes, default=None) if free.memory_bytes <= available else None,
        is_shared=place.sharing > 1,
    )


def _shapes(price: "Price") -> QueryResult:
    from sparsedepth.config.role import roles
    from sparsedepth.config.run import RunConfig

    of_role = roles(RunConfig)
    counts = {name: Counter(kind.varied[name] for kind in price.kinds) for name in price.kinds[0].varied}
    shown = [  # top_k, say, is 2 or None, which n_experts tells
        name
        for name, count in counts.items()
        if name != "n_layers" and len({*count} - ({None} if of_role[name].needs_experts else set())) > 1
    ]
    usual = {}  # of many fields a row names those in which it is not like most rows
    for name in shown if len(shown) > 2 else ():
        (value, n_rows), *_ = counts[name].most_common(1)
        if 2 * n_rows > len(price.kinds):
            usual[name] = value
    is_sparse = any(kind.params_active < kind.params_total for kind in price.kinds)
    rows = [
        (
            kind.varied.get("n_layers"),
            kind.runs,
            kind.params_total,
            kind.params_active if is_sparse else None,
            kind.tokens,
            f"{kind.train_flops:.3g}",
            size(kind.memory_bytes),
            kind.micro_batch,
            size(kind.disk_bytes),
            duration(kind.seconds.value),
            commas(
                assignment(name, kind.varied[name])
                for name in shown
                if kind.varied[name] not in (None, usual.get(name))
            )
            or None,
        )
        for kind in price.kinds
    ]
    sizes = ("params_total", "params_active", "tokens", "train_flops", "memory", "micro_batch", "disk")
    return QueryResult(("n_layers", "runs", *sizes, "time per run", "setting"), tuple(rows))


def local_pricing_setup(plan: "Plan", machine: "Machine", results: Path | None, calibrated: bool) -> "PricingSetup":
    """This machine, its cached timings, and the finished runs of `results`; `calibrated` times the shapes of the sweep
    that are not cached. Raises ValueError as `check_machine`."""
    from sparsedepth.plan.price import uncalibrated

    check_machine(plan, machine)
    setup = setup_of_machine(plan, machine, results)
    missing = uncalibrated(plan.expected_runs(), setup) if calibrated else []
    if not missing:
        return setup

    from sparsedepth.sweep.calibrate import calibrate

    def progress(done: int) -> None:
        print(f"\rtimed {done} of {len(missing) * machine.workers}", end="", file=sys.stderr, flush=True)

    timings = calibrate(missing, machine, progress)
    aside("")
    return replace(setup, timings=timings)


def setup_of_machine(plan: "Plan", machine: "Machine", results: Path | None) -> "PricingSetup":
    """This machine, with the timings that are cached for its number of workers, and the finished runs of `results`."""
    from sparsedepth.plan.price import named_device, pricing_setup, with_finished
    from sparsedepth.sweep.timings import device_name_of, known_timings

    device = named_device(device_name_of(machine)) if machine.gpus else "cpu"
    priced = pricing_setup(
        machine.runtime,
        device=device,
        workers=machine.workers,
        processes=machine.processes_per_run,
        gpus=len(machine.gpus),
    )
    return with_finished(replace(priced, timings=known_timings(machine)), results, plan.expected_runs())
