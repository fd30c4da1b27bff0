"""The batch script of a sweep on Slurm: an array whose tasks take runs until none waits.

What a task does when Slurm asks it to leave:

    USR1, USR2   the time limit is near        checkpoint, give the lease back, queue the task again
    TERM         preempted or cancelled        the same, unless Slurm was told to end the job, or to queue it
    INT          `sparsedepth stop`            the same, and the task ends
    killed (137)                               the task is queued again, at most MAX_KILLS times

`sbatch` gets the environment of whoever submits, and with it SPARSEDEPTH_STORAGE: no script holds a password.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WARNING_SECONDS = 120
"""How long before its time limit a task is told to leave; of a short limit a quarter."""

MAX_KILLS = 20
"""How often a task that was killed is queued again."""

FOLDER = "slurm"
"""Below the results folder: the script, and the tasks' logs."""

LOG = "%A_%a.log"
"""Of a task: the array's number and the task's own. Beside it, in 12_3.jsonl, a line for each start that has ended."""

OWN_KEYS = {
    "account", "array", "chdir", "dependency", "error", "export", "gpus-per-node", "job-name", "no-requeue", "nodes",
    "open-mode", "output", "parsable", "partition", "requeue", "signal", "test-only", "time", "wait", "wrap",
}  # fmt: skip
"""What the script decides itself, or has an option of its own."""

BODY = """\
# USR1: the time limit is near; TERM: preempted or cancelled. The run is checkpointed, its lease given back, and the
# task queued again, unless Slurm was told to end the job, or to queue it. INT (`sparsedepth stop`): the task ends.
task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # SLURM_JOB_ID of the last task stands for the whole array
log={folder}/$task.log
before=$(stat -c %s "$log" 2>/dev/null)
again= why=
leave() {{ [ "$again" = no ] || again=$1; why=${{why:-$2}}; kill -TERM "$work" 2>/dev/null; }}
trap 'leave yes "time limit"' USR1 USR2
trap 'leave yes "preempted or cancelled"' TERM
trap 'leave no stopped' INT

{command} &
work=$!
[ -z "$again" ] || kill -TERM "$work"
while kill -0 "$work" 2>/dev/null; do wait "$work"; done
wait "$work"; code=$?
[ "$code" -ge 0 ] || code=143  # bash may lose it between two signals

[ "$code" -le 128 ] || [ "$again" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_kills} ] || again=yes
if [ "$code" -gt 128 ] && [ "$again" = yes ]; then
    for pause in 2 5 10 20 0; do  # the controller may be starting again
        state=$(squeue --noheader --states=all --format=%T:%r --jobs="$task") && [ "$state" ] && break
        sleep "$pause"
    done
    case $state in RUNNING:* | *:TimeLimit) ;; *) again=no ;; esac
fi
# For `sparsedepth status`: why this start of the task ended (Slurm writes its reason into the log), and what it used.
due=$(tail -c "+$((${{before:-0}} + 1))" "$log" 2>/dev/null | sed -n 's/.* DUE TO \\([A-Z ]*\\) \\*\\*\\*$/\\1/p')
[ "$why" ] || case $code in 0) why=done ;; 137) why="killed, perhaps out of memory" ;; *) why="exit code $code" ;; esac
[ -z "$due" ] || why=$(echo "$due" | tail -n 1 | tr '[:upper:]' '[:lower:]')
printf '{{"restarts": %d, "nodes": %d, "cpus": %d, "seconds": %d, "reason": "%s"}}\\n' "${{SLURM_RESTART_COUNT:-0}}" \\
    "${{SLURM_JOB_NUM_NODES:-1}}" "${{SLURM_CPUS_ON_NODE:-1}}" "$SECONDS" "$why" >> {folder}/"$task".jsonl
[ "$code" -le 128 ] || [ "$again" != yes ] || scontrol requeue "$task"
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What each task of the array asks Slurm for; None and empty: the cluster's default."""

    partition: str | None = None
    account: str | None = None
    gpus: str | None = None
    """GPUs of a node: 1, or h100:2"""
    nodes: int = 1
    """nodes of one run"""
    time: str | None = None
    """limit, as Slurm writes it: 30, 4:00:00, 1-12"""
    extra: tuple[str, ...] = ()
    """further options of sbatch: key=value, or key"""

    def __post_init__(self) -> None:
        """Raises ValueError for what is no option of ours or of sbatch."""
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,+-]+", value):
                raise ValueError(f"--{name} {value!r} must be a name that Slurm knows: letters, digits, '_', '-', '.'")
        if self.gpus is not None and not re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,2}", self.gpus):
            raise ValueError(f"--gpus {self.gpus!r} must be, with --on slurm, the GPUs of a task: 1, or h100:2")
        if self.time is not None:
            parse_time(self.time)
        for option in self.extra:
            key, _, value = option.partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or re.search(r"[\x00-\x1f\"\\]", value):
                raise ValueError(f"--sbatch {option!r} must be KEY=VALUE with a long option of sbatch, such as qos=low")
            if key in OWN_KEYS:
                raise ValueError(f"--sbatch {key} is decided by the script; write the others there, or edit the script")

    @property
    def seconds(self) -> int | None:
        """The time limit."""
        return parse_time(self.time) if self.time else None

    @property
    def gpu_count(self) -> int:
        return int(self.gpus.rpartition(":")[2]) if self.gpus else 0

    @property
    def warning_seconds(self) -> int:
        """How long before the limit a task is told to leave."""
        return min(WARNING_SECONDS, self.seconds // 4) if self.seconds else WARNING_SECONDS

    def options(self) -> dict[str, str | None]:
        """The options of sbatch by which a task, or the probe before it, gets its place."""
        given = {"partition": self.partition, "account": self.account, "gpus-per-node": self.gpus}
        options: dict[str, str | None] = {key: value for key, value in given.items() if value is not None}
        if self.nodes > 1:
            options |= {"nodes": str(self.nodes), "ntasks-per-node": "1"}
        for option in self.extra:
            key, equals, value = option.partition("=")
            options[key] = value if equals else None
        return options


def parse_time(text: str) -> int:
    """Seconds of a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError for another."""
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text)
    if match is None:
        raise ValueError(f"--time {text!r} must be minutes, or as Slurm writes it: 30, 4:00:00, 1-12:00:00")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def check_folder(results: Path) -> None:
    """Raises ValueError for a path that cannot stand in a batch script's header."""
    if re.search(r"[\x00-\x1f\"'\\%]", str(results.resolve())):
        raise ValueError(f"--out {str(results)!r}: Slurm's file names take no quotes, '%' or '\\'; choose another")


def work_command(python: str, results: Path, arguments: Sequence[str]) -> str:
    """What a task runs, on this engine and on others."""
    words = [python, "-m", "sparsedepth.cli.main", "work", str(results.resolve()), "--leave-when-idle", *arguments]
    return " ".join(shlex.quote(word) for word in words)


def array_script(*, name: str, results: Path, request: Request, tasks: int, command: str) -> str:
    """The whole script."""
    own = {
        "job-name": name,
        "array": f"0-{tasks - 1}",
        "output": f'"{results.resolve() / FOLDER / LOG}"',
        "open-mode": "append",
        "export": "ALL",
        "requeue": None,
        "signal": f"B:USR1@{request.warning_seconds}",
        **({"time": request.time} if request.time else {}),
    }
    head = [
        "#!/bin/bash",
        f"# {name}: made by `sparsedepth sweep --on slurm`. Edit it freely: the same command submits it as it is;",
        "# delete it, and it is made anew.",
        *header({**own, **request.options()}),
        "",
    ]
    folder = shlex.quote(str(results.resolve() / FOLDER))
    return "\n".join(head) + "\n" + BODY.format(command=command, folder=folder, max_kills=MAX_KILLS)


def header(options: dict[str, str | None]) -> list[str]:
    """The options of sbatch as lines of a script."""
    return [f"#SBATCH --{key}" + (f"={value}" if value is not None else "") for key, value in options.items()]


def cpus_of(request: Request) -> int:
    """The cores of a task: one where no option says more."""
    value = request.options().get("cpus-per-task") or "1"
    return int(value) if value.isdigit() else 1
