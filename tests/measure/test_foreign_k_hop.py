"""transformers' Llama, trained on k-hop induction by a plain loop: the deeper the hops that count, the more blocks."""

import json

import numpy as np
import pytest
import torch
from support.tiny_sweep import sparsedepth

from sparsedepth.config.run import RunConfig
from sparsedepth.data.sequences import open_source

HOPS, STEPS, N = (1, 2, 3, 4), 2400, 64
MODEL = {"n_layers": 8, "d_model": 32, "n_heads": 2, "d_ff": 64, "seq_len": 32}
HOP = {"corpus": "task:k_hop", "letters": 4, "min_hops": 1, "max_hops": 4}
TASK = RunConfig(**HOP, **MODEL, batch_tokens=1024, train_tokens=1024 * STEPS)


def trained_llama(seed: int, source):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": TASK.d_model, "intermediate_size": TASK.d_ff, "num_hidden_layers": TASK.n_layers}
    sizes |= {"vocab_size": 16, "num_attention_heads": TASK.n_heads, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    config = TASK.model_copy(update={"seed": seed})
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        batch = source.batch(config, step)
        logits = model(input_ids=torch.from_numpy(batch.inputs).long(), use_cache=False).logits
        targets = torch.from_numpy(batch.targets).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_needed_layers_of_a_model_of_others_rise_with_the_hops(tmp_path, seed):
    """2402.09268: k hops need floor(log2 k) + 2 layers by doubling."""
    source = open_source(TASK, tmp_path)
    trained_llama(seed, source).save_pretrained(tmp_path / "llama")
    held_out = source.held_out(TASK.seq_len, TASK.seq_len * N * 16)
    needed = {}
    for hops in HOPS:
        chosen = held_out.difficulty[:, 0] == hops
        files = {}
        inputs, targets = held_out.inputs[chosen], held_out.targets[chosen]
        for name, rows in (("tokens", inputs[:N]), ("targets", targets[:N]), ("fit-tokens", inputs[N : 3 * N])):
            files[f"--{name}"] = tmp_path / f"{name}.npy"
            np.save(files[f"--{name}"], rows)
        options = [word for option in files.items() for word in option]
        options += ["--measures", "loss,usefulness", "--format", "json"]
        out, _ = sparsedepth("measure", tmp_path / "llama", *options)
        scores = {score["name"]: score["global"] for score in json.loads(out)}
        assert scores["val_accuracy"] > 0.99
        needed[hops] = scores["needed_layers"]
    print(f"\nseed {seed}: needed_layers by hops {needed}")
    assert needed[1] < needed[3] and needed[2] < needed[4] and needed[4] >= 4
    assert all(needed[hops] >= int(np.log2(hops)) + 1 for hops in HOPS)
