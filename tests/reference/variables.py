"""Every environment variable that ddplaunch reads or sets, in one list that test_reference.py checks.

Those of clusters are not in it: the page takes them from the functions and rows of ``clusters/systems/``.
Neither are torchrun's PET_*, of which there is one for each of its options.
"""

from __future__ import annotations

OF_DDPLAUNCH = {
    "DDPLAUNCH_TOKEN": "read: `--token`, kept out of `ps`; no rank has it",
    "DDPLAUNCH_LOG_JSON": "read: `1` is `--log-json`",
    "DDPLAUNCH_PREFIX": "read: `--prefix`",
    "DDPLAUNCH_WARM": "read: `1` is `--warm`, `0` is `--no-warm`",
    "DDPLAUNCH_NNODES": "read in a pod of an indexed Job, where `ddplaunch manifest` sets it: `--nnodes`; "
    "[`doctor bisect`](doctor.md#which-host-is-it) sets it for its command",
    "DDPLAUNCH_HOSTS": "set in a job of Grid Engine, PBS or LSF that `submit` has written, and by `doctor bisect` for "
    "its command: the hosts, node 0's first",
    "DDPLAUNCH_NODE_RANK": "set by such a job for each launcher: `--node-rank`",
    "DDPLAUNCH_OVER_SSH": "set for launchers that `--hosts` starts, which come at the same time; no rank has it",
    "DDPLAUNCH_EXIT_FILE": "read: [the file](elastic.md#in-a-batch-script-of-your-own) in which node 0 leaves the exit "
    "code for the batch script; no rank has it",
    "DDPLAUNCH_REQUEUE_FILE": "read, where `submit --requeue` sets it outside Slurm: the mark to leave when the job "
    "made room; no rank has it",
    "DDPLAUNCH_DEVICE": "set for each rank: its device, like `cuda:1`, as `runtime.device()` gives it",
    "DDPLAUNCH_PREEMPTED_FILE": "set for each rank: a path; once there is a file, the job must make room",
    "DDPLAUNCH_TERMINAL": "set for each rank, to `1`, where the launcher writes to a terminal",
    "_DDPLAUNCH_COMPLETE": "read: click's, for [completion](start.md#completion) in a shell",
}

OF_RANKS = {
    "RANK": "the rank, among all of the job; roles do not count",
    "ROLE_RANK": "likewise",
    "LOCAL_RANK": "among those of its node; always 0 with `--virtual-local-rank`",
    "WORLD_SIZE": "how many ranks the job has",
    "ROLE_WORLD_SIZE": "likewise",
    "LOCAL_WORLD_SIZE": "how many its node has",
    "GROUP_RANK": "its node's rank",
    "NODE_RANK": "likewise",
    "GROUP_WORLD_SIZE": "how many nodes",
    "ROLE_NAME": "`--role`",
    "MASTER_ADDR": "where torch's store listens; on several nodes a literal address",
    "MASTER_PORT": "its port",
    "OMP_NUM_THREADS": "[CPUs over local ranks](devices.md#cpus), unless set",
    "TORCHELASTIC_RUN_ID": "`--run-id`, or the time and a few random digits",
    "TORCHELASTIC_RESTART_COUNT": "the attempt, 0 the first time",
    "TORCHELASTIC_MAX_RESTARTS": "`--max-restarts`",
    "TORCHELASTIC_USE_AGENT_STORE": "`True`: [the store](how-it-works.md#on-one-node) is a process of its own; "
    "`False`: rank 0 opens it",
    "TORCHELASTIC_ERROR_FILE": "where an exception is recorded, for the report; set when the rank starts",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "`1`, unless set",
}
"""What each rank gets, beside what it inherits and DDPLAUNCH_*."""

SOMETIMES = {
    "GLOO_SOCKET_IFNAME": "several nodes, unless set: the interface of the way to node 0",
    "NCCL_SOCKET_IFNAME": "with `--interface`, unless set",
    "RES_OPTIONS": "several nodes, where no name server answers: `timeout:1 attempts:1`",
    "CUDA_VISIBLE_DEVICES": "with `--gpus`, `--virtual-local-rank`, or where it named GPUs by UUID or in another order",
    "HIP_VISIBLE_DEVICES": "likewise, with ROCm",
    "ZE_AFFINITY_MASK": "likewise, with Intel's",
    "CUDA_DEVICE_ORDER": "`PCI_BUS_ID` beside a CUDA_VISIBLE_DEVICES of ours",
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "`1` beside a ZE_AFFINITY_MASK of ours",
}
"""What a rank gets in some jobs only."""

READ = {
    "COMP_WORDS": "words that bash completes",
    "COMP_CWORD": "which of those words is being typed",
    "MASTER_ADDR": "`--master-addr`, several nodes, where that is not typed",
    "MASTER_PORT": "`--master-port`, likewise",
    "NODE_RANK": "`--node-rank`, likewise",
    "OMP_NUM_THREADS": "passed on",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "passed on",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are ([devices](devices.md))",
    "HIP_VISIBLE_DEVICES": "likewise",
    "ROCR_VISIBLE_DEVICES": "likewise",
    "ZE_AFFINITY_MASK": "likewise",
    "ONEAPI_DEVICE_SELECTOR": "likewise",
    "ZE_FLAT_DEVICE_HIERARCHY": "what Intel's indices count: tiles or cards",
    "CUDA_DEVICE_ORDER": "what NVIDIA's indices count",
    "SLURM_GPUS_ON_NODE": "GPUs were given, so [they must work](devices.md#gpus-that-do-not-work)",
    "SM_NUM_GPUS": "likewise",
    "SKYPILOT_NUM_GPUS_PER_NODE": "likewise",
    "MLP_WORKER_GPU": "likewise",
    "NVIDIA_VISIBLE_DEVICES": "likewise, where it names GPUs, as in a pod of Kubernetes",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "`0`: packages of the group `torch.backends` do not bar torch's preloading",
    "PATH": "where programs are looked for",
    "TMPDIR": "where the folder of error files is made; else `/tmp`, else `/dev/shm`",
    "XDG_CONFIG_HOME": "where `ddplaunch.toml` is; else `~/.config`",
    "XDG_STATE_HOME": "where runs are kept, in `ddplaunch/runs`; else `~/.local/state`",
    "XDG_CACHE_HOME": "where accelerate keeps its defaults, which warm runs compare; else `~/.cache`",
    "HOME": "what `~` is in these three",
    "XDG_RUNTIME_DIR": "where a running job has its socket, in `ddplaunch`; else `/tmp/ddplaunch-UID`",
    "PYTHONUNBUFFERED": "ranks write each print at once, without a buffer",
    "VIRTUAL_ENV": "named in the report where a module is missing and it is another environment than the ranks'",
    "CONDA_PREFIX": "the same",
    "NO_COLOR": "no colours",
    "TERM": "`dumb` has no colours",
    "LD_LIBRARY_PATH": "passed on over SSH",
    "PYTHONPATH": "likewise",
    "JE_ARROW_MALLOC_CONF": "see [what a rank sees](fidelity.md#with---start-zygote)",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "torchrun's: `--grace`",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "torchrun's: `--prefix`",
    "SSH_CONNECTION": "`--tensorboard` says how to reach it from another machine",
    "SUBMITIT_PREEMPT_SIGNAL": "submitit's warning, in its `Task`",
}
"""What the launcher reads, beside the clusters' variables and PET_*."""

NO_VARIABLES = {
    *("DEFAULT_MAP", "F_SETPIPE_SZ", "PCI_BUS_ID", "BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY", "NO_LOG"),
    *(
        "TYPE_CHECKING",
        "CLOCK_BOOTTIME",
        "LOAD_ATTR",  # instructions of Python
        "LOAD_METHOD",
        "SC_CLK_TCK",
        "SC_PAGE_SIZE",
        "SC_OPEN_MAX",
        "USER_SITE",
        "SESSION_ID",
        "TOKENIZERS_PARALLELISM",
        "IPC_LOCK",
        "LSB_DJOB_HOSTFILE",  # the script of a job reads it
    ),
    *("GLOO_", "NCCL_", "TORCH_", "PET_", "SLURM_", "SRUN_", "SSH_", "DDPLAUNCH_"),
    *("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"),  # of an outer job's, left for sbatch
    *("INVALID_DEPEND", "STAGE_OUT", "ARRAY_TASKS"),  # what sbatch sends mail on
    *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"),
}
"""What looks like one in the source: other names, and beginnings of names."""
