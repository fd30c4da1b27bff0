"""The batch script of a sweep on Slurm: an array whose tasks take runs until none waits.

What a task does when Slurm asks it to leave:

    USR1, USR2   the time limit is near        checkpoint, give the lease back, queue the task again; Slurm may warn
                                               a minute early: the task then goes on for that long
    TERM         preempted or cancelled        the same, unless Slurm was told to end the job, or to queue it
    INT          `sparsedepth stop`            the same, and the task ends
    killed (137)                               the task is queued again, at most MAX_KILLS times

A start without progress has completed no run, and written no checkpoint, by the time limit: starting takes longer than
the limit allows. After MAX_STARTS of those in a row the task is not queued again, and says what limit to give.

`sbatch` gets the environment of whoever submits, and with it SPARSEDEPTH_STORAGE: no script holds a password.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WARNING_SECONDS = 120
"""How long before its time limit a task is told to leave; of a short limit a quarter."""

MAX_KILLS = 20
"""How often a task that was killed is queued again."""

MAX_STARTS = 3
"""How often in a row a task may reach its time limit before it has made any progress."""

START_SECONDS = 20
"""Assumed of a task, from its start to the first step of a run."""

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
ends={folder}/$task.jsonl
said=$(stat -c %s "$log" 2>/dev/null)
start={folder}/.$task.start  # what is newer was made by this start
touch "$start"
again= why= alarm=
leave() {{ [ "$again" = no ] || again=$1; why=${{why:-$2}}; kill -TERM "$work" 2>/dev/null; }}
left() {{  # seconds to the time limit
    local text=$(timeout 10 squeue --noheader --format=%L --jobs="$task")
    [[ $text =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return
    local part=("${{BASH_REMATCH[@]}}")
    echo $((((10#${{part[2]:-0}} * 24 + 10#${{part[4]:-0}}) * 60 + 10#${{part[5]}}) * 60 + 10#${{part[6]}}))
}}
warned() {{  # Slurm may warn up to a minute before it should
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
        echo "sparsedepth: error: the time limit came {starts} times in a row before any progress; {advice}" >&2
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
# For `sparsedepth status`: why this start of the task ended (Slurm writes its reason into the log), and what it used.
due=$(tail -c "+$((${{said:-0}} + 1))" "$log" 2>/dev/null | sed -n 's/.* DUE TO \\([A-Z ]*\\) \\*\\*\\*$/\\1/p')
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
        if self.time is not None and not parse_time(self.time):
            raise ValueError(f"--time {self.time!r} must be more than 0; leave it out for the partition's own limit")
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

    @property
    def longer(self) -> str:
        """What to ask for where a start of a task makes no progress."""
        seconds = self.seconds
        return "give a longer --time" if seconds is None else advice(2 * (seconds - self.warning_seconds))

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


def advice(seconds: float) -> str:
    """'give --time at least 10': the least full minutes that leave a task so many seconds before it is told to go."""
    minutes = math.ceil(min(seconds / 0.75, seconds + WARNING_SECONDS) / 60)
    return (
        f"give --time at least {minutes}"
        if minutes < 60
        else f"give --time at least {minutes // 60}:{minutes % 60:02}:00"
    )


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
    return "\n".join(head) + "\n" + script_body(results, request, command)


def script_body(results: Path, request: Request, command: str) -> str:
    """What the script does, below its header."""
    return BODY.format(
        command=command,
        results=shlex.quote(str(results.resolve())),
        folder=shlex.quote(str(results.resolve() / FOLDER)),
        warning=request.warning_seconds,
        max_kills=MAX_KILLS,
        starts=MAX_STARTS,
        others=MAX_STARTS - 1,
        advice=request.longer,
    )


def header(options: dict[str, str | None]) -> list[str]:
    """The options of sbatch as lines of a script."""
    return [f"#SBATCH --{key}" + (f"={value}" if value is not None else "") for key, value in options.items()]


def cpus_of(request: Request) -> int:
    """The cores of a task: one where no option says more."""
    value = request.options().get("cpus-per-task") or "1"
    return int(value) if value.isdigit() else 1
