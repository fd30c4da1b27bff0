"""Runs whose automatic precision differs are refused in one folder; explicit ones may share it."""

import dataclasses

import pytest
from support.tiny_sweep import BASE, corpus

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.run.execute import execute
from sparsedepth.run.same_precision import check_same_precision
from sparsedepth.run.train_and_measure import Options
from sparsedepth.train.runtime import resolve

CPU = RuntimeConfig(device="cpu", threads=1)


def config(folder, precision: str) -> RunConfig:
    fields = {"n_layers": 1, "corpus": str(corpus(folder)), "measures": ["loss"], "precision": precision}
    return build(RunConfig, {**BASE, **fields}, "x")


def test_automatic_precisions_do_not_mix(tmp_path):
    results, auto = tmp_path / "results", config(tmp_path, "auto")
    on_cpu = resolve(auto, CPU)
    on_gpu = dataclasses.replace(on_cpu, precision="bf16")
    check_same_precision(auto, on_gpu, results)  # the first run
    execute(config(tmp_path, "bf16"), results, Options(runtime=CPU))
    check_same_precision(auto, on_cpu, results)  # an explicit precision is a setting like any other
    execute(auto, results, Options(runtime=CPU))
    check_same_precision(auto, on_cpu, results)
    check_same_precision(config(tmp_path, "bf16"), on_gpu, results)
    with pytest.raises(ValueError, match=f"precision=auto is bf16 on cpu, but run {auto.run_id} of .* in fp32"):
        check_same_precision(auto, on_gpu, results)
