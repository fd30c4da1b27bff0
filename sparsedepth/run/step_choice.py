"""Choose by time how the runs of a process take their steps on a GPU: as one model or apart, captured, compiled.

One choice after the other is tried for a few steps on random tokens, and kept if all steps, compiling included, would
take less time. Open is what was left at `auto`; the results folder keeps the choice for others of this shape."""

import gc
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sparsedepth import files
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import COMPILED_STEPS, RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import shape_id
from sparsedepth.train.loop import TrainingResult, training
from sparsedepth.train.runtime import resolve
from sparsedepth.train.stack import Clock, train_together

STEPS = 10
"""of which the second half is timed; a graph is captured at the fourth"""


def choose_steps(configs: Sequence[RunConfig], runtime: RuntimeConfig, results: Path) -> RuntimeConfig:
    """The runtime, with `stack`, `cuda_graph` and `compile` chosen where they were left open."""
    path = (
        results / "work" / "steps" / f"{files.digest([shape_id(configs[0]), len(configs), runtime.model_dump()])}.json"
    )
    if path.exists():
        return RuntimeConfig.model_validate_json(path.read_bytes())
    start = {"stack": len(configs), "cuda_graph": runtime.cuda_graph is True, "compile": runtime.compile is True}
    chosen = runtime.model_copy(update=start)
    least = seconds(configs, chosen)
    for name, value in {"stack": 1, "cuda_graph": "auto", "compile": configs[0].n_steps >= COMPILED_STEPS}.items():
        other = chosen.model_copy(update={name: value})
        if getattr(runtime, name) == "auto" and other != chosen and (taken := seconds(configs, other)) < least:
            least, chosen = taken, other
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, chosen.model_dump(mode="json"))
    return chosen


def seconds(configs: Sequence[RunConfig], runtime: RuntimeConfig) -> float:
    """The time of all steps of the runs, by a few of them; infinite if they fail, as where memory runs out."""
    began, first = time.perf_counter(), configs[0]
    shape = first.sequences_per_step, first.seq_len + 1
    batch = next_tokens(np.random.default_rng(0).integers(first.vocab_size, size=shape))
    few = {"train_tokens": STEPS * first.batch_tokens, "log_every": STEPS // 2, "lr": 1e-6}
    try:
        works = [
            training(Decoder(run), run.model_copy(update=few), resolve(run, runtime), lambda _: batch)
            for run in configs
        ]
        *_, last = train_together(works, [Clock() for _ in configs], runtime.stack)
        assert isinstance(last, TrainingResult), last
        rate = last.curves[-1]["tokens_per_second"]  # of one run, while all take turns
        return time.perf_counter() - began + (first.n_steps - STEPS) * first.batch_tokens / rate
    except Exception as error:
        logging.warning("%s was tried, and failed: %s", runtime, error)
        return math.inf
    finally:
        gc.collect()
        torch.cuda.empty_cache()
