"""The scripts of `analysis/` end in silence where nobody reads on, and with their status otherwise."""

import os
import subprocess
import sys
from pathlib import Path

CODE = "from sparsedepth.effects.script import run_script; run_script(lambda: print('x\\n' * {lines}) or {status})"


def run(lines, status, command):
    call = f'set -o pipefail; {sys.executable} -c "{CODE.format(lines=lines, status=status)}" {command}'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    return subprocess.run(["bash", "-c", call], capture_output=True, text=True, env=environment)


def test_a_closed_pipe_is_silent_and_a_status_is_kept():
    closed = run(100_000, 0, "| head -1")
    assert (closed.returncode, closed.stdout, closed.stderr) == (1, "x\n", "")
    whole = run(1, 2, "| cat")
    assert (whole.returncode, whole.stderr) == (2, "")
