"""A file given to the wrong command is one line that names the right one, and --set reaches the keys of a sweep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sparsedepth.cli.input_file import KINDS, kind_of, read_input, run_config, single_run_sweep, sweep_definition
from sparsedepth.config.load import read_yaml
from sparsedepth.config.presets import PRESETS

SWEEPS = Path(__file__).parent.parent.parent / "sparsedepth/examples"
ASKED = {"name": "a", "question": "Is it?", "hypothesis": "Yes."}
CONTENTS = {"run": {"n_layers": 2, "lr": 0.01}, "sweep": {**ASKED, "base": {"lr": 0.01}, "space": {"n_layers": [2, 3]}}}


def write(folder, content):
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_definition_of_the_repository_is_of_its_kind():
    for path in SWEEPS.glob("*.yaml"):
        assert kind_of(read_yaml(path)) == "sweep", path
    assert {kind_of({"preset": name}) for name in PRESETS} == {"run"}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("wanted", CONTENTS)
def test_a_file_of_another_kind_names_its_command(tmp_path, kind, wanted):
    path = write(tmp_path, CONTENTS[kind])
    if kind == wanted:
        assert read_input(path, wanted) == CONTENTS[kind]
        return
    with pytest.raises(ValueError) as caught:
        read_input(path, wanted)
    message = str(caught.value)
    assert message.endswith(f"sparsedepth {KINDS[kind][1]} {path}") and "unknown key" not in message
    assert len(message) < 250 + len(str(path)) * 2


REFUSED_BY_TRAIN = """
import sys, sparsedepth as sd
for file, values in (({"space": {"lr": [1.0]}}, {}), ({"n_layers": 2}, {"tokenizer": "gpt2", "vocab_size": 50304})):
    try:
        sd.train(file, sys.argv[1], set=values)
    except ValueError as error:
        print(str(error)[:40])
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_train_refuses_before_it_imports_torch(tmp_path):
    """A file of another kind, and a tokenizer of a hub that does not answer, are refused at once."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", REFUSED_BY_TRAIN, str(tmp_path / "out")]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert output == ["the given mapping is a sweep definition ", "tokenizer='gpt2' cannot be loaded (the h", "[]"]
    assert not (tmp_path / "out").exists()


def test_a_slip_in_a_file_does_not_change_its_kind():
    assert kind_of({**CONTENTS["run"], "seeds": [0, 1], "name": "mine"}) == "run"
    assert kind_of({**CONTENTS["sweep"], "n_layers": [2, 3]}) == "sweep"  # a depth that belongs into the space
    assert kind_of({"steps": 3}) is None


@pytest.mark.parametrize("build_run", [run_config, single_run_sweep])
def test_a_mistake_of_set_is_not_blamed_on_the_file(tmp_path, build_run):
    """A file that is wrong by itself is named, even if --set is wrong too."""
    path = write(tmp_path, {"n_layers": 2, "n_heads": 4, "d_model": 64})
    with pytest.raises(ValueError, match=r"^--set: lr=-1 must be greater than 0"):
        build_run(path, ["lr=-1"])
    with pytest.raises(ValueError, match=r"^--set: n_heads=3 does not divide"):
        build_run(path, {"n_heads": 3})
    path = write(tmp_path, {"n_heads": 3, "d_model": 64})
    with pytest.raises(ValueError, match=r"file\.yaml: n_heads=3 does not divide"):
        build_run(path, ["lr=-1"])
    assert build_run(path, ["n_heads=2"])


def test_set_reaches_the_keys_of_a_sweep(tmp_path):
    path = write(tmp_path, CONTENTS["sweep"])
    changed = sweep_definition(path, settings=["seeds=[3, 4]", "lr=0.5", "objectives=[usefulness]"])
    assert (changed.seeds, changed.base, changed.objectives) == ([3, 4], {"lr": 0.5}, ["usefulness"])
    assert sweep_definition(None, vary=["n_layers=2,3"], settings=["sampler=random", "n_trials=2"]).n_trials == 2
    searched = {**CONTENTS["sweep"], "sampler": "random", "n_trials": 5}
    assert sweep_definition(write(tmp_path, searched), settings=["n_trials=9"]).n_trials == 9
    for name in ("base", "scales"):
        with pytest.raises(ValueError, match=f"--set {name}: set a field of a run"):
            sweep_definition(path, settings=[f"{name}={{lr: 1}}"])
    with pytest.raises(ValueError, match="--set: n_trials=4 has no meaning with sampler 'grid'"):
        sweep_definition(write(tmp_path, CONTENTS["sweep"]), settings=["n_trials=4"])
