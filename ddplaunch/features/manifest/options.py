"""The options of ``ddplaunch manifest`` that ``run`` does not have, by heading."""

from __future__ import annotations

import click

from ddplaunch.features.manifest import values as read
from ddplaunch.features.manifest.kubeflow_jobs import RUNTIME
from ddplaunch.features.manifest.pod_job import JOB, JOBSET, PULL_POLICIES, PYTORCHJOB, SCHEDULERS, TRAINJOB
from ddplaunch.features.submit import batch_command
from ddplaunch.features.submit.batch_command import CONFIG, CPUS, JOB_NAME, TIME_HELP, option, pattern_reader

ELASTIC = ("--spares", "--join-window", "--max-membership-changes", "--grow")
"""Options of ``run`` for elastic jobs."""

REFUSED = {
    **{name: hint for name, hint in batch_command.REFUSED_RUN_OPTIONS.items() if name not in ("--env", *ELASTIC)},
    **dict.fromkeys(("--nnodes", "--standalone"), "--nodes N says how many, or --nodes 2:4"),
    "--exclude": "--constraint kubernetes.io/hostname!=NODE, one node or several with | between them",
    "--token": "--env-secret DDPLAUNCH_TOKEN=SECRET:KEY, a secret of the namespace",
    "--json": "leave it out: the output is YAML",
}
"""Options that ``manifest`` does not support, with hints what to use instead."""

HEADINGS = {
    "Resources": (
        click.Option(["-N", "--nodes"], metavar="N", help="Number of nodes, or a range like 2:4.",
                     callback=read.read_node_range, default="1", show_default=True),
        option("--gpus-per-node", "N", "Number of GPUs on each node. --nproc defaults to it.",
               read.read_gpus),
        CPUS,
        option("--mem memory", "SIZE", "Memory on each node, like 200G; 0 for no limit.", read.size_option),
        option("--shm-size shm", "SIZE", "Size of /dev/shm, like 64G.  [default: all memory of the pod]",
               read.size_option),
        option("--resource resources", "NAME=N", "Other resource of each node, like rdma/hca=8", read.read_resources,
               multiple=True),
        option("--request requests", "NAME=N", "Request below the limit, like cpu=32 or memory=500G",
               read.read_resource_requests, multiple=True),
        option("-t --time", "TIME", TIME_HELP, read.time_limit),
    ),
    "Which nodes": (
        option("--constraint", "LIST", "Required labels of the nodes: KEY=VALUE,…; also KEY=A|B and KEY!=VALUE.",
               read.read_constraints),
        option("--toleration tolerations", "TAINT",
               "Tolerated taint: KEY[=VALUE][:EFFECT], like nvidia.com/gpu", read.tolerations,
               multiple=True),
        option("--spread", "KEY",
               "Spread the pods over the values of this label, like topology.kubernetes.io/zone",
               read.label_keys, multiple=True),
        option("--anti-affinity anti_affinity_labels", "KEY",
               "Never place two pods where this label is equal, like kubernetes.io/hostname",
               read.label_keys, multiple=True),
        click.Option(["--host-network"], is_flag=True, help="Use the host network, as some RDMA networks require."),
        option("--priority-class", "NAME", "Priority class of the pods.", read.name_reader("a priority class")),
        option("--gang", "NAME",
               "Gang scheduler, which starts all pods or none: volcano or coscheduling.",
               pattern_reader("|".join(SCHEDULERS), " or ".join(SCHEDULERS), str.lower)),
        option("--scheduler-name scheduler", "NAME", "Scheduler of the pods.  [default: that of --gang]",
               read.name_reader("a scheduler")),
    ),
    "For Kubernetes": (
        option("--namespace", "NAME", "Namespace of the job.  [default: kubectl's]",
               pattern_reader(r"(?-i:[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)", "small letters, digits and dashes")),
        JOB_NAME,
        click.Option(["--unique-name"], is_flag=True, help="Append five random characters to the name."),
        click.Option(["--kind"], metavar="KIND", default=JOB, show_default=True,
                     help="Kind: job, jobset, or for Kubeflow trainjob (Trainer) or pytorchjob (Training Operator).",
                     callback=pattern_reader(f"{JOB}|{JOBSET}|{TRAINJOB}|{PYTORCHJOB}",
                                             "job, jobset, trainjob or pytorchjob", str.lower)),
        option("--runtime", "NAME", f"ClusterTrainingRuntime of a TrainJob.  [default: {RUNTIME}]",
               read.name_reader("a runtime")),
        option("--label labels", "KEY=VALUE",
               "Label of the job and its pods, like kueue.x-k8s.io/queue-name=NAME for a queue of Kueue",
               read.labels, multiple=True),
        option("--annotation annotations", "KEY=VALUE",
               "Annotation of the job and its pods, like k8s.v1.cni.cncf.io/networks=ib0",
               read.object_annotations, multiple=True),
        option("--backoff-limit retries", "N",
               "Restart all pods at most N times.  [default: as often as nodes are lost or preempted]",
               pattern_reader(r"\d{1,6}", "a number, like 3", int)),
        option("--ttl", "TIME", "Delete the job this long after its end: minutes, 4:00:00, or 1-0.", read.ttl_time),
        option("--service-account", "NAME", "Service account of the pods.", read.name_reader("a service account")),
        click.Option(["--restricted"], is_flag=True, help="Meet the restricted Pod Security Standard."),
        option("--run-as user", "UID[:GID]", "Numeric user and group of the pods.  [default: those of the image]",
               read.read_user),
        CONFIG,
    ),
    "Environment of the job": (
        option("--container-image image", "IMAGE", "Image of the pods. It must contain ddplaunch and the target.",
               pattern_reader(r"[a-z0-9][\w./:@-]*", "an image like nvcr.io/nvidia/pytorch:25.01-py3")),
        option("--program-image program_images", "NAME=IMAGE",
               "Image of the pods of a program with nodes of its own. It must contain ddplaunch too",
               pattern_reader(r"[A-Za-z][\w-]*=[a-z0-9][\w./:@-]*", "NAME=IMAGE, like infer=vllm/vllm-openai:v0.11"),
               multiple=True),
        option("--image-pull-policy pull", "WHEN",
               "When to pull the image: Always, IfNotPresent or Never.  [default: that of Kubernetes]",
               pattern_reader("|".join(PULL_POLICIES), "Always, IfNotPresent or Never",
                              lambda text: PULL_POLICIES[text.lower()])),
        option("--image-pull-secret pull_secrets", "NAME", "Secret for pulling the image",
               read.name_reader("a secret"), multiple=True),
        option("--container-mounts mounts", "LIST",
               "Mounts, SRC:DST,…; SRC: folder, PersistentVolumeClaim, configmap/NAME, secret/NAME or emptydir/SIZE",
               read.read_mounts, multiple=True),
        option("--env", "NAME[=VALUE]", "Environment variable of the pods; without VALUE as in this shell",
               read.read_variables, multiple=True),
        option("--env-secret secrets", "SECRET",
               "Variable from a secret, NAME=SECRET:KEY, or variables from all of its keys", read.read_secrets,
               multiple=True),
        option("--code", "DIR",
               "Run a copy of this folder, without what git ignores, in ConfigMaps: at most 8 MB.  [default: none]"),
    ),
    "Dry run and help": (
        click.Option(["--dry-run"], is_flag=True, help="Also print the source of each value, on stderr."),
    ),
}  # fmt: skip
"""Options by heading of the help."""
