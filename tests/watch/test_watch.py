"""`sparsedepth.watch` in a plain loop: what it measures, what it writes, and that it changes nothing."""

import json
import os
import signal
import sys
import time
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.hf_families import tiny
from support.plain_loop import NAMES, Capped, Headless, Plain, held_out, llama, train

import sparsedepth as sd
from sparsedepth.store.run_record import verify
from sparsedepth.watch.watching import scalars

MEASURES = ["variance", "usefulness", "causal"]
pytestmark = pytest.mark.filterwarnings("ignore:.*tokens fit maps")


@pytest.mark.parametrize("make", [llama, Plain])
def test_training_is_the_same_to_the_last_bit_with_and_without_it(make):
    names = NAMES if make is Plain else {}
    torch.manual_seed(0)
    plain = train(make(), 4)
    torch.manual_seed(0)
    model = make()
    watch = sd.watch(model, held_out(), every=1, out=None, measures=[*MEASURES, "jacobian", "gradients"], **names)
    assert train(model, 4, watch) == plain
    assert watch.last is not None and watch.last.summary["causal_score"] > 0


def test_a_buffer_that_a_forward_pass_replaces_is_the_one_of_before():
    class Counting(Plain):
        def forward(self, ids):
            self.n_calls = self.n_calls + 1
            return super().forward(ids)

    model = Counting()
    before = model.n_calls
    sd.watch(model, held_out(), out=None, measures=["variance"], **NAMES)(0)
    assert model.n_calls is before and before == 0


def test_a_failing_measure_is_a_warning_and_changes_nothing(monkeypatch):
    plain, model = train(llama(), 1), llama()
    watch = sd.watch(model, held_out(), every=1, out=None, measures=MEASURES)

    def fail(context, rows):
        context.probed.model.eval()
        torch.rand(3), np.random.rand(3)
        raise RuntimeError("out of luck")

    monkeypatch.setitem(sys.modules["sparsedepth.measure.suite"].SUITE, "causal", fail)
    with pytest.warns(UserWarning, match="the measure causal failed at step 1, and its numbers are missing: .*luck"):
        states = train(model, 1, watch)
    assert states == plain
    assert "causal_score" not in watch.last.summary and watch.last.summary["usefulness"] is not None


def test_a_module_by_its_paths_gives_what_its_type_gives():
    """The adapter of any module against the one of transformers, whose numbers are tested elsewhere."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids).logits

    names = {"layers": "inner.model.layers", "norm": "inner.model.norm", "head": "inner.lm_head"}
    measures = [*MEASURES, "permutation", "geometry", "loss", "early_exit", "lens", "participation"]
    own = sd.watch(llama(), held_out(), out=None, measures=measures)(0)
    by_path = sd.watch(Wrapped(llama()), held_out(), out=None, measures=measures, **names)(0)
    shared = {name for name, value in by_path.summary.items() if value is not None}
    assert len(shared) > 60
    expected = pytest.approx({name: own.summary[name] for name in shared}, rel=1e-9)
    assert {name: by_path.summary[name] for name in shared} == expected


def test_logits_are_found_among_what_a_module_returns():
    class Returning(Plain):
        def __init__(self, made):
            super().__init__()
            self.made = made

        def forward(self, ids):
            logits = super().forward(ids)
            return self.made(logits[..., :3], logits)

    made = (lambda _, logits: logits, lambda *both: both, lambda x, logits: {"states": x, "logits": logits})
    watched = (sd.watch(Returning(each), held_out(), out=None, measures=["loss"], **NAMES) for each in made)
    assert all(watch(0).summary["val_loss"] is not None for watch in watched)


def test_a_model_in_bf16_is_measured_in_fp32():
    """Its own forward pass rounds to 8 bits; the measures cast its weights, as of a model that was cast as a whole."""
    model = llama().bfloat16()
    found = sd.watch(model, held_out(), out=None, measures=MEASURES)(0)
    whole = sd.watch(llama().bfloat16().float(), held_out(), out=None, measures=MEASURES)(0)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    for name in ("residual_variance_last", "causal_score", "usefulness_loss_increase"):
        assert found.summary[name] == pytest.approx(whole.summary[name], rel=0.02, abs=1e-4)


@pytest.mark.parametrize("names", [NAMES, {"layers": "trunk.blocks"}])
def test_logits_that_a_module_in_bf16_returns_in_fp32_are_its_own(names):
    class Upcast(Plain):
        def forward(self, ids):
            logits = super().forward(ids).float()
            return logits if names is NAMES else torch.tanh(logits)

    torch.manual_seed(0)
    model = Upcast().bfloat16()
    found, whole = (
        sd.watch(each, held_out(), out=None, measures=["loss"], **names)(0).summary["val_loss"]
        for each in (model, deepcopy(model).float())
    )
    assert found == pytest.approx(whole, rel=0.005)


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "qwen3_next"])
def test_a_type_whose_head_scales_or_whose_block_reads_more_is_watched_in_bf16_too(family):
    model, wide = tiny(family).bfloat16(), tiny(family).bfloat16().float()
    measures = ["loss", "attention"]
    found, whole = (sd.watch(each, held_out(), out=None, measures=measures)(0).summary for each in (model, wide))
    assert found["val_loss"] == pytest.approx(whole["val_loss"], rel=0.005)
    assert found["attention_sink"] == pytest.approx(whole["attention_sink"], rel=0.02)


def test_each_point_is_a_record_that_stays_and_the_same_call_goes_on(tmp_path):
    def watched(**changes):
        given = {"every": 2, "out": tmp_path, "name": "a", "seed": 1, "settings": {"depth_scale": "lns"}}
        return sd.watch(llama(), held_out(), tokens_per_step=64, **(given | changes))

    with watched() as watch:
        found = [watch(step) for step in range(5)]
        assert [each is not None for each in found] == [True, False, True, False, True]
    with pytest.raises(ValueError, match="this watch is closed"):
        watch(6)
    again = watched()
    assert [again(step) for step in (2, 4)] == [None, None] and again(6) is not None
    assert watched()(7, now=True) is not None
    for folder in tmp_path.glob("runs/*"):
        verify(folder)
        assert json.loads((folder / "manifest.json").read_text())["code"] == "outside"
    with sd.open_store(tmp_path) as store:
        rows = store.sql(
            "select steps, tokens_trained, seed, depth_scale, n_layers, d_model, batch_tokens, cluster, outcome, "
            "causal_score is not null as has_score from runs order by steps"
        ).rows
        layers = store.sql("select step, count(*) from layers where metric = 'residual_variance' group by 1 order by 1")
    common = (1, "lns", 3, 16, None, "a", "ok", True)
    assert rows == tuple((step, 64 * step, *common) for step in (0, 2, 4, 6, 7))
    assert layers.rows == tuple((step, 4) for step in (0, 2, 4, 6, 7))
    for changes, told in (
        ({"settings": {}}, "depth_scale=lns, now None"),
        ({"seed": 2}, "seed=1, now 2"),
        ({"tokens_per_step": 32}, "tokens_per_step=64, now 32"),
    ):
        with pytest.raises(ValueError, match=f"'a' in .* is another training .*{told}.*give another name or out"):
            sd.watch(llama(), held_out(), **({"every": 2, "out": tmp_path, "name": "a", "seed": 1,
                "settings": {"depth_scale": "lns"}, "tokens_per_step": 64} | changes))  # fmt: skip
    with pytest.raises(ValueError, match=r"'a' in .* is another training \(n_layers=3, now 2"):
        sd.watch(llama(2), held_out(), out=tmp_path, name="a", seed=1, settings={"depth_scale": "lns"})


def test_measures_that_are_added_are_of_later_points_and_told_once(tmp_path, recwarn):
    def steps_with(measures, *steps):
        watch = sd.watch(llama(), held_out(), every=1, out=tmp_path, name="a", measures=measures)
        found = [step for step in steps if watch(step) is not None]
        return found, [str(warning.message) for warning in recwarn.list]

    assert steps_with(["variance"], 1, 2) == ([1, 2], [])
    told = "points of 'a' up to step 2 lack weights, causal: they stay as they are, and later ones have it; for all "
    added = ["variance", "weights", "causal"]
    assert steps_with(added, 2, 3) == ([3], [told + "steps give another name"])
    assert steps_with(added, 4) == ([4], [told + "steps give another name"])  # once
    with sd.open_store(tmp_path) as store:
        rows = store.sql("select steps, causal_score is null, weight_sparsity is null from runs order by 1").rows
    assert rows == ((1, True, True), (2, True, True), (3, False, False), (4, False, False))


def test_all_measures_are_those_that_a_module_has_the_parts_for(capsys):
    """A head gives losses and logits; without one neither, and never the parts of a block."""
    watch = sd.watch(Plain(), held_out(32), every=1, out=None, measures="all", **NAMES)
    parts = "attention, experts, activations, released_code (reads parts of a block"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sparsedepth: left out of the measures: {parts} that are not known") and "head" not in line
    found = watch(1)
    assert {"val_loss", "usefulness", "residual_variance_last", "causal_score"} <= found.summary.keys()
    sd.watch(Headless(), held_out(32), every=1, out=None, measures="all", layers="trunk.blocks")
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "attention, experts, activations (reads" in line
        and "trace, trace_map, lens, released_code (needs the logits" in line
    )
    losses = "usefulness, loss, early_exit, permutation, removal, joint, spans, gradients"
    assert f"{losses} (needs a loss; give loss=" in line
    sd.watch(llama(), held_out(32), every=1, out=None, measures="all")
    assert not capsys.readouterr().err


def test_without_names_the_module_itself_reads_out_the_stream():
    """The same numbers as by its norm and head; also where the norm is no module, and the logits are capped."""
    torch.manual_seed(3)
    model = Plain()
    named, own = (
        sd.watch(model, held_out(32), every=1, out=None, measures="all", **names)(1)
        for names in (NAMES, {"layers": "trunk.blocks"})
    )
    assert own.summary.keys() == named.summary.keys() and len(own.summary) > 100
    for name, value in named.summary.items():
        assert own.summary[name] == (pytest.approx(value, rel=1e-3, abs=1e-4) if type(value) is float else value), name
    capped, ids = Capped().eval(), held_out(32)
    found = sd.watch(capped, ids, every=1, out=None, measures=["loss", "usefulness", "lens"], layers="trunk.blocks")(1)
    scored = ids[:16]
    loss = F.cross_entropy(capped(scored[:, :-1])["logits"].flatten(0, 1), scored[:, 1:].flatten())
    assert found.summary["val_loss"] == pytest.approx(loss.item(), rel=1e-5) and "usefulness" in found.summary


def test_flops_are_those_of_all_parameters_unless_some_are_of_experts_or_tokens_are_not_known(tmp_path):
    n_params = sum(weight.numel() for weight in llama().parameters())
    for name, given in {"a": {}, "b": {"tokens_per_step": 64}, "c": {"tokens_per_step": 64, "experts": 4}}.items():
        model = llama()
        model.config.n_routed_experts = given.pop("experts", 0)  # one of the names of their number
        sd.watch(model, held_out(), every=1, out=tmp_path, name=name, measures=["variance"], **given)(10)
    with sd.open_store(tmp_path) as store:
        columns = "tokens_trained, params_total, train_flops, tokens_per_param, n_experts"
        rows = store.sql(f"select {columns} from runs order by cluster").rows
    share = 640 / n_params
    assert rows == (
        (None, n_params, None, None, None),
        (640, n_params, 6 * n_params * 640, share, None),
        (640, n_params, None, share, 4),
    )


def test_scalars_by_layer_go_where_the_tracker_takes_them():
    got = {}

    class Writer:
        def add_scalar(self, name, value, step):
            got["tensorboard", name] = (value, step)

    class Run:
        def log(self, values, step):
            got["wandb"] = (values, step)

    class Mlflow:
        def log_metrics(self, values, step):
            got["mlflow"] = (values, step)

    for log in (Writer(), Run(), Mlflow(), lambda values, step: got.update(plain=(values, step))):
        sd.watch(llama(), held_out(), every=1, out=None, measures=["variance"], log=log)(1)
    values, step = got["plain"]
    assert step == 1 and got["wandb"] == got["mlflow"] == got["plain"]
    assert got["tensorboard", "residual_variance/layer_003"] == (values["residual_variance/layer_003"], 1)
    assert values["sparsedepth/residual_variance_last"] == values["residual_variance/layer_003"]
    assert [name for name in values if name.startswith("residual_variance/")] == [
        f"residual_variance/layer_00{layer}" for layer in range(4)
    ]


def test_a_tracker_that_fails_is_a_warning(tmp_path):
    def log(values, step):
        raise ConnectionError("no network")

    watch = sd.watch(llama(), held_out(), out=tmp_path, log=log, measures=["variance"])
    with pytest.warns(UserWarning, match="log failed at step 0: ConnectionError: no network"):
        assert scalars(watch(0))
    assert len([*tmp_path.glob("runs/*/complete")]) == 1


def test_a_stream_that_is_not_finite_is_a_diverged_point(tmp_path):
    model = llama()
    watch = sd.watch(model, held_out(), out=tmp_path, every=1, measures=["variance"])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    watch(3)
    with sd.open_store(tmp_path) as store:
        rows = store.sql("select outcome, diverged_step, residual_variance_last from runs").rows
    assert rows == (("diverged", 3, None),)


def test_its_cost_is_told_once_and_a_budget_takes_fewer_sequences(tmp_path, capsys, monkeypatch):
    """A clock whose steps take 1 s, and a measurement 4 s: 40% of ten steps."""
    clock = iter(np.arange(1000.0))
    monkeypatch.setattr("sparsedepth.watch.watching.time.perf_counter", lambda: next(clock))
    tokens = held_out(64)
    watch = sd.watch(llama(), tokens, every=10, out=tmp_path, measures=["variance"], budget=0.025)
    for step in range(21):
        watch(step)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "sparsedepth: measuring takes 1 s, 10% of a step's time at every=10; from now on 16 of 64 sequences, to stay "
        "within the budget"
    ]
    with sd.open_store(tmp_path) as store:
        rows = store.sql("select steps, measure_tokens from runs order by 1").rows
    assert rows == ((0, 1024), (10, 1024), (20, 256))
    assert sd.watch(llama(), tokens, every=10, out=tmp_path, measures=["variance"], budget=0.025)(20) is None


def test_a_step_has_one_point_however_many_sequences_it_was_measured_on(tmp_path, monkeypatch):
    """The end of a training at its first point, or a kill soon after it: the budget has acted meanwhile."""
    clock = iter(np.arange(1000.0))
    monkeypatch.setattr("sparsedepth.watch.watching.time.perf_counter", lambda: next(clock))

    def watched():
        return sd.watch(llama(), held_out(64), every=10, out=tmp_path, measures=["variance"], budget=0.025)

    watch = watched()
    found = [watch(step) is not None for step in range(1, 11)]
    assert found[-1] and watch.n_sequences == 16 and watch(10, now=True) is None
    again = watched()
    assert [again(step) for step in range(6, 11)] == [None] * 5
    with sd.open_store(tmp_path) as store:
        assert store.sql("select steps, measure_tokens from runs").rows == ((10, 1024),)


def test_a_budget_is_kept_by_a_training_that_goes_on(tmp_path, monkeypatch):
    """Again 10% of a step's time, now for 16 of 64 sequences: a quarter of those, not of all."""
    clock = iter(np.arange(1000.0))
    monkeypatch.setattr("sparsedepth.watch.watching.time.perf_counter", lambda: next(clock))
    for budget, steps, left in ((0.025, range(11), 16), (0.025, range(11, 31), 4)):
        watch = sd.watch(llama(), held_out(64), every=10, out=tmp_path, measures=["variance"], budget=budget)
        for step in steps:
            watch(step)
        assert watch.n_sequences == left


def test_ids_are_checked_against_the_words_of_a_module_that_looks_up_positions_first():
    model = Plain()
    model._modules = {"positions": torch.nn.Embedding(4, 16), **model._modules}
    assert sd.watch(model, held_out(), out=None, measures=["variance"], **NAMES)(0)
    with pytest.raises(ValueError, match=r"tokens are from 32 to .*, and the model's ids from 0 to 31"):
        sd.watch(model, held_out() + 32, out=None, measures=["variance"], **NAMES)


def test_too_few_tokens_for_maps_are_told_once_with_what_watch_takes(recwarn):
    filters = warnings.filters[:]
    watch = sd.watch(llama(), held_out(8), every=1, out=None, measures=["usefulness", "joint"])
    assert [watch(step) is not None for step in range(2)] == [True, True]
    (told,) = [str(warning.message) for warning in recwarn.list]
    assert told.startswith(
        "64 tokens fit maps of width 16: the error of the maps is 25% of what they leave; 256 tokens"
    )
    assert told.endswith("256 tokens make it 6%: give watch more sequences of tokens") and warnings.filters == filters
    sd.watch(llama(), held_out(32), every=1, out=None)
    assert len(recwarn.list) == 1


def loop(folder, pipe):
    """Tells each point that is written, for ever."""
    watch = sd.watch(llama(1), held_out(2), every=1, out=folder, name="a", measures=["variance"])
    for step in range(10_000):
        if watch(step):
            os.write(pipe, f"{step}\n".encode())


@pytest.mark.slow
def test_no_point_is_lost_or_written_twice_by_kills(tmp_path):
    """The same call, killed 50 times: what was told as written is there, and nothing is measured again."""
    told: list[int] = []
    for round in range(50):
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            try:
                loop(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        first = os.read(reading, 100)  # of a point at least
        time.sleep(0.002 * (round % 17))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        rest = b"".join(iter(lambda: os.read(reading, 1000), b""))  # noqa: B023
        os.close(reading)
        told += [int(line) for line in (first + rest).decode().split()]
    with sd.open_store(tmp_path) as store:
        stored = [step for (step,) in store.sql("select steps from runs order by 1").rows]
    assert len(told) == len({*told}) >= 50 and {*stored} >= {*told}
    assert stored == [*range(len(stored))]
    assert len(stored) - len(told) <= 50  # written, and killed before it was told
