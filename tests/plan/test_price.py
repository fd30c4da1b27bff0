"""What a sweep is priced at: counts worked out by hand, every shipped definition, and what a real step costs."""

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.made_up_runs import make_run
from support.tiny_sweep import CPU, definition as tiny_definition, run_config, sparsedepth
from torch.utils.flop_counter import FlopCounterMode

from sparsedepth import config
from sparsedepth.cli.input_file import sweep_definition
from sparsedepth.cli.pricing import _memory_shortage
from sparsedepth.config.cost import cost
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.data.sequences import open_source
from sparsedepth.measure.suite import measure_run
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import (
    CONTEXT_BYTES,
    DEVICES,
    FITS,
    Place,
    Timing,
    measuring_flops,
    peak_bytes,
    seconds,
    shape_id,
)
from sparsedepth.plan.price import (
    PricingSetup,
    makespan,
    named_device,
    price,
    price_of,
    pricing_setup,
    uncalibrated,
    with_finished,
)
from sparsedepth.plan.tasks import Plan
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.run import train_and_measure
from sparsedepth.run.execute import execute
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store.run_record import read_run
from sparsedepth.sweep import calibrate
from sparsedepth.sweep.calibrate import time_run
from sparsedepth.train.runtime import resolve
from sparsedepth.words.price import shortage_text
from sparsedepth.words.sweep import plan_notes

FILES = sorted(path for path in (Path(__file__).parent.parent.parent / "sparsedepth/examples").glob("*.yaml"))
BASE = {"seq_len": 64, "batch_tokens": 512, "train_tokens": 5120, "measure_tokens": 256, "fit_tokens": 256}


def sweep(**fields) -> SweepDefinition:
    content = {"name": "s", "question": "q", "hypothesis": "h", "base": BASE, "space": {"n_layers": [2, 4]}}
    return build(SweepDefinition, {**content, "seeds": [0, 1, 2], **fields}, "s")


@pytest.mark.filterwarnings("ignore:depth_scale='lns' with init='scaled'")
def test_every_shipped_sweep_has_a_price():
    started = time.process_time()
    for path in FILES:
        plan = Plan(build(SweepDefinition, read_yaml(path), str(path)))
        found = price(plan, PricingSetup(device="h100", place=Place(device="cuda")))
        assert found.runs >= len(found.kinds) > 0
        assert found.seconds.value > 0 and found.memory_bytes > 12 * found.kinds[0].params_total
    assert time.process_time() - started < 10


def test_a_cell_is_built_once_for_all_that_ask(monkeypatch):
    built, run_config = [], SweepDefinition.run_config

    def counted(definition, cell, seed):
        built.append(cell)
        return run_config(definition, cell, seed)

    monkeypatch.setattr(SweepDefinition, "run_config", counted)
    plan = Plan(sweep(space={"n_layers": [2, 4], "lr": [1e-3, 2e-3]}))
    for _ in range(2):
        assert price(plan, PricingSetup()).runs == plan.expected == len(plan.tasks()) == 12
        assert len({plan.run_of(task).run_id for task in plan.tasks()}) == 12 and not [*plan_notes(plan)]
    assert len(built) == 4


def test_the_disk_holds_records_three_checkpoints_of_each_running_run_and_the_text():
    """A checkpoint has 12 bytes a parameter, a record 4 and 100,000; a token 2 bytes up to a vocabulary of 65,536."""
    for vocab_size, width in ((65_536, 2), (65_537, 4)):
        base = {**BASE, "vocab_size": vocab_size, "max_corpus_tokens": 1000}
        found = price(Plan(sweep(base=base)), PricingSetup(workers=2))
        small, large = sorted(kind.params_total for kind in found.kinds)
        assert found.data_bytes == 1000 * width
        records = 3 * (4 * small + 100_000) + 3 * (4 * large + 100_000)
        assert found.disk_bytes == records + 2 * 3 * 12 * large + 1000 * width
        many = price(Plan(sweep(base=base)), PricingSetup(workers=64))
        assert many.disk_bytes == records + 6 * 3 * 12 * large + 1000 * width  # of six runs


def test_runs_of_one_shape_are_one_kind():
    found = price(Plan(sweep(space={"n_layers": [2, 4], "lr": [1e-3, 2e-3]})), PricingSetup(workers=2))
    assert [(kind.varied, kind.runs) for kind in found.kinds] == [({"n_layers": 4}, 6), ({"n_layers": 2}, 6)]
    assert found.tokens == 12 * 5120 and found.bound == ""


def test_a_search_without_a_point_left_is_refused():
    for fields in ({"exclude": [{"n_layers": [2, 4]}]}, {"constraints": {"params_total": 10}}):
        with pytest.raises(ValueError, match="'exclude' and 'constraints' leave no point of the space; relax"):
            price(Plan(sweep(sampler="tpe", n_trials=4, **fields)), PricingSetup())


def test_a_search_is_priced_where_few_points_keep_its_constraints():
    """Of 24 depths one is small enough, which three draws miss."""
    one = cost(sweep().run_config({"n_layers": 1}, 0)).params_total
    fields = {"space": {"n_layers": [*range(24, 0, -1)]}, "constraints": {"params_total": one}, "n_trials": 3}
    assert {kind.params_total for kind in price(Plan(sweep(sampler="tpe", **fields)), PricingSetup()).kinds} == {one}


def test_the_finished_runs_of_a_search_correct_its_price(tmp_path):
    """Its runs have other learning rates than those that are priced."""
    plan = Plan(sweep(sampler="tpe", n_trials=4, space={"lr": {"low": 1e-3, "high": 1e-2}}))
    run = plan.definition.run_config({"lr": 0.00123}, 0)
    assumed = price(plan, PricingSetup())
    facts = {"device": "cpu (x86_64)", "seconds": 2 * assumed.kinds[0].seconds.value}
    make_run(tmp_path, run, {"val_loss": 1.0, "outcome": "ok"}, manifest=facts)
    found = price(plan, with_finished(PricingSetup(), tmp_path, plan.expected_runs()))
    assert found.seconds.value == pytest.approx(2 * assumed.seconds.value) and found.is_calibrated


def test_tuning_runs_and_seeds_are_counted():
    """2 depths x (3 rates with each tuning seed, then the 3 seeds at the best); seeds that are reused are run once."""
    tuned = {"tune": {"lr": [1e-3, 2e-3, 4e-3]}}
    found = price(Plan(sweep(**tuned, tuning_seeds=[101, 102])), PricingSetup())
    assert found.runs == 2 * (3 * 2 + 3) and found.bound == "at least"
    assert price(Plan(sweep(**tuned, tuning_seeds=[0], reuse_tuning_seeds=True)), PricingSetup()).runs == 2 * (3 + 2)


def test_proposals_are_an_upper_bound():
    found = price(Plan(sweep(sampler="tpe", n_trials=7, seeds=[0, 1])), PricingSetup())
    assert found.runs == 14 and found.bound == "at most" and len(found.kinds) == 2


@pytest.mark.parametrize(("workers", "end"), [(1, 10.0), (2, 5.0), (4, 4.0)])
def test_the_end_of_tasks_on_several_workers_by_hand(workers, end):
    assert makespan([4.0, 3.0, 2.0, 1.0], workers) == end


@pytest.mark.parametrize("fields", [{}, {"n_experts": 4, "top_k": 2}], ids=str)
def test_training_flops_are_those_of_a_real_step(fields):
    """By the plain loss: the counter does not know the in-place product of the one that keeps to a budget."""
    config = RunConfig(**BASE, d_model=128, n_layers=3, vocab_size=512, **fields)
    model = Decoder(config, 0)
    model.use_kernels(experts="loop")
    tokens_BT1 = torch.randint(512, (8, 65))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits_BTV = model(tokens_BT1[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten()).backward()
    planned = price_of([config], PricingSetup()).train_flops / config.n_steps
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_what_changes_no_price_changes_no_shape():
    run = RunConfig(**BASE)
    assert shape_id(run) == shape_id(run.model_copy(update={"seed": 3, "lr": 1e-2, "depth_scale": "lns"}))
    assert shape_id(run) != shape_id(run.model_copy(update={"train_tokens": 512}))
    longer = run.model_copy(update={"train_tokens": 512})
    assert shape_id(run, step_only=True) == shape_id(longer, step_only=True)


def test_measures_cost_what_they_run():
    """Adding 10 pairs of layers to swap adds 10 x 2/3 passes over the blocks, and 10 over the head."""
    run = RunConfig(**BASE, n_layers=12, measures=["permutation"], permutation_pairs=10, vocab_size=300)
    more = run.model_copy(update={"permutation_pairs": 20})
    head = 2 * 300 * 64
    body = 2 * (12 * (4 * 64**2 + 3 * 64 * 176)) + 4 * 12 * 64 * 64
    assert measuring_flops(more) - measuring_flops(run) == pytest.approx(256 * 10 * (2 / 3 * body + head))


NOT_COUNTED = dict.fromkeys(("jacobian", "jacobian_map", "gradients"), "the counter refuses torch.autograd.grad")
LEAST = {
    "attention": 0.4,  # softmax and thresholds of all weights take as long as a pass, and are no products
    "activations": 0.6,  # likewise the thresholds of all hidden units
    "experts": 0.5,  # the counter does not know the grouped product
    "joint": 0.6,  # an upper bound: it stops when no block is left that can be replaced
}
"""The least share of its price that a measure computes, where it is not 0.84."""
ARCHITECTURE = {"experts": {"n_experts": 4, "top_k": 2}, "trace_map": {"n_layers": 2}}  # 64 passes a layer


@pytest.mark.parametrize("measure", [measure.name for measure in MEASURES if measure.name not in NOT_COUNTED])
def test_a_measure_computes_what_it_is_priced_at(measure, tmp_path):
    """A sixth less at most: the products of attention's scores, which the kernel computes, are not counted. The counter
    knows PyTorch's products only."""
    task = {**BASE, "corpus": "task:state_tracking", "n_layers": 6, "vocab_size": 3000, "val_tokens": 256}
    run = RunConfig(**{**task, **ARCHITECTURE.get(measure, {})}, observe_every=1000, measures=[measure])
    source = open_source(run, tmp_path)
    with FlopCounterMode(display=False) as counter:
        measure_run(ProbedDecoder(Decoder(run, 0).eval()), run, source.held_out, step=0, eod=source.eod)
    counted, priced = counter.get_total_flops(), measuring_flops(run)
    message = f"{measure} is priced at {priced:.3g} FLOPs (`Measure` in sparsedepth/quantities/measured.py)"
    assert LEAST.get(measure, 0.84) * priced <= counted <= 1.05 * priced, f"{message}, and computes {counted:.3g}"


def test_a_calibrated_time_is_steps_and_measures():
    run = RunConfig(**BASE, measures=["loss"], val_tokens=1000, observe_every=1000)
    found = seconds(run, Place(), DEVICES["cpu"], Timing(step=2.0, forward=0.01))
    assert found.calibrated and found.value == pytest.approx(DEVICES["cpu"].start + 10 * 2.0 + 1000 * 0.01)
    assert not seconds(run, Place(), DEVICES["cpu"]).calibrated


def test_a_shape_is_timed():
    """A step of eight times the work takes longer; what is timed needs no calibration any more."""
    small, large = (RunConfig(**BASE, n_layers=n, precision="fp32") for n in (1, 8))
    first, second = (time_run(run, resolve(run)) for run in (small, large))
    assert 0 < first.step < second.step and 0 < first.forward < second.forward
    known = PricingSetup(timings={shape_id(small, step_only=True): first})
    found = price_of([small, large], known)
    assert [kind.seconds.calibrated for kind in found.kinds] == [True, False] and not found.is_calibrated
    both = sweep(base={**BASE, "precision": "fp32"}, space={"n_layers": [1, 8]})
    assert [run.n_layers for run in uncalibrated(Plan(both).expected_runs(), known)] == [8]


@pytest.mark.slow  # three commands that import torch
def test_a_sweep_says_its_price_and_plan_takes_what_its_runs_took(tmp_path):
    file, results = tiny_definition(tmp_path), tmp_path / "results"
    out, _ = sparsedepth("sweep", file, "--out", results, "--workers", 2, "--dry-run")
    assert "total: 4 runs" in out and not results.exists()
    out, _ = sparsedepth("sweep", file, "--out", results, "--workers", 2, "--stack", 1)
    assert "cost: 4 runs" in out
    out, _ = sparsedepth("plan", file, "--out", results, "--workers", 2)
    assert "corrected by finished runs of 2 shapes" in out


def test_runs_that_share_a_gpu_share_its_products_and_not_the_launching():
    """Launching a step of 2 layers takes 3 x 2 x 1.1 ms; a narrow model waits for it, a wide one for its products."""
    fields = {**BASE, "n_layers": 2, "measures": ["loss"], "val_tokens": 64, "observe_every": 1000, "precision": "bf16"}
    narrow, wide = RunConfig(**fields), RunConfig(**{**fields, "d_model": 8192, "n_heads": 64, "fit_tokens": 8256})
    device, alone, shared = DEVICES["h100"], Place(device="cuda"), Place(device="cuda", sharing=4)
    step = {}
    for run in (narrow, wide):
        rate = 9.89e14 * run.d_model / (run.d_model + 12 * 9.89e14 / 3.35e12)
        products = cost(run).train_flops(512) / rate
        assert (products < 6.6e-3) is (run is narrow)
        for place in (alone, shared):
            measuring = place.sharing * measuring_flops(run) / device.fp32_rate
            step[run.d_model, place.sharing] = (seconds(run, place, device).value - device.start - measuring) / 10
            expected = max(6.6e-3, place.sharing * products)
            assert step[run.d_model, place.sharing] == pytest.approx(expected, rel=1e-6)
    assert step[narrow.d_model, 4] == pytest.approx(6.6e-3) and step[8192, 4] == pytest.approx(4 * step[8192, 1])


def test_launching_is_priced_where_steps_cannot_be_captured():
    times = {}
    for optimizer in ("adamw", "muon"):
        run = RunConfig(**{**BASE, "optimizer": optimizer})
        for graph in (False, "auto"):
            times[optimizer, graph] = seconds(run, Place(device="cuda", cuda_graph=graph), DEVICES["h200"]).value
    assert times["adamw", "auto"] < times["adamw", False] and times["muon", "auto"] == times["muon", False]


DENSE = {"n_layers": 24, "d_model": 1024, "n_heads": 8, "d_ff": 2816, "batch_tokens": 32768}
LARGE = {"n_layers": 32, "d_model": 1536, "n_heads": 12, "d_ff": 5376, "batch_tokens": 16384}
EXPERTS = {**DENSE, "n_layers": 16, "batch_tokens": 16384, "n_experts": 8, "top_k": 2, "d_expert": 2048}
NARROW = {"n_layers": 24, "d_model": 256, "n_heads": 4, "batch_tokens": 16384, "seq_len": 256, "vocab_size": 264}
H200 = {
    "374M": (DENSE, {"compile": True}, 197e3, 34.3),
    "374M, not compiled": (DENSE, {}, 128e3, 45.2),
    "1.2B": (LARGE, {"compile": True}, 67.5e3, 49.3),
    "experts": (EXPERTS, {"compile": True}, 163e3, 27.6),
    "narrow": (NARROW, {}, 211e3, None),
    "narrow, graph": (NARROW, {"cuda_graph": True}, 621e3, None),
    "narrow, compiled": (NARROW, {"compile": True}, 358e3, None),
    "narrow, compiled, graph": (NARROW, {"compile": True, "cuda_graph": True}, 1226e3, 4.0),
}
"""Shape, runtime, tokens per second and the peak in GB that PyTorch allocated, in bf16."""


@pytest.mark.parametrize("name", H200)
def test_the_rates_and_peaks_of_an_h200(name):
    """Rates within an eighth; with experts, whose products are narrower than the model, within 35%."""
    fields, runtime, rate, peak = H200[name]
    base = {"seq_len": 1024, "vocab_size": 32000, "train_tokens": 2**22, "fit_tokens": 2**15, "measures": ["loss"]}
    run = RunConfig(**{**base, "val_tokens": 1024, "observe_every": 10**6, **fields})
    place, device = Place(device="cuda", **runtime), DEVICES["h200"]
    training = seconds(run, place, device).value - device.start
    assert 2**22 / training == pytest.approx(rate, rel=0.35 if run.n_experts else 0.125)
    assert peak is None or peak_bytes(run, place) == pytest.approx(1e9 * peak, rel=0.08)


def test_a_gpu_goes_by_its_name_and_a_shared_one_has_a_share_of_its_memory_for_each_run():
    assert named_device("NVIDIA H100 80GB HBM3") == "h100" and named_device("NVIDIA RTX 4090") == "a100"
    setup = pricing_setup(RuntimeConfig(), device="h100", workers=6, gpus=2)
    assert (setup.devices, setup.place.sharing) == (2, 3)
    assert pricing_setup(RuntimeConfig(), device="cpu", workers=6).place.sharing == 1
    whole = SimpleNamespace(setup=setup, memory_bytes=30e9)
    shortage = _memory_shortage(Plan(sweep()), whole)
    assert shortage and "does not fit into 26.7 GB" in shortage_text(shortage)
    whole.memory_bytes = 26e9
    assert _memory_shortage(Plan(sweep()), whole) is None


EXAMPLES = sorted((Path(config.__file__).parents[1] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_fits_the_card_that_its_cost_names(path):
    """Also a card of 80 GB where it names none. Split is what does not fit whole; the largest power of 2 is taken."""
    found = sweep_definition(path)
    plan = Plan(found)
    card = re.search(r"h[12]00", found.cost.lower())
    setup = pricing_setup(RuntimeConfig(), device=card[0] if card else "h100", workers=1)
    total = price(plan, setup)
    assert total.memory_bytes <= FITS * DEVICES[setup.device].memory
    runs = {shape_id(run): run for run in plan.expected_runs()}
    for kind in total.kinds:
        doubled = replace(setup.place, micro_batch=kind.micro_batch and 2 * kind.micro_batch)
        peak = peak_bytes(runs[kind.shape_id], doubled) + CONTEXT_BYTES["cuda"]
        assert (peak > FITS * 80e9) == (kind.micro_batch is not None)


def test_a_run_takes_the_planned_micro_batch_from_its_first_step(tmp_path, monkeypatch):
    """The made-up card has memory for two of its four sequences, and of half of it for one."""
    run = run_config(tmp_path)
    peaks = {size: peak_bytes(run, Place(micro_batch=size)) for size in (4, 2, 1)}
    assert peaks[4] > peaks[2] > peaks[1]
    memory = (peaks[2] + peaks[4]) / 2 / FITS
    monkeypatch.setattr(train_and_measure, "device_memory", lambda device: memory)
    asked = CPU.model_copy(update={"micro_batch": 4})
    all_options = Options(runtime=CPU), Options(runtime=CPU, sharing=2), Options(runtime=asked)
    for seed, (options, expected) in enumerate(zip(all_options, (2, 1, 4), strict=True)):
        folder = execute(run.model_copy(update={"seed": seed}), tmp_path / "results", options)
        assert read_run(folder).manifest["micro_batch"] == expected


def test_each_shape_is_timed_as_the_only_one(monkeypatch):
    """What was compiled for a shape is forgotten before the next."""
    done: list[str] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(calibrate, "time_run", lambda *_: done.append("timed") or Timing(step=1.0, forward=1.0))
    shapes = [calibrate._timed(RunConfig(**BASE, n_layers=n), RuntimeConfig(device="cpu"), 1)[0] for n in (1, 2)]
    assert done == ["reset", "timed"] * 2 and len({*shapes}) == 2
