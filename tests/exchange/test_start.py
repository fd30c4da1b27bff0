"""What training starts from: runs and folders of transformers as the same decoder, and what cannot be one."""

import pytest
import torch
from support.hf_families import save_tokenizer, tiny
from support.run_folders import loud_run

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.exchange.export import export
from sparsedepth.exchange.start import open_start
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.load import load_model

WORDS = {word: n for n, word in enumerate(["<unk>", "</s>", *(f"w{n}" for n in range(38))])}
ASKED = {"corpus": "sft:pairs.jsonl", "seq_len": 32, "batch_tokens": 64, "train_tokens": 640}

WINDOW = {"use_sliding_window": True, "sliding_window": 6}


def saved(folder, name, **fields):
    """A folder of transformers with a tokenizer of words, whose end is id 1."""
    tiny(name, **fields).save_pretrained(folder)
    save_tokenizer(folder, WORDS)
    return folder


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"attention_bias": False}),
        ("llama_tied", {}),
        ("mistral_window", {}),
        ("mixtral", {}),
        ("olmoe", {"norm_topk_prob": True}),
        ("qwen3", {"head_dim": 8}),
        ("qwen3", {"head_dim": 8, **WINDOW, "max_window_layers": 0}),
        ("qwen3_moe", {"head_dim": 8, "mlp_only_layers": [0]}),
        ("qwen3_moe", {"head_dim": 8, **WINDOW}),
    ],
)
def test_a_model_of_transformers_becomes_the_decoder_that_computes_the_same(tmp_path, name, fields):
    folder = saved(tmp_path / "model", name, **fields)
    start = open_start(str(folder))
    config = build(RunConfig, start.values(ASKED), "test")
    assert (config.mask_documents, config.eod, config.start_weights) == (True, 1, start.loaded.weights_hash)
    assert config.tokenizer == str(folder) and start.learned is None
    model = Decoder(config, seed=3)
    start.load_into(model)
    tokens_BT = torch.randint(2, 40, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = load_model(folder).probed.model(tokens_BT).logits
        assert torch.allclose(model(tokens_BT), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("qwen2", {}, "model_type='qwen2' is not one of llama, mistral"),
        ("gpt2", {}, "model_type='gpt2' is not one of llama, mistral"),
        ("llama", {}, r"weights without a place in a sparsedepth decoder: model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", {}, r"attention.query.weight is \[48, 32\], expected \[32, 32\]"),
        (
            "llama_tied",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "its rope_type is 'linear'",
        ),
        ("qwen3_moe", {"head_dim": 8, "mlp_only_layers": [2]}, "is .*, expected"),
        ("qwen3", {"head_dim": 8, **WINDOW, "max_window_layers": 1}, "only some of its layers have a window"),
        ("mixtral", {"num_experts_per_tok": 1}, "one gate that is always 1 trains no router"),
    ],
)
def test_what_no_decoder_of_ours_is(tmp_path, name, fields, reason):
    folder = saved(tmp_path / "model", name, **fields)
    with pytest.raises(ValueError, match=reason):
        start = open_start(str(folder))
        start.load_into(Decoder(build(RunConfig, start.values(ASKED), "test")))


def test_a_model_that_computes_something_else_is_found_out(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", "llama_tied")
    start = open_start(str(folder))
    config = build(RunConfig, {**start.values(ASKED), "rope_theta": 30.0}, "test")
    with pytest.raises(ValueError, match=r"computes something else than a decoder of the same fields: .* apart"):
        start.load_into(Decoder(config))


def test_a_field_with_weights_that_the_start_lacks_is_refused(tmp_path):
    start = open_start(str(saved(tmp_path / "model", "llama", attention_bias=False)))
    config = build(RunConfig, start.values({**ASKED, "gpas": True}), "test")
    with pytest.raises(ValueError, match=r"blocks.0.gpas_scalar is missing, expected \[1\]"):
        start.load_into(Decoder(config))


@pytest.mark.parametrize("fields", [{"init": "scaled"}, {"init_std": 0.01}], ids=str)
def test_fields_of_how_weights_are_drawn_are_refused_where_none_is(tmp_path, fields):
    """They compute the same logits: a run would be recorded as one with half its weights, and train all of them."""
    start = open_start(str(saved(tmp_path / "model", "llama", attention_bias=False)))
    with pytest.raises(ValueError, match=f"{next(iter(fields))}=.*, and the model of --from"):
        start.values({**ASKED, **fields})


def test_a_run_and_its_export_are_the_same_start(tmp_path):
    run = loud_run(tmp_path, depth_scale="lns", seq_len=32)
    export(run, tmp_path / "exported")
    tokens_BT = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(5))
    logits = []
    for source in (run, tmp_path / "exported"):
        start = open_start(str(source))
        model = Decoder(build(RunConfig, start.values(ASKED), "test"), seed=3)
        start.load_into(model)
        logits.append(model(tokens_BT))
    assert torch.allclose(*logits, atol=1e-4)
    own = open_start(str(run))
    assert own.values(ASKED)["depth_scale"] == "lns" and own.facts["run_id"] == run.name
    assert own.facts["family"] == "sparsedepth" and start.facts["family"] == "llama"


def test_the_runs_own_file_may_repeat_the_start_and_not_contradict_it(tmp_path):
    start = open_start(str(loud_run(tmp_path, seq_len=32)))
    assert start.values({**ASKED, "d_model": 16, "tokenizer": "byte"})["n_layers"] == 2
    for fields, message in (
        ({"n_layers": 5}, r"n_layers=5, and the model of --from .* has n_layers=2; leave n_layers out"),
        ({"vocab_size": 300}, r"vocab_size=300, and the model .* has vocab_size=264"),
        ({"tokenizer": "bpe:512"}, r"tokenizer='bpe:512', and the model .* has tokenizer='byte'"),
        ({"preset": "llama-130m"}, r"and the model of --from"),
    ):
        with pytest.raises(ValueError, match=message):
            start.values({**ASKED, **fields})


def test_a_run_keeps_its_documents_apart_in_further_text(tmp_path):
    start = open_start(str(loud_run(tmp_path, mask_documents=True, eod=256)))
    asked = {**ASKED, "corpus": "stdlib"}
    assert start.values(asked)["mask_documents"] is True and start.values(asked)["eod"] == 256
    assert start.values({**asked, "mask_documents": False})["mask_documents"] is False


def test_a_run_on_a_task_reads_no_text(tmp_path):
    start = open_start(str(loud_run(tmp_path, corpus="task:state_tracking", val_fraction=0.05, seq_len=32)))
    with pytest.raises(ValueError, match="'task:state_tracking': its tokens are not text; start from a run on text"):
        start.values({**ASKED, "corpus": "stdlib"})


def test_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"--from '.*' is neither the folder of a run \(with config.yaml\) nor of"):
        open_start(str(tmp_path))
    long = open_start(str(saved(tmp_path / "model", "llama_tied")))
    with pytest.raises(ValueError, match="seq_len=128 is longer than the 64 positions of --from"):
        long.values({**ASKED, "seq_len": 128})
