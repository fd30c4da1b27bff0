"""What a sweep costs: the text of `plan`, the line before a sweep starts, and what an array of Slurm will do."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparsedepth.words.plain_text import commas, counted, duration, listed, wrapped
from sparsedepth.words.status import stuck_text
from sparsedepth.words.table import fitted_table
from sparsedepth.words.values import assignment

if TYPE_CHECKING:
    from sparsedepth.cli.on_slurm import ArrayPlan
    from sparsedepth.cli.pricing import MemoryShortage, PricedSweep
    from sparsedepth.plan.forecast import Forecast
    from sparsedepth.plan.price import Price


def size(number: float) -> str:
    """'3.2 MB'."""
    unit = "kB" if number < 1e6 else "MB" if number < 1e9 else "GB"
    return f"{number / {'kB': 1e3, 'MB': 1e6, 'GB': 1e9}[unit]:.3g} {unit}"


def price_line(price: "Price") -> str:
    """'27 runs, 1.4e+13 FLOP, 1 GB peak memory per run, 3 MB on disk, 5m with 2 workers (..)'."""
    bound = f"{price.bound} " if price.bound else ""
    accuracy = "calibrated" if price.is_calibrated else "uncalibrated"
    return (
        f"{bound}{counted(price.runs, 'run')}, {price.train_flops:.2g} FLOP, "
        f"{size(price.memory_bytes)} peak memory per run, {size(price.disk_bytes)} on disk, "
        f"{duration(price.seconds.value)} with {counted(price.setup.workers, 'worker')} "
        f"({accuracy}: within a factor of {price.seconds.factor:.3g})"
    )


def price_text(priced: "PricedSweep") -> str:
    """The question, a row per shape of runs, the total and what it assumes, and what remains."""
    definition = priced.definition
    price = priced.price
    alike = f"runs of a row may differ in {commas(price.alike)}" if price.alike else ""
    lines = filter(None, [alike, f"total: {price_line(price)}", *assumption_lines(priced)])
    shortage = f"{shortage_text(priced.shortage)}\n" if priced.shortage else ""
    remaining = ""
    if priced.remaining is not None:
        remaining = wrapped([f"remaining: {price_line(priced.remaining)}"])
    elif priced.results:
        remaining = f"remaining: nothing; every run in {priced.results} is complete or ended without a result\n"
    table = fitted_table(priced.shapes, ("tokens", "disk", "params_total")).text
    question = wrapped([f"{definition.name}: {definition.question}"])
    return f"{question}{table}\n{wrapped(lines)}{shortage}{remaining}"


def assumption_lines(priced: "PricedSweep") -> Iterator[str]:
    """On what the time, the size and the number of runs depend."""
    definition = priced.definition
    price = priced.price
    place = priced.price.setup.place
    threads = f", {counted(place.threads, 'thread')} per run" if place.device == "cpu" else ""
    processes = f", {place.processes} devices per run" if place.processes > 1 else ""
    shared = f", {place.sharing} runs at a time on each" if place.sharing > 1 else ""
    yield (
        f"time: {duration(price.seconds.low)} to {duration(price.seconds.high)} on {price.setup.devices} x "
        f"{price.setup.device}{threads}{processes}{shared}"
    )
    if price.setup.time_ratios:
        yield f"      corrected by finished runs of {counted(len(price.setup.time_ratios), 'shape')}"
    elif not price.is_calibrated:
        yield f"      assumes the speed of a typical {price.setup.device}; --calibrate times real steps instead"
    if priced.step_seconds:  # what `matched: time` takes
        steps = commas(f"{depth}: {seconds:.4g}" for depth, seconds in priced.step_seconds.items())
        yield f"step_seconds: {{{steps}}}"
    if price.data_bytes is None:
        yield "disk: excludes the tokenised text, at most about 4 bytes per byte of it"
    if definition.tune:
        seeds = commas(definition.tuning_seeds)
        use = "some also used as results" if definition.reuse_tuning_seeds else "not used as results"
        yield f"runs: tuning uses seeds {seeds} ({use}); a best value at the edge of its grid adds runs"
        if everywhere := priced.flops_tuned_everywhere:
            shape = commas(assignment(*each) for each in definition.tune_at.items())
            yield (
                f"      tuned at {shape} for all shapes: {price.train_flops / everywhere:.0%} of the FLOP of tuning "
                f"each ({everywhere:.2g})"
            )
    elif definition.adaptive:
        yield "runs: assumes proposals drawn at random; equal proposals share runs, pruned runs end early"


def shortage_text(shortage: "MemoryShortage") -> str:
    """By how much the largest run exceeds its share of the device's memory, and the fix."""
    fewer = "fewer --workers, or " if shortage.is_shared else ""
    none_fits = (
        f"even micro_batch=1 does not fit; use {fewer}more devices per run (--gpus-per-run, --runtime parallel=fsdp)"
    )
    fits = f"use --runtime micro_batch={shortage.micro_batch}, or leave it out"
    fix = fits if shortage.micro_batch else none_fits
    return f"memory: {size(shortage.needed)} does not fit into {size(shortage.available)}: {fix}"


def forecast_lines(found: Sequence["Forecast"]) -> list[str]:
    """The forecast of each depth against the tables of the text, beside what our own runs needed; none without one."""
    if not found:
        return []
    longest = found[0]
    unigram, bigram = longest.unigram_loss, longest.bigram_loss
    rows = (
        f"{row.n_layers} layers {row.low:.2f} to {row.high:.2f} ({row.tokens_per_param:.2g} tokens per parameter)"
        for row in found
    )
    answers = "every depth is forecast below the bigram table: at a lr that suits, its losses can answer"
    if unsure := [row for row in found if row.high >= bigram]:
        depths = listed([str(row.n_layers) for row in unsure])
        is_sure = all(row.low >= bigram for row in unsure)
        answers = (
            f"{'will' if is_sure else 'may'} not answer: {depths} layers {'stay' if is_sure else 'may stay'} above the "
            f"bigram table; train longer: about {unsure[-1].tokens_needed:,} tokens"
        )
    if longest.is_learned_by_heart:
        answers = "may not answer: so short a text is learned by heart; use more text, or fewer train_tokens"
    reads = f"a run reads the text {longest.passes:.3g} times: new text would teach it more (2305.16264)"
    return [
        f"text: a bigram table (pairs of tokens) reaches {bigram:.2f} nat/token, a unigram table {unigram:.2f}",
        f"forecast of val_loss at a tuned lr: {commas(rows)}",
        "our runs on bytes beat their bigram table after 70 to 200 steps, at 0.1 to 4 tokens per parameter",
        *[reads] * longest.is_repeated,
        answers,
    ]


def array_lines(array: "ArrayPlan") -> Iterator[str]:
    """The array's size, the time per task against the queue's limit, and warnings."""
    seconds = array.price.seconds
    request = array.request
    limit = "none" if array.limit == math.inf else duration(array.limit)
    default = "" if request.seconds else " (the partition's default; set with --time)"
    yield (
        f"array: {array.tasks} tasks, {array.runs_per_task} runs per task, {request.runs_in_parallel} in parallel; "
        f"{duration(seconds.value)} per task ({duration(seconds.low)} to {duration(seconds.high)}, assuming "
        f"{array.price.setup.device})"
    )
    yield f"queue: partition {array.partition}, time limit {limit}{default}"
    if array.longest > array.limit:
        yield (
            f"note: one run may take {duration(array.longest)}, longer than the limit: its task writes a checkpoint "
            f"{request.warning_seconds} s before the limit, and resumes when it is requeued"
        )
    if array.stuck:
        yield f"note: {stuck_text(array.stuck)}"
