"""The configuration of a test's Slurm: short intervals, and hardware that does not exist."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

FOLDER = "/dev/shm/slurm"
"""Where each host has its part of Slurm: in memory of its own."""

GRACE = 3
"""Seconds from the signal of a preemption to the kill, at least: Slurm looks only every 10 s whether they are over."""

_SLURM_CONF = """
ClusterName=test
SlurmctldHost={controller}
MailProg=/bin/true
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdLogFile={folder}/slurmd.log
# No cluster has the job ids of another, so whatever the jobs of an earlier one wrote is never taken for theirs.
FirstJobId={first_job}

# A requeued job starts again when its old credential has expired: after 120 s by default, and if this were below 5.
AuthInfo=socket={folder}/munge.socket,cred_expire=5

# Neither control groups nor systemd. Processes that left their session and their parent outlive a job so.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
InactiveLimit=0
MinJobAge=3600
# From SIGTERM to SIGKILL; some ways of ending a job take at least 5.
KillWait=2
CompleteWait=0
UnkillableStepTimeout=30
TCPTimeout=2
MessageTimeout=8
SlurmctldTimeout=30
# A silent node is down, and its jobs are requeued, after this and two timeouts of messages; the default is 300.
SlurmdTimeout=8
ReturnToService=2

JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A preempted job gets the signal that it asked for by --signal, instead of SIGTERM.
SlurmctldParameters=preempt_send_user_signal

SlurmdParameters=config_overrides
{gres_types}
NodeName={nodes} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 {gres}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def slurm_conf(controller: str, nodes: Sequence[str], cpus: int, gpus: int, settings: Mapping[str, str]) -> str:
    """The slurm.conf of a cluster. A key that this version does not know is fatal to all of its programs."""
    text = _SLURM_CONF.format(
        controller=controller,
        nodes=",".join(nodes),
        folder=FOLDER,
        grace=GRACE,
        first_job=random.randrange(1000, 60000),
        cpus=cpus,
        gres_types="GresTypes=gpu" if gpus else "",
        gres=f"Gres=gpu:{gpus}" if gpus else "",
    ).lstrip()
    lines = [line for line in text.splitlines() if line.partition("=")[0] not in settings]
    return "\n".join([*lines, *(f"{name}={value}" for name, value in settings.items()), ""])


def gres_conf(gpus: int) -> str:
    """The gres.conf: GPUs have to be device nodes, or jobs get no CUDA_VISIBLE_DEVICES. No program opens them."""
    return "AutoDetect=off\n" + (f"Name=gpu File={FOLDER}/gpu[0-{gpus - 1}]\n" if gpus else "")


def set_up(conf: str, gpus: int, key: str) -> str:
    """A shell script that gives a host its part of Slurm, with a munge that answers when the script ends."""
    return f"""set -eu
umask 022
mkdir {FOLDER} {FOLDER}/state {FOLDER}/spool
cd {FOLDER}
cat >slurm.conf <<'END'
{conf}END
cat >gres.conf <<'END'
{gres_conf(gpus)}END
for gpu in $(seq 0 {gpus - 1}); do mknod gpu$gpu c 195 $gpu; done
(umask 077; echo {key} >munge.key)
munged --force --key-file={FOLDER}/munge.key --socket={FOLDER}/munge.socket --pid-file={FOLDER}/munged.pid \\
    --log-file={FOLDER}/munged.log --seed-file={FOLDER}/munge.seed --num-threads=2
"""
