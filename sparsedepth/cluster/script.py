"""The batch script of a sweep on Slurm: an array whose tasks take runs from the queue until it is empty.

How a task reacts to signals:

    USR1, USR2   time limit near            checkpoint, release the lease, requeue the task; if Slurm warns early (by
                                            up to a minute), the task first keeps working for that long
    TERM         preempted or cancelled     the same, but without requeueing a job that Slurm ended or requeued itself
    INT          `sparsedepth stop`         the same, without requeueing
    killed (137)                            the task is requeued, at most MAX_KILLS times

If a start completes no run and writes no checkpoint before the time limit, the limit is too short. After MAX_STARTS
such starts in a row the task is not requeued, and prints a sufficient limit.

`sbatch` passes on the submitter's environment, including SPARSEDEPTH_STORAGE, so that no script holds a password.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WARNING_SECONDS = 120
"""How long before its time limit a task is warned; at most a quarter of the limit."""

MAX_KILLS = 20
"""How often a killed task is requeued."""

MAX_STARTS = 3
"""How often in a row a task may reach its time limit without progress."""

START_SECONDS = 20
"""Assumed time from the start of a task to the first training step."""

FOLDER = "slurm"
"""Subfolder of the results folder for the script and the task logs."""

LOG = "%A_%a.log"
"""Log of a task: job id of the array and task number. 12_3.jsonl next to it has a line per ended start."""

OWN_KEYS = {
    "account", "array", "chdir", "dependency", "error", "export", "gpus-per-node", "job-name", "no-requeue", "nodes",
    "open-mode", "output", "parsable", "partition", "requeue", "signal", "test-only", "time", "wait", "wrap",
}  # fmt: skip
"""Options that the script sets itself, or that have a command-line option."""

BODY = """\
# USR1: time limit near; TERM: preempted or cancelled. The task checkpoints its run, releases the lease, and requeues
# itself, unless Slurm ended or requeued the job. INT (`sparsedepth stop`): the same without requeueing.
task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # SLURM_JOB_ID of the last task stands for the whole array
log={folder}/$task.log
ends={folder}/$task.jsonl
log_size=$(stat -c %s "$log" 2>/dev/null)
start={folder}/.$task.start  # newer files were written by this start
touch "$start"
again= why= alarm=
leave() {{ [ "$again" = no ] || again=$1; why=${{why:-$2}}; kill -TERM "$work" 2>/dev/null; }}
left() {{  # seconds to the time limit
    local text=$(timeout 10 squeue --noheader --format=%L --jobs="$task")
    [[ $text =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return
    local part=("${{BASH_REMATCH[@]}}")
    echo $((((10#${{part[2]:-0}} * 24 + 10#${{part[4]:-0}}) * 60 + 10#${{part[5]}}) * 60 + 10#${{part[6]}}))
}}
warned() {{  # Slurm may warn up to a minute early
    local early=$(($(left) - {warning}))
    if [ "$early" -gt 5 ] && [ ! "$alarm" ]; then
        {{ sleep "$early"; kill -USR1 $$; }} > /dev/null 2>&1 & alarm=$!
    else
        leave yes "time limit"
    fi
}}
trap warned USR1 USR2
trap 'leave yes "preempted or cancelled"' TERM
trap 'leave no stopped' INT

{command} &
work=$!
[ -z "$again" ] || kill -TERM "$work"
while kill -0 "$work" 2>/dev/null; do wait "$work"; done
wait "$work"; code=$?
[ "$code" -ge 0 ] || code=143  # bash may lose it between two signals
[ ! "$alarm" ] || kill "$alarm" 2>/dev/null
progress=true
if [ "$why" = "time limit" ] && [ "$code" -ne 0 ]; then
    made=(-name complete -o -name 'step-*.json' -o -name failures.json -o -name memory.json -o -name pruned.json)
    cd {results} && new=$(find runs work -maxdepth 3 -newer "$start" \\( "${{made[@]}}" \\) -print -quit 2>/dev/null)
    [ "$new" ] || progress=false
    before=$(tail -n {others} "$ends" 2>/dev/null | grep -c '"progress": false')
    if [ ! "$new" ] && [ "$before" -ge {others} ]; then
        again=no
        echo "sparsedepth: error: reached the time limit {starts} times in a row without progress; {advice}" >&2
    fi
fi
rm -f "$start"

[ "$code" -le 128 ] || [ "$again" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_kills} ] || again=yes
if [ "$code" -gt 128 ] && [ "$again" = yes ]; then
    for pause in 2 5 10 20 0; do  # the controller may be starting again
        state=$(squeue --noheader --states=all --format=%T:%r --jobs="$task") && [ "$state" ] && break
        sleep "$pause"
    done
    case $state in RUNNING:* | *:TimeLimit) ;; *) again=no ;; esac
fi
# For `sparsedepth status`: why this start ended (Slurm writes its reason into the log), and the resources it used.
due=$(tail -c "+$((${{log_size:-0}} + 1))" "$log" 2>/dev/null | sed -n 's/.* DUE TO \\([A-Z ]*\\) \\*\\*\\*$/\\1/p')
[ "$why" ] || case $code in 0) why=done ;; 137) why="killed, perhaps out of memory" ;; *) why="exit code $code" ;; esac
[ -z "$due" ] || why=$(echo "$due" | tail -n 1 | tr '[:upper:]' '[:lower:]')
printf '{{"restarts": %d, "nodes": %d, "cpus": %d, "seconds": %d, "reason": "%s", "progress": %s}}\\n' \\
    "${{SLURM_RESTART_COUNT:-0}}" "${{SLURM_JOB_NUM_NODES:-1}}" "${{SLURM_CPUS_ON_NODE:-1}}" "$SECONDS" "$why" \\
    "$progress" >> "$ends"
[ "$code" -le 128 ] || [ "$again" != yes ] || scontrol requeue "$task"
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Resources that each task requests from Slurm; None and empty: the cluster's default."""

    partition: str | None = None
    account: str | None = None
    gpus: str | None = None
    """GPUs per node: 1, or h100:2"""
    nodes: int = 1
    """nodes per run"""
    time: str | None = None
    """time limit in Slurm's format: 30, 4:00:00, 1-12"""
    extra: tuple[str, ...] = ()
    """more sbatch options: key=value, or key"""

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid option."""
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,+-]+", value):
                raise ValueError(f"--{name} {value!r} must be a Slurm name: letters, digits, '_', '-', '.'")
        if self.gpus is not None and not re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,2}", self.gpus):
            raise ValueError(f"--gpus {self.gpus!r} with --on slurm must be the GPUs per task: 1, or h100:2")
        if self.time is not None and not parse_time(self.time):
            raise ValueError(f"--time {self.time!r} must be more than 0; leave it out for the partition's own limit")
        for option in self.extra:
            key, _, value = option.partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or re.search(r"[\x00-\x1f\"\\]", value):
                raise ValueError(f"--sbatch {option!r} must be KEY=VALUE with a long option of sbatch, such as qos=low")
            if key in OWN_KEYS:
                raise ValueError(f"--sbatch {key} is set by the script; use the option of sweep, or edit the script")

    @property
    def seconds(self) -> int | None:
        return parse_time(self.time) if self.time else None

    @property
    def gpu_count(self) -> int:
        return int(self.gpus.rpartition(":")[2]) if self.gpus else 0

    @property
    def warning_seconds(self) -> int:
        """How long before the limit Slurm warns a task."""
        return min(WARNING_SECONDS, self.seconds // 4) if self.seconds else WARNING_SECONDS

    @property
    def longer_time_advice(self) -> str:
        """Advice if a start of a task makes no progress."""
        seconds = self.seconds
        return "give a longer --time" if seconds is None else time_advice(2 * (seconds - self.warning_seconds))

    def options(self) -> dict[str, str | None]:
        """The sbatch options for the resources of a task or a probe."""
        resources = {"partition": self.partition, "account": self.account, "gpus-per-node": self.gpus}
        options: dict[str, str | None] = {key: value for key, value in resources.items() if value is not None}
        if self.nodes > 1:
            options |= {"nodes": str(self.nodes), "ntasks-per-node": "1"}
        for option in self.extra:
            key, equals, value = option.partition("=")
            options[key] = value if equals else None
        return options


def parse_time(text: str) -> int:
    """Seconds of a time in Slurm's format: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError."""
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text)
    if match is None:
        raise ValueError(f"--time {text!r} must be minutes or in Slurm's format: 30, 4:00:00, 1-12:00:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def time_advice(seconds: float) -> str:
    """'give --time at least 10': the minutes that leave a task this many seconds before Slurm warns it."""
    minutes = math.ceil(min(seconds / 0.75, seconds + WARNING_SECONDS) / 60)
    return (
        f"give --time at least {minutes}"
        if minutes < 60
        else f"give --time at least {minutes // 60}:{minutes % 60:02}:00"
    )


def check_folder(results: Path) -> None:
    """Raises ValueError for a path that is not allowed in a batch script's header."""
    if re.search(r"[\x00-\x1f\"'\\%]", str(results.resolve())):
        raise ValueError(f"--out {str(results)!r}: Slurm allows no quotes, '%' or '\\' in file names; choose another")


def work_command(python: str, results: Path, arguments: Sequence[str]) -> str:
    """The command of a task, on Slurm or another cluster engine."""
    words = [python, "-m", "sparsedepth.cli.main", "work", str(results.resolve()), "--leave-when-idle", *arguments]
    return " ".join(shlex.quote(word) for word in words)


def array_script(*, name: str, results: Path, request: Request, tasks: int, command: str) -> str:
    """A Slurm script for an array of `tasks` jobs, each of which starts `command` and asks to be requeued in time."""
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
        f"# {name}: written by `sparsedepth sweep --on slurm`, which submits an edited script unchanged and rewrites a",
        "# deleted one.",
        *header({**own, **request.options()}),
        "",
    ]
    return "\n".join(head) + "\n" + script_body(results, request, command)


def script_body(results: Path, request: Request, command: str) -> str:
    return BODY.format(
        command=command,
        results=shlex.quote(str(results.resolve())),
        folder=shlex.quote(str(results.resolve() / FOLDER)),
        warning=request.warning_seconds,
        max_kills=MAX_KILLS,
        starts=MAX_STARTS,
        others=MAX_STARTS - 1,
        advice=request.longer_time_advice,
    )


def header(options: dict[str, str | None]) -> list[str]:
    return [f"#SBATCH --{key}" + (f"={value}" if value is not None else "") for key, value in options.items()]


def cpus_of(request: Request) -> int:
    """Cores per task, by default one."""
    value = request.options().get("cpus-per-task") or "1"
    return int(value) if value.isdigit() else 1
