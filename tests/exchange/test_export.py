"""A run leaves as a Hugging Face folder: whole, checked, safe to load, and the same model to every reader.

The exported tokenizer gives every text the ids that the run gave it.

The tokens that two models are compared on, and a document that fills its sequence, which keeps all of them.
"""

import json
import re

import numpy as np
import pytest
import torch
import transformers
import yaml
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError
from support.run_folders import break_weights, loud_run
from support.tiny_sweep import corpus
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import MeasureOnlyConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.data.tokenizer import ByteTokenizer, make_tokenizer
from sparsedepth.exchange import export as exporting
from sparsedepth.exchange.architecture import TOLERANCE, random_documents
from sparsedepth.exchange.export import ODD, export, save_tokenizer
from sparsedepth.measure.suite import measure_run
from sparsedepth.probe.load import load_model
from sparsedepth.probe.text import TokenArrays

MOE = {"n_experts": 4, "top_k": 2, "d_expert": 24}
FAMILIES = {
    "llama": {"depth_scale": "lns", "n_kv_heads": 1},
    "mistral": {"sliding_window": 5, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "depth_scale": "after_branch"},
    "gemma2": {"norm": "peri", "depth_scale": "lns"},
    "mixtral": {**MOE, "depth_scale": "lns", "tokenizer": "bpe:300", "vocab_size": 300},
    "qwen2_moe": {**MOE, "renormalise_gates": False, "n_dense_layers": 1, "depth_scale": "after_ffn"},
    "qwen3_moe": {**MOE, "qk_norm": True},
    "olmoe": {**MOE, "qk_norm": True, "qk_norm_over": "all", "renormalise_gates": False, "depth_scale": "lns"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tmp_path_factory):
    """The family, the run's folder, and what `export` says."""
    folder = tmp_path_factory.mktemp(request.param)
    run = loud_run(folder, **FAMILIES[request.param])
    return request.param, run, export(run, folder / "out")


def test_the_folder_holds_what_others_need(exported):
    family, run, found = exported
    names = {path.name for path in found.folder.iterdir()}
    files = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == files | {"README.md"}
    assert [path.name for path in found.folder.parent.iterdir() if path.name.startswith(".")] == []
    config = json.loads((found.folder / "config.json").read_text())
    assert config["model_type"] == found.family == family and "auto_map" not in config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "where version 4 reads it"
    assert config.get("num_experts") == 4 or family not in ("qwen2_moe", "qwen3_moe", "olmoe")
    assert f"transformers {transformers.__version__}" in (found.folder / "README.md").read_text()
    assert 0 <= max(found.parity.values()) <= TOLERANCE
    _, front, body = (found.folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["logit_parity"] == max(found.parity.values())
    settings = re.findall(r"```yaml\n(.*?)```", body, flags=re.DOTALL)
    assert yaml.safe_load(settings[0]) == load_model(run).config.model_dump(mode="json")
    assert yaml.safe_load(settings[1])["run_id"] == run.name
    assert "| val_loss | 2.5 | 2.4 to 2.6 | nat/token |" in body and all(note in body for note in found.notes)


def test_transformers_loads_it_and_writes_text(exported):
    _, run, found = exported
    model = AutoModelForCausalLM.from_pretrained(found.folder, trust_remote_code=False, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(found.folder, trust_remote_code=False, local_files_only=True)
    given = tokenizer("3 times 4", return_tensors="pt")
    with torch.no_grad():
        text = model.generate(**given, max_new_tokens=5, do_sample=False)[0]
        ours = load_model(run).probed.model
        ids = given["input_ids"][0].tolist()
        n_given = len(ids)
        while len(ids) < n_given + 5 and ids[-1] != model.config.eos_token_id:
            ids.append(int(ours(torch.tensor([ids]))[0, -1].argmax()))
    assert text.tolist() == ids and tokenizer.decode(text).startswith("3 times 4")


@pytest.mark.filterwarnings("ignore:n_experts")
def test_measuring_it_gives_the_scores_of_the_run(exported):
    _, run, found = exported
    draws = np.random.default_rng(0)
    text = TokenArrays(*(next_tokens(draws.integers(0, 250, (4, 33))) for _ in range(2)))
    measures = ["causal", "permutation", "variance", "attention", "experts", "loss"]
    config = MeasureOnlyConfig(
        measures=measures, seq_len=32, val_tokens=128, measure_tokens=128, fit_tokens=128, permutation_pairs=None
    )
    ours, theirs = (
        measure_run(load_model(place).probed, config, text.held_out, None, step=0) for place in (run, found.folder)
    )
    scores = {name: value for name, value in ours.summary.items() if isinstance(value, float)}
    assert "causal_score" in scores and "residual_variance_last" in scores
    for name, value in scores.items():
        assert theirs.summary[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name


def test_experts_of_any_width_leave(tmp_path):
    """The kernel that transformers takes by itself needs rows of a multiple of 16 bytes."""
    run = loud_run(tmp_path, **{**MOE, "d_expert": 21})
    found = export(run, tmp_path / "out")
    assert max(found.parity.values()) <= TOLERANCE
    (note,) = (note for note in found.notes if "experts_implementation='eager'" in note)
    assert note.startswith("d_expert=21")
    loaded = AutoModelForCausalLM.from_pretrained(found.folder, experts_implementation="eager")
    with torch.no_grad():
        assert loaded(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def refused(run, out, reason):
    with pytest.raises(ValueError, match=reason):
        export(run, out)
    assert [path.name for path in out.parent.iterdir() if out.name in path.name] == []


def test_what_is_refused_leaves_nothing_behind(tmp_path, monkeypatch):
    out = tmp_path / "out"
    refused(loud_run(tmp_path, norm="post"), out, "norm='post'")
    run = loud_run(tmp_path)
    own = exporting.weights

    def doubled(model):
        return {name: 2 * weight if name.endswith("o_proj.weight") else weight for name, weight in own(model).items()}

    monkeypatch.setattr(exporting, "weights", doubled)
    refused(run, out, "logits are up to .* nothing was written")
    monkeypatch.undo()
    break_weights(run, float("nan"))
    refused(run, out, "weights that are not finite")
    (run / "complete").unlink()
    refused(run, out, "no complete run")


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(("cause", "says"), [(KeyboardInterrupt(), None), (FULL, "No space left on device")])
def test_an_interrupted_export_leaves_nothing_behind(tmp_path, monkeypatch, cause, says):
    def fail(*_, **__):
        raise cause

    run = loud_run(tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises(OSError if says else KeyboardInterrupt, match=says) as caught:
        export(run, tmp_path / "out")
    if says:  # an error of the system
        assert caught.value.errno == 28 and caught.value.filename == str(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_the_harness_reads_it_as_it_reads_the_run(exported, tmp_path):
    """Numbers of lm-evaluation-harness's own adapter on the folder, against ours on the run; see test_evaluate."""
    pytest.importorskip("accelerate")
    from sparsedepth.exchange.harness import harness_model

    _, run, found = exported
    ours, theirs = (harness_model(load_model(place), run.parent.parent / "data") for place in (run, found.folder))
    requests = [_Request(("3 times 4 is", answer)) for answer in (" 12.", " 13.", " many.")] + [_Request(("", "1 "))]
    for mine, other in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-3) and mine[1] == other[1]


class _Request:
    def __init__(self, args):
        self.args = args


TEXTS = [ODD, "", " ", "<|endoftext|>", "a" * 500, "\r\n" * 3, "".join(map(chr, range(0x250)))]


def _texts(folder):
    return [path.read_text() for path in sorted(corpus(folder).iterdir())]


@pytest.fixture(scope="module", params=["byte", "bpe:300", "folder"])
def both(request, tmp_path_factory):
    """A run's tokenizer, and what transformers reads of it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    name = request.param
    if name == "folder":  # of a stranger, who puts a token before every text
        make_tokenizer("bpe:290", _texts(folder), 300).save(folder)
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(["<s>"])
        start = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
        name = str(folder / "theirs")
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<s>").save_pretrained(
            name
        )
        assert AutoTokenizer.from_pretrained(name)("a")["input_ids"][0] == start
    ours = make_tokenizer(name, _texts(folder), 300)
    out = folder / "exported"
    out.mkdir()
    save_tokenizer(ours, out, 64, "3 times 4 is 12.")
    theirs = AutoTokenizer.from_pretrained(out, local_files_only=True, trust_remote_code=False)
    theirs.model_max_length = 10**9
    return ours, theirs


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_are_ours_and_texts_come_back(both, text):
    ours, theirs = both
    ids = ours.encode([text])[0]
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.eos_token_id == ours.eod and len(theirs) <= 300


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100)
def test_any_text_has_the_same_ids_in_the_exported_tokenizer(both, text):
    ours, theirs = both
    assert theirs(text)["input_ids"] == ours.encode([text])[0]


def test_other_ids_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, texts: [[*text.encode(), 7] for text in texts])
    with pytest.raises(ValueError, match="other ids than the run's"):
        save_tokenizer(ByteTokenizer(), tmp_path, 64, "text")


def test_random_documents_have_no_end():
    config = build(ModelConfig, {"vocab_size": 6, "seq_len": 50, "mask_documents": True, "eod": 5}, "test")
    tokens_NT = random_documents(config, 3)
    assert tokens_NT.shape == (3, 50) and set(tokens_NT.unique().tolist()) == set(range(5))


@pytest.mark.parametrize("answer", ["x" * 28, "x" * 9])
def test_the_document_compared_of_a_tuned_run_is_never_empty(tmp_path, monkeypatch, answer):
    """28 and the prompt fill the 32 inputs, whose end is the last target alone."""
    rows = [f'{{"prompt": "q{n:02}", "answer": "{answer}"}}\n' for n in range(10, 40)]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    pairs = {"corpus": f"sft:{tmp_path / 'pairs.jsonl'}", "val_fraction": 0.4, "seq_len": 32}
    run = loud_run(tmp_path, **pairs)
    compared = []
    inner = exporting._difference
    monkeypatch.setattr(
        exporting, "_difference", lambda a, b, tokens: compared.append(tokens.shape[1]) or inner(a, b, tokens)
    )
    export(run, tmp_path / "out")
    assert compared == [32, len(answer) + 4]
