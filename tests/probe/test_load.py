"""Models by name: what is loaded is what was saved, and what could run code, lie or leave the folder is refused.

Headers of every kind of dishonesty: refused in one line, without a crash and without memory.
"""

import json
import random
import resource
import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from reference import run_config
from safetensors.torch import load_file, save, save_file
from support.handmade_models import integers
from support.hf_families import FAMILIES, tiny

from sparsedepth.files import sha256
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import check_weights
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.load import check_transformers, load_model
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.store.run_record import read_run

TOKENS = integers(40, 2, 10)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def logits(probed):
    with probing(probed):
        return probed.logits(list(stream(probed, TOKENS))[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_is_what_was_saved(family, tmp_path):
    original = tiny(family)
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    loaded = load_model(tmp_path)
    torch.testing.assert_close(logits(loaded.probed), logits(ProbedHfModel(original)), rtol=0, atol=0)
    facts = loaded.facts
    assert (facts.family, facts.n_layers, facts.d_model, facts.vocab_size) == (original.config.model_type, 4, 32, 40)
    assert facts.n_heads == 4 and facts.n_kv_heads == (4 if family.startswith("gpt") else 2)
    assert facts.n_experts == (4 if "moe" in family or family == "mixtral" else 0)
    assert facts.params_total == sum(parameter.numel() for parameter in original.parameters())
    assert facts.dtype == "float32" and facts.max_len == 64


@pytest.mark.parametrize("family", ["llama_tied", "olmoe"])
def test_layers_keep_the_checkpoints_dtype_unless_fp32_is_asked_for(family, tmp_path):
    tiny(family).to(torch.bfloat16).save_pretrained(tmp_path)
    kept, wide = load_model(tmp_path), load_model(str(tmp_path), dtype="fp32")
    assert (kept.facts.dtype, wide.facts.dtype) == ("bfloat16", "float32")
    assert {p.dtype for p in kept.probed.model.get_submodule("model.layers").parameters()} == {torch.bfloat16}
    assert kept.probed.model.get_parameter("model.embed_tokens.weight").dtype == torch.float32
    torch.testing.assert_close(logits(kept.probed), logits(wide.probed), rtol=0, atol=0)
    assert kept.facts.params_total == wide.facts.params_total  # a head that is the embedding still is


def test_gemmas_embedding_scale_is_that_of_its_checkpoint(tmp_path):
    tiny("gemma").to(torch.bfloat16).save_pretrained(tmp_path)
    kept, wide = (load_model(tmp_path, dtype=dtype).probed.embed(TOKENS) for dtype in ("checkpoint", "fp32"))
    torch.testing.assert_close(kept / wide, torch.full_like(wide, 5.65625 / 32**0.5))  # bf16 has 8 bits: 181 / 32


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder as far as its weights go."""
    config = run_config(n_kv_heads=2, depth_scale="lns")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    weights = {name: weight.detach() for name, weight in Decoder(config, seed=5).named_parameters()}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_run_folder(run):
    loaded = load_model(run)
    config = run_config(n_kv_heads=2, depth_scale="lns")
    assert loaded.config == config and loaded.facts.family == "sparsedepth"
    assert (loaded.facts.n_layers, loaded.facts.n_kv_heads, loaded.facts.max_len) == (5, 2, None)
    torch.testing.assert_close(logits(loaded.probed), logits(ProbedDecoder(Decoder(config, seed=5))), rtol=0, atol=0)


def test_a_run_folder_whose_weights_are_not_its_models(run):
    weights = load_file(run / "model.safetensors")
    save_file({**weights, "norm.weight": torch.ones(31)}, run / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[31\] where the config says \[32\]"):
        load_model(run)
    save_file({name: w for name, w in weights.items() if name != "norm.weight"}, run / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight has shape None"):
        load_model(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "n_layers": 10_000}))
    with pytest.raises(ValueError, match="10000 layers, and the weights are"):
        load_model(run)
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors: copies of a run may leave it out"):
        load_model(run)


def test_a_complete_run_that_was_changed_is_refused(run):
    sums = {path.name: {"sha256": sha256(path), "bytes": path.stat().st_size} for path in run.iterdir()}
    (run / "complete").write_text(json.dumps({"run_id": "0" * 12, "files": sums}))
    load_model(run)
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-3] + bytes([weights[-3] ^ 1]) + weights[-2:])
    with pytest.raises(ValueError, match=r"model\.safetensors is not the file that was written") as caught:
        load_model(run)
    assert "\n" not in str(caught.value)
    (run / "model.safetensors").write_bytes(weights)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("lr: 0.001", "lr: 0.002"))
    with pytest.raises(ValueError, match=r"config\.yaml is not the file that was written"):
        load_model(run)
    for marker in ("{}", '{"files": []}', '{"files": {"config.yaml": 3}}', "nothing"):
        (run / "complete").write_text(marker)
        with pytest.raises(ValueError, match=r"not the file that was written|cannot be read as JSON"):
            load_model(run)


def test_the_weights_have_a_name(model):
    first = load_model(model).weights_hash
    assert len(first) == 12 and load_model(model).weights_hash == first
    weights = load_file(model / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"})
    assert load_model(model).weights_hash != first


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_weights_that_can_run_code_are_refused_and_never_read(model, monkeypatch, name):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    (model / name).write_bytes(b"")
    load_model(model)  # beside safetensors they are ignored
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only in '.*', a format that can run code"):
        load_model(model)


def test_broken_safetensors_beside_a_bin_is_an_error(model):
    (model / "pytorch_model.bin").write_bytes(b"")
    whole = (model / "model.safetensors").read_bytes()
    for broken in (b"", b"1234567", whole[:-1], whole[:200], b"\xff" * 8 + whole[8:], whole + b"\0"):
        (model / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match="is not a valid safetensors file"):
            load_model(model)


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}),
        ("config.json", {"rope_parameters": {"rope_type": "default", "inner": [{"trust_remote_code": True}]}}),
        ("config.json", {"_attn_implementation_internal": "someone/kernel"}),
        ("config.json", {"attn_implementation": "someone/kernel"}),
        ("config.json", {"experts_implementation": "someone/kernel"}),
        ("config.json", {"use_kernels": True}),
        ("config.json", {"_anything": 1}),
        ("generation_config.json", {"custom_generate": "someone/repository"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_x.Tokenizer", None]}}),
    ],
)
def test_json_that_points_to_code_is_refused(model, file, fields):
    (model / "tokenizer_config.json").write_text("{}")
    edit(model / file, **fields)
    with pytest.raises(ValueError, match=r"has the key '\w+'"):
        load_model(model)


@pytest.mark.parametrize("family", ["bert", "llama4", "", None, ["llama"]])
def test_unknown_kinds_of_models_are_refused(model, family):
    edit(model / "config.json", model_type=family)
    with pytest.raises(ValueError, match=r"model_type=.* is not supported; supported: apertus"):
        load_model(model)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("[" * 100_000, "cannot be read as JSON"), (" " * 10_000_001, "is larger than 10,000,000 bytes")],
)
def test_a_config_too_deep_or_too_large_is_refused(model, content, reason):
    (model / "config.json").write_text(content)
    with pytest.raises(ValueError, match=reason):
        load_model(model)


def test_settings_with_which_no_layer_runs_are_refused(tmp_path):
    for family, fields in (
        ("mixtral", {"num_experts_per_tok": 5}),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}),
    ):
        tiny(family).save_pretrained(tmp_path / family)
        edit(tmp_path / family / "config.json", **fields)
        with pytest.raises(ValueError, match="describes a model that cannot be run") as error:
            load_model(tmp_path / family)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps=nan, which is not finite"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
            "has rope_theta=-10000, which must be above",
        ),
        ({"rope_parameters": {"rope_type": "default", "factors": [1.0, float("nan")]}}, "has factors=nan"),
    ],
)
def test_numbers_without_any_score_are_refused(model, fields, reason):
    edit(model / "config.json", **fields)
    with pytest.raises(ValueError, match=reason):
        load_model(model)


def test_a_bias_of_attention_is_no_constant_that_may_be_missing(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bias = next(name for name in weights if name.endswith("attn.c_attn.bias"))
    save_file({name: weight for name, weight in weights.items() if name != bias}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing keys .*{bias}"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(model, run, value):
    for place, name in ((model, "model.norm.weight"), (run, "norm.weight")):
        weights = load_file(place / "model.safetensors")
        weights[name][3] = value
        save_file(weights, place / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"weights that are not finite: {name} holds NaN .* at 1 of 32 places"):
            load_model(place)


@pytest.mark.parametrize(
    "shard", ["../elsewhere.safetensors", "/etc/passwd", "pytorch_model.bin", "absent.safetensors"]
)
def test_an_index_names_files_beside_it_only(model, tmp_path, shard):
    shutil.copy(model / "model.safetensors", tmp_path / "elsewhere.safetensors")
    shutil.move(model / "model.safetensors", model / "pytorch_model.bin")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(ValueError, match="is no safetensors file beside it"):
        load_model(model)


@pytest.mark.parametrize("read", [load_model, read_run])
def test_a_folder_of_several_runs_is_told_from_a_run(tmp_path, read):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="is a results folder; name one of"):
        read(tmp_path)
    (tmp_path / "pack.json").touch()
    with pytest.raises(ValueError, match="is a pack, which is only read by queries"):
        read(tmp_path)


@pytest.mark.parametrize("source", ["./no/folder", "a/b/c", "", "no model", "/no/such"])
def test_names_of_nothing(source):
    with pytest.raises(ValueError, match="is neither a folder"):
        load_model(source)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"^model 'someone/model' is not a local folder .*no route to host.*$"):
        load_model("someone/model")


def test_a_hub_model_lies_in_a_cache_of_links_and_is_refused_before_its_weights_come(monkeypatch, saved, tmp_path):
    """The hub's cache: snapshots/<commit>/<file> are links to blobs/<hash> beside them."""
    cache, asked = tmp_path / "models--someone--model", []
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()

    def download(name, allow_patterns, revision=None, cache_dir=None):
        asked.append(allow_patterns)
        for file in ["config.json"] if "*.safetensors" not in allow_patterns else ["config.json", "model.safetensors"]:
            if not (snapshot / file).exists():
                shutil.copy(saved / file, cache / "blobs" / file)
                (snapshot / file).symlink_to(Path("../../blobs", file))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load_model("someone/model")
    torch.testing.assert_close(logits(loaded.probed), logits(load_model(saved).probed), rtol=0, atol=0)
    assert not any(pattern.endswith((".py", ".bin", "*")) for patterns in asked for pattern in patterns)
    edit(snapshot / "config.json", auto_map={})
    asked.clear()
    with pytest.raises(ValueError, match="auto_map"):
        load_model("someone/model")
    assert asked == [["config.json"]]


def test_old_transformers_are_refused():
    for fine in (transformers.__version__, "5.17.0", "6.0.0.dev0"):
        check_transformers(fine)
    for old in ("5.2.0", "4.57.1", "5.16.3"):
        with pytest.raises(ValueError, match=f"transformers {old} is not safe"):
            check_transformers(old)


HONEST = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})


def spoilt(rng: random.Random) -> bytes:
    """A file with a random lie in its header, or random bytes altogether."""
    length = int.from_bytes(HONEST[:8], "little")
    header, data = json.loads(HONEST[8 : 8 + length]), HONEST[8 + length :]
    entry = header[rng.choice("ab")]
    number = rng.choice([-1, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 1.5, "2", None, [], {}])
    match rng.randrange(7):
        case 0:
            entry["shape"] = rng.choice([[number], [2**40, 2**40], number, [[1]]])
        case 1:
            entry["data_offsets"] = rng.choice([[0, number], [number, 8], number, [8, 0], [0, 8, 16]])
        case 2:
            entry["dtype"] = rng.choice(["F33", "", None, 4, "PICKLE"])
        case 3:
            del entry[rng.choice(list(entry))]
        case 4:
            return rng.randbytes(rng.randrange(64))
        case 5:
            return rng.choice([2**20, 2**40, 2**63, length + 1000]).to_bytes(8, "little") + HONEST[8:]
        case 6:
            place = rng.randrange(8, 8 + length)
            return HONEST[:place] + rng.randbytes(1 + rng.randrange(8)) + HONEST[place + 8 :]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_random_headers_are_refused_or_sound(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(HONEST)
    check_weights(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(1000):
        path.write_bytes(spoilt(rng))
        try:
            check_weights(path)
        except ValueError as error:
            assert "\n" not in str(error) and "is not a valid safetensors file" in str(error)
            refused += 1
    assert refused > 830
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_header_above_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse: no byte of it on disk
    with pytest.raises(ValueError, match="claims a header of 200,000,000"):
        check_weights(path)
