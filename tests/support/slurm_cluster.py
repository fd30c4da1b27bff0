"""A real Slurm on this machine: one controller, and nodes that take each other for other machines.

Each node has a mount namespace of its own, in which the kernel's boot id is another one, so that a lease of another
node is judged by its beat as between real machines; and, where asked for, a clock that is off (libfaketime).
Needs Debian's slurmctld, slurmd and slurm-client, and root.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from support.sweep_processes import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo", "unshare")
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={port}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/controller.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/controller.log
SlurmdLogFile={place}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_res
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,default_queue_depth=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=20
SlurmdTimeout=15
MaxArraySize=1001
{nodes}
PartitionName=p Nodes={names} Default=YES MaxTime=7-0 PriorityTier=1 GraceTime=20 State=UP
PartitionName=urgent Nodes={names} MaxTime=60 PriorityTier=2 State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None where it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no Slurm here (Debian's slurmctld, slurmd, slurm-client): {', '.join(missing)} missing"
    if os.geteuid():
        return "the nodes' namespaces need root"
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "unshare --mount is not allowed here" if probe.returncode else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """A controller and nodes `n1`, `n2`, ..., each of `cpus` cores."""

    def __init__(self, place: Path, nodes: int = 3, cpus: int = 1):
        self.place, self.names = place, [f"n{number + 1}" for number in range(nodes)]
        self.configuration = place / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen] = {}
        self.held: set[str] = set()
        """requeued tasks whose start was brought forward already"""
        (place / "state").mkdir(parents=True)
        host = socket.gethostname()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cpus}"
            for name in self.names
        ]
        names = ",".join(self.names)
        text = CONFIGURATION.format(host=host, port=free_port(), place=place, nodes="\n".join(lines), names=names)
        self.configuration.write_text(text)
        self.environment = {"SLURM_CONF": str(self.configuration), "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}

    def start(self) -> None:
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        until(lambda: set(self.node_states().values()) == {"idle"}, 60)

    def start_controller(self) -> None:
        self._start("controller", ["slurmctld", "-D", "-f", str(self.configuration)])
        until(lambda: "UP" in self.call("scontrol", "ping", check=False), 60)

    def start_node(self, name: str, clock: float = 0.0, hidden: Path | None = None) -> None:
        """Start a node, with its clock off by `clock` seconds, or with a folder hidden that others see."""
        boot = self.place / f"{name}.boot"
        boot.write_text(str(uuid.uuid4()))
        steps = [f"mount --bind {boot} /proc/sys/kernel/random/boot_id"]
        if clock:
            preload, settings = self.place / f"{name}.preload", self.place / f"{name}.faketimerc"
            preload.write_text(f"{FAKETIME}\n")
            settings.write_text(f"{clock:+.0f}\n")
            for path, source in (("/etc/ld.so.preload", preload), ("/etc/faketimerc", settings)):
                Path(path).touch()
                steps.append(f"mount --bind {source} {path}")
        if hidden:
            steps.append(f"mount -t tmpfs tmpfs {hidden}")
        steps.append(f"exec slurmd -D -N {name} -f {self.configuration}")
        self._start(name, ["unshare", "--mount", "bash", "-c", " && ".join(steps)])

    def _start(self, name: str, command: list[str]) -> None:
        log = open(self.place / f"{name}.out", "ab")  # noqa: SIM115 - the daemon's, for as long as it lives
        environment = {**os.environ, **self.environment}
        self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        log.close()

    def kill(self, name: str) -> None:
        """kill -9 of one daemon, and of nothing that it has started."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--user", "root", check=False)
            deadline = time.monotonic() + 30
            while self.jobs() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes(self, mark: str = "", environment: str = "") -> list[int]:
        """The processes of this cluster's jobs, whose command line contains `mark`, and their environment that text."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in {daemon.pid for daemon in self.daemons.values()}:
                with contextlib.suppress(OSError):
                    given = (entry / "environ").read_bytes().decode(errors="replace")
                    command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                    ours = f"SLURM_CONF={self.configuration}" in given and "SLURM_JOB_ID=" in given
                    if ours and mark in command and environment in given:
                        found.append(int(entry.name))
        return found

    def call(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def node_states(self) -> dict[str, str]:
        lines = self.call("sinfo", "-h", "-N", "-p", "p", "-o", "%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def jobs(self, *options: str) -> dict[str, str]:
        """The jobs in the queue: the task's name (12_3) and its state."""
        lines = self.call("squeue", "-h", "-r", "-o", "%i %T", *options, check=False).splitlines()
        return dict(line.split() for line in lines)

    def work_of(self, node: str | None = None) -> list[int]:
        """The living `sparsedepth work` processes, of one node or of all."""
        return self.processes("cli.main work", f"SLURMD_NODENAME={node}\0" if node else "")

    def kill_node(self, name: str) -> None:
        """Everything on a node ends at once, as when its power is cut."""
        self.kill(name)
        for process in self.processes(environment=f"SLURMD_NODENAME={name}\0") + self._steps(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _steps(self, node: str) -> list[int]:
        """Slurm's own processes of the node's jobs: they share the node's namespace of mounts."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "comm").read_text().startswith("slurmstepd"):
                    mounts = (entry / "mountinfo").read_text()
                    if f"/{node}.boot " in mounts and str(self.place) in mounts:
                        found.append(int(entry.name))
        return found
