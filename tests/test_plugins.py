"""Measures, tasks and figures of one's own: a package that is installed here, a file that is named, and broken ones."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

from sparsedepth import plugins
from sparsedepth.quantities import measured
from sparsedepth.quantities.quantity import OTHER_COLUMNS
from sparsedepth.store import schema

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
    made = json.loads((run / "manifest.json").read_text())["plugins"]
    assert {name: by["file"] for name, by in made.items()} == {"block_rms": "measure.py", "task:parity": "task.py"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["task_code"] == made["task:parity"]["code"]
    changed = tmp_path / "task.py"
    changed.write_text(TASK.read_text() + "\n# another task\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "measures": ["loss"]}))
    _, err = sparsedepth(f"train {tmp_path}/run.yaml -o {tmp_path}/r --plugin {changed}", code=2)
    assert "the code of task:parity is now" in err and err.count("\n") == 1


def test_a_folder_is_read_without_the_plugin_of_its_measure(swept, tmp_path):
    results, _ = swept
    _, err = sparsedepth(f"query {results} 'select count(*) from runs'", code=2)
    assert "is of the plugin task.py, which is not loaded; name its file with --plugin" in err and err.count("\n") == 1
    (out,), err = sparsedepth(f"query {results} 'select count(*) n from runs' --plugin {TASK} --format json")
    assert json.loads(out) == [{"n": 4}]
    assert "block_rms was measured by a plugin that is not loaded; name its file: --plugin measure.py" in err


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The measure with another formula, under the name that it had."""
    file = tmp_path_factory.mktemp("changed") / "measure.py"
    file.write_text(MEASURE.read_text().replace("** 0.5", "** 0.5 * 3"))
    return file


def train(folder, seed, plugin, code=0):
    """One run into `folder`, and what was said."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**RUN, "seed": seed}))
    return sparsedepth(f"train {file} --out {folder} --plugin {TASK} --plugin {plugin}", code=code)


def test_a_folder_takes_no_run_of_other_code(swept, changed, tmp_path):
    """Of a plugin that changed between two runs; one that is renamed and does the same is the same."""
    results, _ = swept
    copy = shutil.copytree(results, tmp_path / "results", ignore=shutil.ignore_patterns(".cache", "study*"))
    _, err = train(copy, 9, changed, code=2)
    assert "the plugin measure.py has changed since run" in err.splitlines()[-1]
    renamed = tmp_path / "renamed.py"
    renamed.write_text(MEASURE.read_text())
    train(copy, 9, renamed)


@pytest.fixture(scope="module")
def other(changed, tmp_path_factory):
    """A run whose measure is of other code than in `swept`."""
    folder = tmp_path_factory.mktemp("code") / "other"
    train(folder, 10, changed)
    return folder


def test_numbers_of_different_code_are_told_and_not_compared(swept, other, changed):
    results, _ = swept
    folders = f"{results} {other} --plugin {changed} --plugin {TASK}"
    for command in (f"best {folders} --by block_rms", f"effects {folders} --by block_rms"):
        _, err = sparsedepth(command, code=2)
        assert "block_rms was measured by plugins of different code: measure.py" in err
    (by_loss, one_code, _), err = sparsedepth(
        f"best {folders} --by val_loss",
        f"best {results} --by block_rms --plugin {MEASURE} --plugin {TASK}",
        f"query {folders} 'select count(*) from runs'",
    )
    assert "rank" in by_loss and "rank" in one_code
    assert "measured block_rms with different code" in err and "rms was measured by a plugin that is" not in err


def test_a_named_file_comes_before_an_installed_package_of_its_name(swept):
    results, installed = swept
    _, err = sparsedepth(f"status {results} --plugin {MEASURE}", **installed)
    assert "warning: the installed plugin block_rms has a measure 'block_rms', a name that is taken: it is left" in err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "cannot be used: ModuleNotFoundError"),
        ("x = 1", "has none of MEASURE, TASKS, FIGURES"),
        ("MEASURE = 1", "it has MEASURE, and no function add_rows"),
        ("TASKS = {}", "it has TASKS, and no function draw"),
        (TASK.read_text().replace("TASKS = {", "TASKS = [] and {"), "its TASKS must be a mapping by names"),
        (TASK.read_text().replace('"n_tokens": 2', '"n_tokens": "2"'), "its TASKS must be a mapping by names"),
        (TASK.read_text().replace('"parity":', '"a b":'), "its TASKS must be a mapping by names"),
        ("import sys\nsys.exit(0)", "cannot be used: SystemExit\\(0\\)"),
        ("class Stop(BaseException): ...\nraise Stop('now')", r"cannot be used: Stop\('now'\)"),
        ("MEASURE = 1\nQUANTITIES = 2\ndef add_rows(context, rows): ...", "its MEASURE is no Measure"),
        (MEASURE.read_text().replace("QUANTITIES = [", "QUANTITIES = 2 or ["), "its QUANTITIES are no list"),
        (MEASURE.read_text().replace("QUANTITIES = [", "QUANTITIES = [1] or ["), "its QUANTITIES are no list"),
        (MEASURE.read_text().replace('Quantity("block_rms"', 'Quantity("block rms"'), "must be a name such as"),
        (MEASURE.read_text().replace('Measure("block_rms"', "Measure(3"), "3 must be a name such as"),
        (MEASURE.read_text().replace('"rms of u_l"', "3"), "cannot be used: AttributeError"),
        (MEASURE.read_text().replace('("runs", "layers")', '("run",)'), r"has tables \('run',\); choose from runs"),
        (MEASURE.read_text().replace("(1, 0)", "3"), "cannot be used: TypeError"),
        (MEASURE.read_text().replace("(1, 0)", "(1, -1)"), r"costs \(1, -1\) passes; two numbers"),
        (MEASURE.read_text().replace("sizes: (", "sizes: sizes.depth and ("), "cannot be used: AttributeError"),
        ("FIGURES = ['dots']", "its FIGURES must be a mapping by names"),
        ("FIGURES = {'dots': print}", "its FIGURES must be a mapping by names"),
        ("FIGURES = {'dots': (print, 3)}", "its FIGURES must be a mapping by names"),
        (MEASURE.read_text().replace('Measure("block_rms"', 'Measure("variance"'), "a measure 'variance'"),
        (MEASURE.read_text().replace('Quantity("block_rms"', 'Quantity("val_loss"'), "a quantity 'val_loss'"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused(text, reason, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(text)
    monkeypatch.setenv(plugins.VARIABLE, str(file))
    with pytest.raises(ValueError, match=reason):
        measured._with_plugins()


def made_of(name):
    return MEASURE.read_text().replace('Quantity("block_rms"', f'Quantity("{name}"')


SHADOWING = (
    "lr",
    "outcome",
    "device",
    "tuning",
    "source",
    "run_id",
    "val_loss_lo",
    "train_loss",
    "causal_score_centre",
)


@pytest.mark.parametrize("name", SHADOWING)
def test_a_quantity_that_shadows_a_column_is_refused_by_name(name, tmp_path, monkeypatch):
    """Also an end of an interval of ours, and a profile over depth."""
    file = tmp_path / "mine.py"
    file.write_text(made_of(name))
    monkeypatch.setenv(plugins.VARIABLE, str(file))
    with pytest.raises(ValueError, match=f"the plugin mine has a quantity '{name}', a name that is taken; choose"):
        measured._with_plugins()
    if name == "lr":
        _, err = sparsedepth(f"best {tmp_path} --plugin {file}", code=2)
        assert "a quantity 'lr', a name that is taken" in err and err.count("\n") == 1
    file.write_text(MEASURE.read_text())
    assert [plugin.name for plugin in measured._with_plugins()[0]] == ["mine"]


def test_the_names_that_a_quantity_may_not_have_are_those_of_the_store():
    columns = [*chain(*schema.COLUMNS.values()), *chain(*schema.METRICS.values())]
    others = {column.name for column in (*columns, *schema.TUNING_COLUMNS, schema.SOURCE) if not column.measure}
    assert others == {*OTHER_COLUMNS.split()}


BROKEN = {
    "exits": "import sys\nsys.exit(3)",
    "nothing": "",
    "measure": MEASURE.read_text().replace('Measure("block_rms"', 'Measure("variance"'),
    "task": TASK.read_text().replace('"parity":', '"k_hop":'),
    "figure": "FIGURES = {'depth': (print, 'mine')}",
    **{f"shadows_{name}": made_of(name) for name in SHADOWING},
    "twice": MEASURE.read_text().replace("QUANTITIES = [", "QUANTITIES = 2 * ["),
    "failing": "FIGURES = {'mine': (lambda store: 1 / 0, 'fails when it is drawn')}",
}


def test_an_installed_package_that_is_wrong_is_a_warning(swept, tmp_path):
    results, installed = swept
    site = tmp_path / "site"
    (site / "broken").mkdir(parents=True)
    (site / "broken-1.dist-info").mkdir()
    (site / "broken-1.dist-info" / "METADATA").write_text("Name: broken\nVersion: 1\n")
    for name, text in BROKEN.items():
        (site / "broken" / f"{name}.py").write_text(text)
    points = "".join(f"{name} = broken.{name}\n" for name in BROKEN) + "attribute = broken.figure:FIGURES\n"
    (site / "broken-1.dist-info" / "entry_points.txt").write_text(f"[sparsedepth.measures]\n{points}")
    environment = {"PYTHONPATH": os.pathsep.join([str(site), installed["PYTHONPATH"]])}
    status, effects = f"status {results}", f"effects {results} --by block_rms"
    lines = (f"best {results}", "metrics", "presets", f"plot {results} --figure all -o {tmp_path}/figures")
    outputs, err = sparsedepth(*lines, status, effects, **environment)
    assert outputs[4:] == sparsedepth(status, effects, **installed)[0]
    assert "rank" in outputs[0] and "val_loss" in outputs[1] and (tmp_path / "figures" / "dots.png").exists()
    for name in ("exits (broken.exits)", "nothing (broken.nothing)", "attribute (broken.figure:FIGURES)"):
        assert f"warning: the installed plugin {name} is left out: " in err
    assert "twice (broken.twice) is left out: its QUANTITIES have block_rms twice" in err
    for name in ("measure has a measure 'variance'", "task has a task 'k_hop'", "figure has a figure 'depth'",
                 *(f"shadows_{name} has a quantity '{name}'" for name in SHADOWING)):  # fmt: skip
        assert f"warning: the installed plugin {name}, a name that is taken: it is left out" in err
    assert "ZeroDivisionError" in outputs[3] + err and "Traceback" not in err


def test_errors_are_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import no_such_module")
    _, err = sparsedepth(f"metrics --plugin {file}", code=2)
    assert "cannot be used: ModuleNotFoundError" in err and err.count("\n") == 1
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
