"""Two processes with gloo: under DDP and FSDP2 each calls `watch`, and the first one writes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.plain_loop import held_out, llama, train
from torch.nn.parallel import DistributedDataParallel

import sparsedepth as sd
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model.decoder import Decoder


def _model(kind):
    if kind.endswith("decoder"):
        torch.manual_seed(0)
        sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 32, "vocab_size": 64, "seq_len": 16}
        return Decoder(build(RunConfig, sizes | {"batch_tokens": 16, "train_tokens": 16}, "test"))
    return llama()


def _process(rank, kind, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    module = model = _model(kind)
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks if isinstance(model, Decoder) else model.model.layers:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    watch = sd.watch(model, held_out(), every=2, out=folder, name="two", measures="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 5):
        optimizer.zero_grad()
        ids = held_out(4, seed=step + rank)
        if isinstance(module, Decoder):
            model(ids).float().logsumexp(-1).mean().backward()
        else:
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        found = watch(step)
        assert (found is not None) == (rank == 0 and step % 2 == 0)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("number, kind", [*enumerate(["ddp llama", "fsdp llama", "fsdp decoder"])])
def test_two_ranks_give_what_one_gives_in_every_measure_and_write_each_point_once(number, kind, tmp_path):
    mp.spawn(_process, (kind, 29577 + number, str(tmp_path)), nprocs=2)
    alone = sd.watch(_model(kind), held_out(), out=None, measures="all")(0)
    with sd.open_store(tmp_path) as store:
        rows = store.sql("select * from runs order by steps").records()
        n_values = store.sql("select count(*) / 2 from layers").rows[0][0]
    assert [row["steps"] for row in rows] == [2, 4]
    assert n_values == len(alone.layers)
    for row in rows:
        for name, value in alone.summary.items():
            assert row[name] == (value if value is None else pytest.approx(value, rel=1e-5, abs=1e-9)), name


@pytest.mark.slow
def test_a_compiled_model_is_measured_as_it_was_written():
    plain = sd.watch(llama(), held_out(), out=None, measures=["variance", "causal"])(0)
    model = llama()
    compiled = torch.compile(model, backend="eager")
    model.model.layers[1].compile(backend="eager")
    states = train(compiled, 2)
    again = llama()
    watched = torch.compile(again, backend="eager")
    again.model.layers[1].compile(backend="eager")
    watch = sd.watch(watched, held_out(), every=1, out=None, measures=["variance", "causal"])
    assert watch(0).summary == plain.summary
    assert [state[0] for state in train(watched, 2, watch)] == [state[0] for state in states]
