"""Measures, tasks and figures of one's own: a package that is installed here, a file that is named, and broken ones."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from sparsedepth import plugins
from sparsedepth.quantities import measured

PACKAGE = Path(__file__).parent / "support" / "plugin"
MEASURE, TASK, FIGURE = (PACKAGE / "block_rms_plugin" / f"{name}.py" for name in ("measure", "task", "figure"))
RUN = {
    "corpus": "task:parity", "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "seq_len": 16,
    "batch_tokens": 64, "train_tokens": 256, "val_tokens": 64, "measure_tokens": 64, "fit_tokens": 64,
    "measures": ["loss", "block_rms"],
}  # fmt: skip


IN_TURN = """
import shlex, sys
from sparsedepth.cli.main import run
for line in sys.argv[1:]:
    try:
        run(shlex.split(line))
    except SystemExit as ended:
        if ended.code:
            raise
    print(end="\\f")
"""


def sparsedepth(*lines, code=0, **environment):
    """Command lines in a process of their own, since plugins are loaded once; the output of each, and all errors."""
    command = [sys.executable, "-c", IN_TURN, *lines]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.split("\f")[:-1], done.stderr


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two settings and seeds of a task of one's own, with a measure of one's own; the environment in which the package
    is installed."""
    folder = tmp_path_factory.mktemp("plugins")
    shutil.copytree(PACKAGE / "block_rms_plugin", folder / "site" / "block_rms_plugin")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    information = folder / "site" / "block_rms_plugin-1.dist-info"  # what an installer writes
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"].items()
    groups = (f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in own.items()) for group, own in points)
    (information / "entry_points.txt").write_text("\n".join(groups))
    installed = {"PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])}
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    vary = f"--base {folder}/run.yaml --vary depth_scale=none,lns --seeds 2"
    sparsedepth(f"sweep {vary} --out {folder}/results", **installed)
    return folder / "results", installed


def test_an_installed_package_is_measured_ranked_and_drawn(swept, tmp_path):
    results, installed = swept
    sql = "select run_id, block_rms, layer, value from layers join runs using (run_id) where metric = 'block_rms'"
    (rows, best, effects, _), _ = sparsedepth(
        f'query {results} "{sql}" --format json',
        f"best {results} --by block_rms",
        f"effects {results} --by block_rms",
        f"plot {results} --figure dots -o {tmp_path}/dots.png",
        **installed,
    )
    by_run = {}
    for row in json.loads(rows):
        by_run.setdefault((row["run_id"], row["block_rms"]), {})[row["layer"]] = row["value"]
    assert len(by_run) == 4 and all(mean > 0 for _, mean in by_run)
    for (_, mean), values in by_run.items():
        assert values.keys() == {1, 2} and sum(values.values()) / 2 == pytest.approx(mean)
    assert "block_rms" in best and "block_rms [activation]" in effects
    assert (tmp_path / "dots.png").stat().st_size > 1000


def test_the_code_stands_in_the_manifest_and_in_the_identity_of_what_is_trained(swept, tmp_path):
    results, _ = swept
    run = next((results / "runs").iterdir())
    plugins = json.loads((run / "manifest.json").read_text())["plugins"]
    assert {"block_rms", "parity"} <= plugins.keys()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["task_code"] == plugins["parity"]
    changed = tmp_path / "task.py"
    changed.write_text(TASK.read_text() + "\n# another task\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "measures": ["loss"]}))
    _, err = sparsedepth(f"train {tmp_path}/run.yaml -o {tmp_path}/r --plugin {changed}", code=2)
    assert "the code of task:parity is now" in err and err.count("\n") == 1


def test_a_folder_is_read_without_the_plugin_of_its_measure(swept, tmp_path):
    results, _ = swept
    _, err = sparsedepth(f"query {results} 'select count(*) from runs'", code=2)
    assert "name its file with --plugin" in err  # its task is of a plugin, too
    (out,), _ = sparsedepth(f"query {results} 'select count(*) n from runs' --plugin {TASK} --format json")
    assert json.loads(out) == [{"n": 4}]


def test_installed_and_named_clash(swept):
    results, installed = swept
    _, err = sparsedepth(f"status {results} --plugin {MEASURE}", code=2, **installed)
    assert "a name that is taken" in err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "does not import: ModuleNotFoundError"),
        ("x = 1", "has none of MEASURE, TASKS, FIGURES"),
        ("MEASURE = 1", "no QUANTITIES or no function add_rows"),
        ("TASKS = {}", "no function draw"),
        ("import sys\nsys.exit(0)", "does not import: SystemExit: 0"),
        ("class Stop(BaseException): ...\nraise Stop('now')", "does not import: Stop: now"),
        ("MEASURE = 1\nQUANTITIES = 2\ndef add_rows(context, rows): ...", "its QUANTITIES are no list of quantities"),
        ("MEASURE = 1\nQUANTITIES = []\ndef add_rows(context, rows): ...", "its MEASURE is no measure"),
        ("FIGURES = ['dots']", "its FIGURES are no mapping by name"),
        (MEASURE.read_text().replace('Measure("block_rms"', 'Measure("variance"'), "a measure 'variance'"),
        (MEASURE.read_text().replace('Quantity("block_rms"', 'Quantity("val_loss"'), "a quantity 'val_loss'"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused(text, reason, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(text)
    monkeypatch.setenv(plugins.VARIABLE, str(file))
    with pytest.raises(ValueError, match=reason):
        monkeypatch.setattr(measured, "PLUGINS", plugins.load())
        measured._with_plugins()


def test_errors_are_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import no_such_module")
    _, err = sparsedepth(f"metrics --plugin {file}", code=2)
    assert "does not import: ModuleNotFoundError" in err and err.count("\n") == 1
    file.write_text("FIGURES = {'depth': (print, '')}")
    _, err = sparsedepth(f"plot {tmp_path} --plugin={file}", code=2)
    assert "a figure 'depth', a name that is taken" in err and err.count("\n") == 1


def test_files_are_taken_from_anywhere_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, "")
    words = ["--plugin", str(MEASURE), "query", f"--plugin={TASK}", "results"]
    assert plugins.name_on_command_line(words) == ["query", "results"]
    assert os.environ[plugins.VARIABLE] == f"{MEASURE}\n{TASK}", "a path may have a colon"
    for words, reason in (
        (["--plugin", str(tmp_path / "none.py")], "no such file"),
        (["x", "--plugin"], "needs a file"),
    ):
        with pytest.raises(ValueError, match=reason):
            plugins.name_on_command_line(words)


FAULTS = {
    "x = 1 / 0": "ZeroDivisionError",
    "rows.summary['other'] = 1.0": "no record",
    "import torch; rows.summary['block_rms'] = torch.ones(2)": "is a Tensor; give a number",
    "rows.add_layers('block_rms', [1.0] * 9, 1)": "layers are 0 to 2",
}


def test_a_measure_that_fails_costs_its_numbers_and_not_the_run(tmp_path):
    """One file per fault, all measured in one process."""
    files = []
    for number, fault in enumerate(FAULTS):
        head, _, _ = MEASURE.read_text().replace("block_rms", f"norm_{number}").partition("    from")
        files.append(tmp_path / f"norm_{number}.py")
        files[-1].write_text(head + "    " + fault.replace("block_rms", f"norm_{number}") + "\n")
    names = ["loss", *(f"norm_{number}" for number in range(len(FAULTS)))]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "measures": names}))
    named = " ".join(f"--plugin {file}" for file in [*files, TASK])
    query = f"query {tmp_path}/results 'select val_loss, norm_0 from runs' --format json"
    (_, rows), err = sparsedepth(f"train {tmp_path}/run.yaml -o {tmp_path}/results {named}", query)
    for number, reason in enumerate(FAULTS.values()):
        (line,) = [line for line in err.splitlines() if f"the measure norm_{number} of a plugin failed" in line]
        assert reason in line
    (row,) = json.loads(rows)
    assert row["val_loss"] > 0 and row["norm_0"] is None
