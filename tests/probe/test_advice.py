"""Every refusal of a model folder names a fix; each is followed to the letter here, and the model is then measured."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_families import WORDS, save_tokenizer, tiny
from support.tiny_sweep import corpus

import sparsedepth.probe.load as load
from sparsedepth.probe.hf_types import REFUSED, TYPES
from sparsedepth.probe.load import load_model
from sparsedepth.probe.text import measure_source

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SIZES = {"hidden_size": 36, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def edit(path: Path, **fields) -> None:
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def as_shards(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}})
    )


def with_nan(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def linked(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / WEIGHTS)
    (folder / WEIGHTS).symlink_to(folder.parent / WEIGHTS)


COPIED = {
    "broken JSON": (lambda f: (f / CONFIG).write_text("{"), "cannot be read as JSON"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no weights"),
    "a shard too few": (as_shards, "names the shard 'a.safetensors'"),
    "cut": (lambda f: shortened(f / WEIGHTS), "is not a valid safetensors file"),
}
COMPARED = {
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "must hold an object"),
    "layers": (lambda f: edit(f / CONFIG, num_hidden_layers=10**9), "1000000000 layers, and the weights are"),
    "a layer more": (lambda f: edit(f / CONFIG, num_hidden_layers=5), "belong to another model|missing keys"),
    "another depth": (lambda f: edit(f / CONFIG, num_hidden_layers=3), "are not those of its config"),
    "another width": (lambda f: edit(f / CONFIG, intermediate_size=47), "cannot be loaded|mismatched keys"),
    "larger": (lambda f: edit(f / CONFIG, hidden_size=2**16), "belong to another model"),
    "no type of a number": (lambda f: edit(f / CONFIG, num_hidden_layers="4"), r"model type \(transformers \d.*: "),
    "no activation": (lambda f: edit(f / CONFIG, hidden_act="no_such"), r"describes no model \(transformers \d.*: "),
}
"""Files that are whole: a copy of them would be refused alike."""


@pytest.mark.parametrize("spoil", COMPARED)
def test_a_config_that_does_not_fit_is_compared_and_no_copy_is_advised(saved, model, spoil):
    change, says = COMPARED[spoil]
    change(model)
    with pytest.raises(ValueError, match=rf"({says}).*; compare config.json with that of the original$") as refused:
        load_model(model)
    assert "\n" not in str(refused.value) and "again" not in str(refused.value)
    shutil.copy(saved / CONFIG, model)
    load_model(model)


@pytest.mark.parametrize("spoil", COPIED)
def test_a_folder_that_is_copied_again_is_read(saved, model, spoil):
    change, says = COPIED[spoil]
    change(model)
    with pytest.raises(ValueError, match=rf"({says}).*(copy|export)[^;]* again") as refused:
        load_model(model)
    assert "\n" not in str(refused.value)
    shutil.rmtree(model)
    shutil.copytree(saved, model)
    load_model(model)


def edited(advice: str, **fields):
    """Fields of the config that are refused, and go."""
    return lambda f: edit(f / CONFIG, **fields), advice, lambda f: edit(f / CONFIG, **dict.fromkeys(fields))


FOLLOWED = {
    "a link": (linked, "copy the file itself there", lambda f: shutil.copy(*_swap(f))),
    "code": (
        lambda f: (f / "modeling_llama.py").touch(),
        "delete it where transformers itself has the model",
        lambda f: (f / "modeling_llama.py").unlink(),
    ),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "merge it into that one first",
        lambda f: (f / "adapter_config.json").unlink(),  # its weights are merged: the file goes
    ),
    "a pickle": (
        lambda f: shutil.move(f / WEIGHTS, f / "pytorch_model.bin"),
        "convert them to model.safetensors",
        lambda f: shutil.move(f / "pytorch_model.bin", f / WEIGHTS),
    ),
    "remote code": edited("delete it where the model needs none", auto_map={"AutoModel": "a.B"}),
    "kernels of others": edited("it where the model needs none", attn_implementation="a/kernel", use_kernels=True),
    "a folder": (
        lambda f: (f / "spiece.json").mkdir(),
        "should be a file; delete it",
        lambda f: (f / "spiece.json").rmdir(),
    ),
    "not finite": (with_nan, "are not finite.*export it again", lambda f: tiny("llama").save_pretrained(f)),
    "epsilon": edited("must be 0 or more; fix it", rms_norm_eps=-1.0),
}


def _swap(folder: Path) -> tuple[Path, Path]:
    (folder / WEIGHTS).unlink()
    return folder.parent / WEIGHTS, folder / WEIGHTS


@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_on_a_folder_works(model, name):
    spoil, advice, follow = FOLLOWED[name]
    spoil(model)
    with pytest.raises(ValueError, match=advice):
        load_model(model)
    follow(model)
    load_model(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"_flash_attn_2_enabled": True},
        {"_attn_implementation": "flash_attention_2", "_attn_implementation_autoset": True},
        {"_attn_implementation_internal": "sdpa", "_experts_implementation": "grouped_mm"},
        {"attn_implementation": "flash_attention_3"},
        {"_sliding_window_pattern": 6, "_name_or_path": "x/y", "torch_dtype": "float32", "_num_labels": 1},
        {"conv_kernel": 4, "use_kernels": False},
        {"cache_implementation": "hybrid"},
    ],
)
def test_keys_that_select_a_kernel_of_the_library_are_no_code(saved, model, fields):
    edit(model / CONFIG, **fields)
    found, plain = load_model(model).probed, load_model(saved).probed
    assert getattr(found.model, "config")._attn_implementation == "sdpa"  # noqa: B009 - chosen here
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(found.embed(tokens), plain.embed(tokens), rtol=0, atol=0)


@pytest.mark.parametrize(
    "fields",
    [{"quantization_config": {}}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}],
)
def test_what_the_config_says_of_quantising_counts_for_nothing_where_the_files_hold_numbers(saved, model, fields):
    """A null entry, and one that a merged model of 16 bits has kept: the values are those of the plain folder."""
    edit(model / CONFIG, **fields)
    if not fields["quantization_config"]:
        text = (model / CONFIG).read_text()
        (model / CONFIG).write_text(text.replace("{}", "null"))
    found, plain = (load_model(folder).probed.embed(torch.arange(12)[None]) for folder in (model, saved))
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


def test_a_padding_row_beyond_the_vocabulary_is_left_out(saved, model):
    edit(model / CONFIG, pad_token_id=40)
    with pytest.warns(UserWarning, match="pad_token_id=40 is not below vocab_size, and is left out"):
        found = load_model(model).probed
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(found.embed(tokens), load_model(saved).probed.embed(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("names", [["mtp.fc.weight"], ["model.layers.4.mlp.up_proj.weight"]])
def test_layers_that_predict_further_tokens_are_not_measured_and_told(saved, model, names):
    weights = load_file(model / WEIGHTS)
    save_file({**weights, **{name: torch.ones(2, 2) for name in names}}, model / WEIGHTS, {"format": "pt"})
    if "layers" in names[0]:
        with pytest.raises(ValueError, match="unexpected keys"):
            load_model(model)
        edit(model / CONFIG, num_nextn_predict_layers=1)
    with pytest.warns(UserWarning, match="1 weights of layers that predict further tokens"):
        assert load_model(model).facts.n_layers == 4


def in_a_cache(saved: Path, hub: Path) -> Path:
    """The model as the hub's cache keeps it: a snapshot of links into blobs/."""
    repository, snapshot = hub / "models--me--tiny", hub / "models--me--tiny" / "snapshots" / ("01" * 20)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in saved.iterdir():
        shutil.copy(file, repository / "blobs" / f"x{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"x{file.name}"))
    return snapshot


def test_a_snapshot_of_the_hubs_cache_is_read_and_no_link_out_of_its_repository(saved, tmp_path, monkeypatch):
    snapshot = in_a_cache(saved, tmp_path / "hub")
    assert measured(snapshot, tmp_path).eod == 0
    monkeypatch.chdir(snapshot)
    load_model(".")
    (tmp_path / "secret").write_bytes((saved / CONFIG).read_bytes())
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"config\.json is a link out of the folder"):
        load_model(snapshot)


def test_types_are_refused_by_name_with_the_reason(model, monkeypatch):
    for model_type in REFUSED:
        edit(model / CONFIG, model_type=model_type)
        with pytest.raises(ValueError, match=rf"'{model_type}', which is not supported: its layers also read tokens"):
            load_model(model)
    edit(model / CONFIG, model_type="llama")
    monkeypatch.setattr(load, "version", lambda package: "5.17.0")
    monkeypatch.setitem(TYPES, "of_a_later_release", TYPES["llama"])
    edit(model / CONFIG, model_type="of_a_later_release")
    with pytest.raises(ValueError, match=r"is not in transformers 5\.17\.0, which is installed; install the latest"):
        load_model(model)


def measured(folder: Path, tmp_path: Path):
    return measure_source(load_model(folder), str(corpus(tmp_path)), 16, 320, tmp_path / "data")


def test_advice_on_a_tokenizer_works(saved, model, tmp_path):
    """From no file to a text, one refusal after the other."""
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; copy the model's there"):
        measured(model, tmp_path)
    (model / "vocab.json").write_text(json.dumps({"</s>": 0, "a": 1}))
    (model / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"cannot make it of the other files; put the model's there"):
        measured(model, tmp_path)
    shutil.copy(saved / "tokenizer.json", model)
    with pytest.raises(ValueError, match=r"no end-of-sequence token.*set eos_token in its tokenizer_config\.json"):
        measured(model, tmp_path)
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert measured(model, tmp_path).eod == 0


def test_a_token_as_older_files_mark_it_is_no_code(model, tmp_path):
    mark = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False}
    edit(model / "tokenizer_config.json", eos_token=mark)
    assert measured(model, tmp_path).eod == 0
    edit(model / "tokenizer_config.json", eos_token={**mark, "__type": "someone.Token"})
    with pytest.raises(ValueError, match="'__type', which can make a library run code"):
        load_model(model)


def test_a_tokenizer_may_have_more_entries_than_the_model_has_rows(model, tmp_path):
    """Only an id that occurs matters, and is named; the model has 40 rows."""
    save_tokenizer(model, WORDS | {f"<pad{index}>": index for index in range(34, 64)})  # a padded vocabulary
    assert measured(model, tmp_path).held_out(16, 320).inputs.max() < 34
    save_tokenizer(model, {word: 50 if word == "times" else index for word, index in WORDS.items()})
    with pytest.raises(ValueError, match=r"vocab_size=40, and the text has the id 50, 'times'; .*name a text without"):
        measured(model, tmp_path)
    save_tokenizer(model, WORDS | {"<end>": 45})
    edit(model / "tokenizer_config.json", eos_token="<end>")
    with pytest.raises(ValueError, match=r"the id 45, which ends a document; .*set eos_token in its tokenizer_config"):
        measured(model, tmp_path)
    edit(model / "tokenizer_config.json", eos_token="</s>")
    assert measured(model, tmp_path).eod == 0


STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "mixtral"])
@pytest.mark.parametrize(("stored", "said"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")])
def test_weights_have_the_dtype_of_their_file_whatever_the_config_says(tmp_path, family, stored, said):
    original = tiny(family).to(STORED[stored])
    original.save_pretrained(tmp_path)
    edit(tmp_path / CONFIG, dtype=said, torch_dtype=said)
    loaded = load_model(tmp_path)
    assert loaded.facts.dtype == stored
    found = dict(loaded.probed.model.named_parameters())
    for name, weight in original.named_parameters():
        expected = weight.float() if found[name].dtype == torch.float32 else weight
        assert torch.equal(found[name].double(), expected.double())


def test_no_layer_is_rounded_by_the_dtype_of_another(model):
    weights = load_file(model / WEIGHTS)
    halves = {name: w.bfloat16() if ".layers." in name else w for name, w in weights.items()}
    of_layer = {name: w for name, w in weights.items() if ".layers.2." in name}
    save_file({**halves, **of_layer}, model / WEIGHTS, {"format": "pt"})
    loaded = load_model(model)
    assert loaded.facts.dtype == "float32"
    assert torch.equal(loaded.probed.matrices(3)["up"], weights["model.layers.2.mlp.up_proj.weight"])
    save_file(halves, model / WEIGHTS, {"format": "pt"})
    loaded = load_model(model)
    assert loaded.facts.dtype == "bfloat16"
    assert torch.equal(loaded.probed.model.get_parameter("lm_head.weight"), weights["lm_head.weight"])
    save_file({name: w.to(torch.int8) for name, w in weights.items()}, model / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="dtype I8: quantised weights are not measured; use the original ones"):
        load_model(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "arcee", "qwen3", "mistral"])
def test_heads_of_their_own_width_need_not_divide_the_models(tmp_path, family):
    """8 heads of 8 in a width of 36, as in models of 24 heads of 128 in 1792; some types of transformers refuse it."""
    original = tiny(family)
    config = type(original.config)(**{**original.config.to_dict(), **SIZES, "hidden_size": 64})
    config.hidden_size = 36
    config._attn_implementation = original.config._attn_implementation
    other = type(original)(config).eval()
    config.hidden_size = 64  # else it would not be saved
    other.save_pretrained(tmp_path)
    config.hidden_size = 36
    edit(tmp_path / CONFIG, hidden_size=36)
    loaded = load_model(tmp_path)
    assert (loaded.facts.d_model, loaded.facts.n_heads, loaded.facts.n_kv_heads) == (36, 8, 4)
    x = loaded.probed.embed(torch.arange(12)[None])
    for layer in range(1, 5):
        x = loaded.probed.block(layer, x)
    with torch.no_grad():
        expected = other(torch.arange(12)[None]).logits
        torch.testing.assert_close(loaded.probed.logits(x), expected, rtol=0, atol=1e-5)
