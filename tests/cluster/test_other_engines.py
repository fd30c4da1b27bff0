"""The job files that docs/ has for other engines: their syntax, and that the command in them exists."""

import shlex
import subprocess
from pathlib import Path

import yaml
from typer.main import get_command

from sparsedepth.cli.commands import app

DOCS = Path(__file__).parent.parent.parent / "docs"
KUBERNETES, SKYPILOT = (yaml.safe_load((DOCS / name).read_text()) for name in ("depth-job.yaml", "depth.sky.yaml"))


def check_body(script: str) -> None:
    """The script is bash's, and ends in a `work` command with options that it has."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    program, name, *arguments = shlex.split(script.strip().splitlines()[-1].removeprefix("exec "))
    assert (program, name) == ("sparsedepth", "work")
    commands = get_command(app).commands
    given = commands[name].make_context(name, arguments, resilient_parsing=False).params
    assert given["leave_when_idle"] and given["folder"] == Path("/shared/depth")


def test_the_kubernetes_job():
    spec = KUBERNETES["spec"]
    assert (KUBERNETES["apiVersion"], KUBERNETES["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert spec["parallelism"] <= spec["completions"] and spec["backoffLimitPerIndex"] > 0
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # as a failure policy, and a limit for each index, ask for
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c"] and len(container["args"]) == 1
    check_body(container["args"][0])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    on_codes = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert [rule["containerName"] for rule in on_codes] == [container["name"]] and on_codes[0]["values"] == [2]


def test_the_skypilot_job():
    known = {"name", "resources", "file_mounts", "volumes", "workdir", "setup", "run"}
    assert set(SKYPILOT) == known and set(SKYPILOT["resources"]) == {"accelerators", "use_spot", "job_recovery"}
    assert SKYPILOT["workdir"] == "." and SKYPILOT["setup"] == "pip install ."  # the name is on no package index
    check_body(SKYPILOT["run"])
