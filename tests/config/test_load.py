"""YAML that is data: nothing in it runs, and mistakes are told in a line."""

import time

import pytest
import yaml

from sparsedepth.config.load import MAX_BYTES, _Loader, build, parse_settings, parse_yaml, read_yaml, yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition


def test_numbers_are_numbers():
    assert parse_yaml("[1e-3, 3.0e-3, 2E+5, -1e2, 12]", "t") == [0.001, 0.003, 2e5, -100.0, 12]
    assert parse_yaml("[x, 2024-01-01]", "t") == ["x", "2024-01-01"]


@pytest.mark.parametrize(("text", "number"), [("010", 8), ("1:30", 90), ("-012", -10), ("1:30.5", 90.5), ("0_7", 7)])
def test_numbers_to_another_base_than_ten_are_refused(text, number):
    with pytest.raises(ValueError, match=f"{text} would be read as {number}; write that, or '{text}' in quotes"):
        parse_yaml(f"lr: {text}", "t")
    assert parse_yaml(f"lr: '{text}'", "t") == {"lr": text}


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {canary}']",
        "!!python/name:os.system",
        "!!python/module:os",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "a: [1, 2",
        "a: 1\na: 2",
        "{" * 5000,
        "!!bool maybe",
        '!!float ""',
        "!!map [1]",
    ],
)
def test_hostile_or_broken_yaml_is_refused_in_one_line(text, tmp_path):
    canary = tmp_path / "canary"
    with pytest.raises(ValueError) as caught:
        parse_yaml(text.replace("{canary}", str(canary)), "bad.yaml")
    assert "bad.yaml" in str(caught.value) and not any(word in str(caught.value) for word in ("\n", "<unicode string>"))
    assert not canary.exists()


def test_the_time_to_find_duplicate_keys_is_linear():
    text, mapping = "tag:yaml.org,2002:str", "tag:yaml.org,2002:map"
    pairs = [(yaml.ScalarNode(text, f"k{n}"), yaml.ScalarNode(text, "1")) for n in range(10_000)]
    began = time.process_time()
    assert len(_Loader("").construct_mapping(yaml.MappingNode(mapping, pairs))) == 10_000
    assert time.process_time() - began < 1  # every pair of keys: several seconds


def test_a_number_of_more_digits_than_python_writes_is_told():
    with pytest.raises(ValueError, match=r"^t: a value is neither number, text"):
        build(RunConfig, {"seed": parse_yaml("0x" + "f" * 8000, "t")}, "t")


def test_a_slip_in_yaml_is_told_with_its_line():
    with pytest.raises(ValueError, match=r"duplicate key 'lr' at line 3, column 1$"):
        parse_yaml("lr: 1\nseed: 0\nlr: 2", "bad.yaml")
    with pytest.raises(ValueError) as caught:
        parse_yaml("data: [a\nsteps: 3: 4", "bad.yaml")
    assert str(caught.value).startswith("bad.yaml is not plain YAML: line 2, column 6: expected ',' or ']'")


def test_nothing_is_imported_or_expanded():
    values = parse_yaml("_target_: os.system\npath: ${HOME}\nshell: $(id)", "t")
    assert values == {"_target_": "os.system", "path": "${HOME}", "shell": "$(id)"}
    with pytest.raises(ValueError, match="unknown key '_target_'"):
        build(RunConfig, values, "t")


def test_a_file_that_is_absent_a_folder_empty_binary_or_too_large_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match="is a folder; name a file"):
        read_yaml(tmp_path)
    for name, content, words in (
        ("list.yaml", b"[1]", "must hold 'key: value' lines"),
        ("empty.yaml", b"", "must hold 'key: value' lines"),
        ("binary.yaml", b"\xff\xfe\x00", "UTF-8"),
        ("big.yaml", b"a: " + b"x" * MAX_BYTES, "1,000,000"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_yaml(tmp_path / name)


def test_settings_of_a_command_line_are_typed_and_need_a_key():
    parsed = parse_settings(["n_layers=24", "lr=1e-3", "weight_eps=[0.1]", "depth_scale=lns"])
    assert parsed == {"n_layers": 24, "lr": 0.001, "weight_eps": [0.1], "depth_scale": "lns"}
    for bad in ("n_layers", "=3"):
        with pytest.raises(ValueError, match="key=value"):
            parse_settings([bad])


def test_a_missing_key_and_a_long_value_are_told_briefly():
    with pytest.raises(ValueError, match=r"^x: name is missing") as told:
        build(SweepDefinition, {"seeds": list(range(500)), "nope": list(range(500))}, "x")
    assert len(str(told.value)) < 1500


@pytest.mark.parametrize(
    "text", ["12e345678901", "1e5", "-1.5E+3", "0x1f", "010", "1:30", "no", "~", "2026-11-22", "1_0e2", "", "x: y"]
)
def test_text_that_looks_like_something_else_is_read_back_as_text(text):
    """A digest of digits and one 'e' is a number to the reader: it was infinity."""
    twice = [text]
    values = {"a": text, text or "b": 1e-5, "c": twice, "d": twice, "e": 0.0003, "f": None, "g": float("inf")}
    assert parse_yaml(yaml_text(values), "x") == values
