"""RunConfig: what it accepts, what it refuses and how, and its identity."""

import warnings
from pathlib import Path

import duckdb
import pytest

from sparsedepth.config.load import build, parse_yaml
from sparsedepth.config.run import DEFAULTS_VERSION, RunConfig, stored_config

RESULTS = Path(__file__).parents[2] / "results"


def run(**fields) -> RunConfig:
    return build(RunConfig, fields, "run.yaml")


def test_sizes_left_out_follow_from_the_others():
    config = run(d_model=96, n_heads=6)
    assert (config.n_kv_heads, config.d_ff) == (6, 256)
    routed = run(d_model=96, n_heads=6, n_experts=8, top_k=2)
    assert routed.d_expert == 128  # top_k experts are as wide as the dense layer
    assert run(d_model=96, n_heads=6, n_experts=8, top_k=2, n_shared_experts=2).d_expert == 64
    assert [run(norm=norm, n_layers=12).n_post_layers for norm in ("pre", "mix", "post", "keel")] == [0, 3, 12, 12]


def test_the_end_of_a_document_follows_from_the_tokenizer():
    assert run(mask_documents=True).eod == 256
    assert run(mask_documents=True, tokenizer="bpe:512", vocab_size=512).eod == 0
    named = run(mask_documents=True, tokenizer="gpt2", eod=50_256, vocab_size=50_257)
    assert (named.eod, run().eod) == (50_256, None)
    assert run(mask_documents=True).run_id == run(mask_documents=True, eod=256).run_id != run().run_id


def test_fields_that_came_later_leave_old_ids_valid():
    """The ids of runs stored before had none of the architecture's later fields."""
    assert run().run_id == "07d7232ac3ae"
    assert run(n_experts=8, top_k=2, depth_scale="lns", seed=3).run_id == "76a463596024"


@pytest.mark.parametrize(
    ("measure", "name"), [("usefulness", "fit_tokens"), ("joint", "fit_tokens"), ("released_code", "measure_tokens")]
)
def test_whole_sequences_hold_enough_tokens_to_fit_a_map(measure, name):
    """18 tokens would do for a map of width 16, and two sequences of 8 hold only 16."""
    fields = {"d_model": 16, "seq_len": 8, "measures": [measure]}
    with pytest.raises(ValueError, match=f"{name}=18 is too few for seq_len=8, d_model=16; use at least 24"):
        run(**fields, **{name: 18})
    assert getattr(run(**fields, **{name: 24}), name) == 24
    assert getattr(run(**{**fields, "measures": ["loss"]}, **{name: 18}), name) == 18


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_layer": 3}, ["unknown key 'n_layer'", "did you mean 'n_layers'"]),
        ({"extends": "a.yaml"}, ["unknown key 'extends' (value 'a.yaml'); only a YAML file has it, at its top level"]),
        ({"n_layers": "three"}, ["n_layers='three'", "must be a whole number"]),
        ({"n_layers": 0}, ["n_layers=0", "greater than or equal to 1"]),
        ({"n_layers": 10**9}, ["n_layers=1000000000", "less than or equal to 10000"]),  # made block by block
        ({"seq_len": 3.5}, ["seq_len=3.5"]),
        ({"lr": -1.0}, ["lr=-1.0", "greater than 0"]),
        ({"n_heads": 5}, ["n_heads=5", "d_model=64"]),
        ({"n_kv_heads": 3}, ["n_kv_heads=3", "n_heads=4", "[1, 2, 4]"]),
        ({"n_experts": 4, "top_k": 8}, ["top_k=8", "n_experts=4"]),
        ({"n_experts": 4}, ["n_experts=4 needs top_k"]),
        ({"top_k": 2}, ["top_k=2 needs experts"]),
        (
            {"residual_scalars": True, "residual_gate": "admin", "norm": "post"},
            ["residual_scalars", "residual_gate='admin'"],
        ),
        ({"residual_gate": "skipinit", "init": "zero_outputs"}, ["skipinit", "neither gets a gradient"]),
        ({"value_residual": True, "n_layers": 1}, ["value_residual", "n_layers=1"]),
        ({"base_width": 16}, ["base_width=16", "parametrisation='standard'"]),
        ({"base_depth": 4, "parametrisation": "mup"}, ["base_depth=4", "parametrisation='mup'"]),
        ({"parametrisation": "mup", "tie_embeddings": True}, ["tie_embeddings=True", "different rules"]),
        ({"parametrisation": "mup", "n_experts": 4, "top_k": 2}, ["n_experts=4", "dense"]),
        ({"parametrisation": "completep", "norm": "post"}, ["norm='post'", "use norm='pre'"]),
        ({"parametrisation": "completep", "init": "scaled"}, ["init='scaled'"]),
        ({"parametrisation": "mup", "optimizer": "muon"}, ["optimizer='muon'", "use optimizer='adamw'"]),
        ({"gpas": True, "residual_gate": "admin", "norm": "post"}, ["gpas", "residual_gate='admin'"]),
        ({"attention_residuals": 5}, ["attention_residuals=5", "n_layers=12"]),
        ({"attention_residuals": 4, "norm": "keel"}, ["attention_residuals=4", "norm='keel'", "the one stream"]),
        ({"attention_residuals": 4, "gpas": True}, ["attention_residuals=4", "gpas=True"]),
        ({"attention_residuals": 4, "parametrisation": "mup"}, ["attention_residuals=4", "no rule"]),
        ({"attention_dropout": 1.0}, ["attention_dropout=1.0", "less than 1"]),
        ({"n_experts": 4, "top_k": 2, "ffn_dropout": 0.1}, ["ffn_dropout=0.1", "residual_dropout"]),
        ({"d_expert": 2}, ["d_expert=2 needs experts"]),
        ({"batch_tokens": 1000}, ["batch_tokens=1000", "seq_len=256", "batch_tokens=1024"]),
        ({"train_tokens": 10_000}, ["train_tokens=10000", "train_tokens=8192"]),
        ({"chunk_len": 300}, ["chunk_len=300"]),
        ({"measure_tokens": 100}, ["measure_tokens=100", "at least 256"]),
        ({"fit_tokens": 300, "d_model": 512}, ["fit_tokens=300", "at least 768"]),
        ({"eval_seq_len": 200_000}, ["val_tokens=131072", "at least 200000"]),
        ({"depth_scale": "lsn"}, ["depth_scale='lsn'", "'none', 'lns', 'before_norm'"]),
        ({"mix_frac": 0.5}, ["mix_frac=0.5 has no meaning with norm='pre'", "norm='mix'"]),
        ({"norm": "mix", "n_layers": 2, "mix_frac": 0.1}, ["mix_frac=0.1", "0 blocks are post", "norm='pre'"]),
        ({"norm": "mix", "mix_frac": 1.0}, ["mix_frac=1.0", "less than 1"]),
        ({"norm_groups": 8}, ["norm_groups=8 has no meaning", "norm_kind='group'"]),
        ({"norm_kind": "group", "norm_groups": 5}, ["norm_groups=5", "d_model=64"]),
        ({"norm_kind": "group", "norm_groups": 64}, ["norm_groups=64", "at least 2 channels"]),
        ({"gate_init": 0.1}, ["gate_init=0.1", "residual_gate='layerscale'"]),
        ({"residual_gate": "admin"}, ["residual_gate='admin'", "norm='pre'", "use norm='post'"]),
        ({"sliding_window": 0}, ["sliding_window=0"]),
        ({"eod": 3}, ["eod=3 has no meaning", "mask_documents=True"]),
        ({"mask_documents": True, "tokenizer": "gpt2"}, ["mask_documents needs the id that ends", "eod=None"]),
        ({"mask_documents": True, "vocab_size": 200}, ["below vocab_size=200", "eod=256"]),
        ({"n_experts": 4, "top_k": 1}, ["top_k=1", "renormalise_gates=false"]),
        ({"n_experts": 4, "top_k": 2, "n_dense_layers": 12}, ["n_dense_layers=12", "n_layers=12"]),
        ({"attention_tau": [0.1, 0.01, 0.1]}, ["attention_tau=[0.1, 0.01, 0.1] must differ"]),
        ({"attention_rel_tau": [0.1234567, 0.1234568]}, ["attention_rel_tau=", "first six digits"]),
        ({"depth_scale": "lns", "init": "scaled"}, ["depth_scale='lns' with init='scaled'", "lns_with_scaled_init"]),
    ],
)
def test_mistakes_are_named_with_their_value_and_a_fix(fields, words):
    with pytest.raises(ValueError) as caught:
        run(**fields)
    message = str(caught.value)
    assert message.startswith("run.yaml: ") and "\n" not in message
    for word in words:
        assert word in message


def test_self_defeating_pair_is_allowed_by_name_with_a_warning():
    with pytest.warns(UserWarning, match="defeats LNS"):
        config = run(depth_scale="lns", init="scaled", allow=["lns_with_scaled_init"])
    assert config.init == "scaled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(depth_scale="lns")


def test_run_id_names_the_result():
    assert run(lr=3e-3).run_id == run(lr=0.003).run_id
    assert run(lr=3e-3).run_id != run(lr=2e-3).run_id
    assert run(seed=1).run_id != run(seed=2).run_id
    assert run(seed=1).cell_id == run(seed=2).cell_id != run(seed=1, lr=2e-3).cell_id
    assert run(seed=0).cell_id == f"c-{run(seed=0).run_id}"  # the name of no run
    assert run(n_heads=4).run_id == run(n_kv_heads=4).run_id == run(d_ff=176).run_id  # said or derived


def test_defaults_change_only_with_their_version():
    """A changed default makes old run_ids lie. If this fails: raise DEFAULTS_VERSION. Every committed run has the id
    that its whole configuration, with the fields at their defaults, gives it now."""
    records = f"select place, content from '{RESULTS}/*/records.parquet' where name = 'config.yaml' order by place"
    stored = [row for row in duckdb.sql(records).fetchall() if row[0].startswith("runs/")]
    assert DEFAULTS_VERSION == 1 and len(stored) > 1000
    for place, content in stored[::60]:
        config = stored_config(parse_yaml(content.decode(), place), place)
        assert config.run_id == Path(place).name, place


def test_a_field_of_an_earlier_version_is_read_at_its_default_and_else_refused():
    retired = {"logit_soft_cap": 0.0, "weight_density": 1.0, "loops": 1, "n_streams": 1, "stream_mixing": "plain"}
    assert stored_config({**retired, "lr": 2e-3}, "config.yaml").run_id == run(lr=2e-3).run_id
    with pytest.raises(ValueError, match=r"config.yaml: logit_soft_cap=5.0 is of an earlier version.*0.0"):
        stored_config({"logit_soft_cap": 5.0}, "config.yaml")
    with pytest.raises(ValueError, match="logit_soft_cap"):
        run(logit_soft_cap=0.0)
