"""Runs on another text, or whose automatic precision differs, are refused in one folder; explicit ones may share it."""

import dataclasses
from types import SimpleNamespace

import pytest
from support.tiny_sweep import CPU, run_config

from sparsedepth.data.pipeline import CorpusSource
from sparsedepth.run.comparable import check_same_precision, check_same_stream, check_same_text, checked_source
from sparsedepth.run.execute import execute
from sparsedepth.run.train_and_measure import Options
from sparsedepth.train.runtime import resolve


def test_automatic_precisions_do_not_mix(tmp_path):
    results, auto = tmp_path / "results", run_config(tmp_path, n_layers=1, precision="auto")
    on_cpu = resolve(auto, CPU)
    on_gpu = dataclasses.replace(on_cpu, precision="bf16")
    check_same_precision(auto, on_gpu, results)  # the first run
    execute(run_config(tmp_path, n_layers=1, precision="bf16"), results, Options(runtime=CPU))
    check_same_precision(auto, on_cpu, results)  # an explicit precision is a setting like any other
    execute(auto, results, Options(runtime=CPU))
    check_same_precision(auto, on_cpu, results)
    check_same_precision(run_config(tmp_path, n_layers=1, precision="bf16"), on_gpu, results)
    check_same_stream(on_gpu, results)
    check_same_stream(dataclasses.replace(on_cpu, precision="fp32"), results)
    with pytest.raises(ValueError, match=r"stream=bf16, but run .* with stream=fp32: .* another --out, or stream=fp32"):
        check_same_stream(dataclasses.replace(on_gpu, kernels={"stream": "bf16"}), results)
    with pytest.raises(ValueError, match=f"precision=auto is bf16 on cpu, but run {auto.run_id} of .* in fp32"):
        check_same_precision(auto, on_gpu, results)


@pytest.mark.parametrize("measure", ["usefulness", "joint", "spans", "released_code"])
def test_held_out_text_too_short_to_fit_maps_is_refused_before_training(tmp_path, measure):
    many = 2**15  # tokens; the held-out text has fewer
    fields = {"measures": [measure], "fit_tokens": many, "measure_tokens": many if measure == "released_code" else 128}
    config = run_config(tmp_path, d_model=many // 2, **fields)
    with pytest.raises(ValueError, match=f"d_model={many // 2} needs more than {many // 2 + 1}"):
        checked_source(config, tmp_path / "results")
    checked_source(run_config(tmp_path, measures=[measure]), tmp_path / "results")


def test_few_tokens_for_maps_are_told_before_the_training_by_the_field_that_gives_them(tmp_path):
    fields = {"d_model": 32, "measures": ["spans", "released_code"], "fit_tokens": 128, "measure_tokens": 256}
    with pytest.warns(UserWarning) as told:
        checked_source(run_config(tmp_path, **fields), tmp_path / "results")
    of = {text.rsplit(" ", 1)[1]: text for text in (str(warning.message) for warning in told) if "fit maps" in text}
    assert of.keys() == {"fit_tokens", "measure_tokens"}
    assert of["fit_tokens"].startswith(
        "128 tokens fit maps of width 32: the error of the maps is 25% of what they leave"
    )


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b'{"data": null}', b"{}", b"\xff"])
def test_a_damaged_manifest_of_another_run_does_not_end_this_one(tmp_path, content):
    manifest = tmp_path / "runs" / "0123456789ab" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(content)
    source = CorpusSource()
    facts = SimpleNamespace(data_id="x", corpus="c", data_hash="h")
    source.corpus = SimpleNamespace(folder=tmp_path, manifest=facts, data_hash="h")
    check_same_text(source, tmp_path)
    manifest.write_text('{"data": {"data_id": "x", "data_hash": "another"}}')
    with pytest.raises(ValueError, match="has changed since run 0123456789ab"):
        check_same_text(source, tmp_path)
