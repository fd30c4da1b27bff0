"""The scripts of `analysis/` end in silence where nobody reads on, and with their status otherwise."""

import os
import subprocess
import sys
from pathlib import Path

CODE = "from sparsedepth.effects.script import read_runs, run_script; run_script(lambda paths: {body})"


def run(body, command):
    call = f'set -o pipefail; {sys.executable} -c "{CODE.format(body=body)}" {command}'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    return subprocess.run(["bash", "-c", call], capture_output=True, text=True, env=environment)


def test_a_closed_pipe_is_silent_and_a_status_is_kept():
    closed = run("print('x\\n' * 100_000)", "| head -1")
    assert (closed.returncode, closed.stdout, closed.stderr) == (1, "x\n", "")
    whole = run("read_runs(paths)", "| cat")
    assert (whole.returncode, whole.stdout, whole.stderr.count("\n")) == (2, "", 1)
