"""Every environment variable that ddplaunch reads or sets, in one list that test_reference.py checks.

Those of clusters are not in it: the page takes them from the functions and rows of ``clusters/systems/``.
Neither are torchrun's PET_*, of which there is one for each of its options.
"""

from __future__ import annotations

OF_DDPLAUNCH = {
    "DDPLAUNCH_TOKEN": "read: `--token`; no rank has it",
    "DDPLAUNCH_LOG_JSON": "read: `1` is `--log-json`",
    "DDPLAUNCH_PREFIX": "read: `--prefix`",
    "DDPLAUNCH_WARM": "read: `1` is `--warm`, `0` is `--no-warm`",
    "DDPLAUNCH_NNODES": "read in a pod of an indexed Job: `--nnodes`; set by `ddplaunch manifest` and "
    "[`doctor bisect`](doctor.md#which-host-is-it)",
    "DDPLAUNCH_HOSTS": "set by `submit` for Grid Engine, PBS and LSF, and by `doctor bisect`: the hosts, node 0's "
    "first",
    "DDPLAUNCH_NODE_RANK": "set by such a job: `--node-rank`",
    "DDPLAUNCH_OVER_SSH": "set for launchers that `--hosts` starts; no rank has it",
    "DDPLAUNCH_EXIT_FILE": "read: [the file](elastic.md#in-a-batch-script-of-your-own) for node 0's exit code; no rank "
    "has it",
    "DDPLAUNCH_REQUEUE_FILE": "set by `submit --requeue` outside Slurm: the file to make after a preemption; no rank "
    "has it",
    "DDPLAUNCH_DEVICE": "set for each rank: its device, like `cuda:1`",
    "DDPLAUNCH_PREEMPTED_FILE": "set for each rank: a path; a file there is the [preemption notice](preemption.md)",
    "DDPLAUNCH_TERMINAL": "set for each rank to `1`, if the launcher writes to a terminal",
    "_DDPLAUNCH_COMPLETE": "read: click's, for [completion](start.md#completion) in a shell",
}

OF_RANKS = {
    "RANK": "the rank, whatever its role",
    "ROLE_RANK": "likewise",
    "LOCAL_RANK": "the rank on its node; always 0 with `--virtual-local-rank`",
    "WORLD_SIZE": "number of ranks of the job",
    "ROLE_WORLD_SIZE": "likewise",
    "LOCAL_WORLD_SIZE": "number of ranks of its node",
    "GROUP_RANK": "its node's rank",
    "NODE_RANK": "likewise",
    "GROUP_WORLD_SIZE": "number of nodes",
    "ROLE_NAME": "`--role`",
    "MASTER_ADDR": "address of torch's store; on several nodes a literal one",
    "MASTER_PORT": "its port",
    "OMP_NUM_THREADS": "[CPUs over local ranks](devices.md#cpus), unless set",
    "TORCHELASTIC_RUN_ID": "`--run-id`, or the time and a few random digits",
    "TORCHELASTIC_RESTART_COUNT": "the attempt, 0 the first time",
    "TORCHELASTIC_MAX_RESTARTS": "`--max-restarts`",
    "TORCHELASTIC_USE_AGENT_STORE": "`True`: [the store](how-it-works.md#on-one-node) is a separate process; "
    "`False`: it is in rank 0",
    "TORCHELASTIC_ERROR_FILE": "file for an exception, for the report",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "`1`, unless set",
}
"""What each rank gets, beside what it inherits and DDPLAUNCH_*."""

SOMETIMES = {
    "GLOO_SOCKET_IFNAME": "several nodes, unless set: the interface that routes to node 0",
    "NCCL_SOCKET_IFNAME": "with `--interface`, unless set",
    "RES_OPTIONS": "several nodes, if no name server answers: `timeout:1 attempts:1`",
    "CUDA_VISIBLE_DEVICES": "with `--gpus`, `--virtual-local-rank`, or if it named GPUs by UUID or in another order",
    "HIP_VISIBLE_DEVICES": "likewise, with ROCm",
    "ZE_AFFINITY_MASK": "likewise, with Intel's",
    "CUDA_DEVICE_ORDER": "`PCI_BUS_ID`, if ddplaunch sets CUDA_VISIBLE_DEVICES",
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "`1`, if ddplaunch sets ZE_AFFINITY_MASK",
}
"""What a rank gets in some jobs only."""

READ = {
    "COMP_WORDS": "for completion in bash",
    "COMP_CWORD": "likewise",
    "MASTER_ADDR": "`--master-addr`, `--master-port`, `--node-rank` of several nodes, unless typed",
    "MASTER_PORT": "likewise",
    "NODE_RANK": "likewise",
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
    "NVIDIA_VISIBLE_DEVICES": "likewise, if it names GPUs, as in Kubernetes",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "`0`: packages of the group `torch.backends` do not prevent preloading",
    "PATH": "to find programs",
    "TMPDIR": "folder for error files; else `/tmp`, else `/dev/shm`",
    "XDG_CONFIG_HOME": "folder of `ddplaunch.toml`; else `~/.config`",
    "XDG_STATE_HOME": "folder of `ddplaunch/runs`; else `~/.local/state`",
    "XDG_CACHE_HOME": "folder of accelerate's defaults, which warm runs compare; else `~/.cache`",
    "HOME": "the `~` in these three",
    "XDG_RUNTIME_DIR": "folder of control sockets, in `ddplaunch`; else `/tmp/ddplaunch-UID`",
    "PYTHONUNBUFFERED": "ranks do not buffer output",
    "VIRTUAL_ENV": "for the report: a module is missing, and the ranks are in another environment",
    "CONDA_PREFIX": "likewise",
    "NO_COLOR": "no colours",
    "TERM": "`dumb` has no colours",
    "LD_LIBRARY_PATH": "passed on over SSH",
    "PYTHONPATH": "likewise",
    "JE_ARROW_MALLOC_CONF": "see [what a rank sees](fidelity.md#with---start-zygote)",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "torchrun's: `--grace`",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "torchrun's: `--prefix`",
    "SSH_CONNECTION": "`--tensorboard` shows how to reach it from another machine",
    "SUBMITIT_PREEMPT_SIGNAL": "submitit's preemption notice",
}
"""What the launcher reads, beside the clusters' variables and PET_*."""

NO_VARIABLES = {
    *("DEFAULT_MAP", "F_SETPIPE_SZ", "PCI_BUS_ID", "BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY", "NO_LOG", "HIDES_FRAMES"),
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
        "FROM_NODE",  # tables of messages
        "FROM_NODE_ZERO",
        "IPC_LOCK",
        "LSB_DJOB_HOSTFILE",  # the script of a job reads it
    ),
    *("GLOO_", "NCCL_", "TORCH_", "PET_", "SLURM_", "SRUN_", "SSH_", "DDPLAUNCH_"),
    *("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"),  # of an outer job's, left for sbatch
    *("INVALID_DEPEND", "STAGE_OUT", "ARRAY_TASKS"),  # what sbatch sends mail on
    *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"),
}
"""What looks like one in the source: other names, and beginnings of names."""
