"""The options of ``ddplaunch manifest`` that ``run`` does not have, by heading."""

from __future__ import annotations

import click

from ddplaunch.cli import batch_command
from ddplaunch.cli.batch_command import CONFIG, CPUS, JOB_NAME, TIME_HELP, option, pattern_reader
from ddplaunch.commands.manifest import values as read
from ddplaunch.commands.manifest.pod_job import JOB, JOBSET, PULL_POLICIES, PYTORCHJOB, SCHEDULERS, TRAINJOB
from ddplaunch.commands.manifest.train_job import RUNTIME

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
                     callback=read.node_range, default="1", show_default=True),
        option("--gpus-per-node", "N", "GPUs on each node. Each gets a rank, unless --nproc says otherwise.",
               read.gpus),
        CPUS,
        option("--mem memory", "SIZE", "Memory on each node, like 200G; 0 sets no limit.", read.size_option),
        option("--shm-size shm", "SIZE", "Size of /dev/shm, like 64G.  [default: all memory of the pod]",
               read.size_option),
        option("--resource resources", "NAME=N", "Another resource of each node, like rdma/hca=8", read.resources,
               multiple=True),
        option("--request requests", "NAME=N", "Request less than the limit: cpu=32, memory=500G", read.requests,
               multiple=True),
        option("-t --time", "TIME", TIME_HELP, read.time_limit),
    ),
    "Which nodes": (
        option("--constraint", "LIST", "Labels that the nodes must have: KEY=VALUE,…; also KEY=A|B, and KEY!=VALUE.",
               read.constraints),
        option("--toleration tolerations", "TAINT",
               "Use nodes with this taint too: KEY[=VALUE][:EFFECT], like nvidia.com/gpu", read.tolerations,
               multiple=True),
        option("--spread", "KEY",
               "Spread the pods evenly over the values of this label, like topology.kubernetes.io/zone",
               read.label_keys, multiple=True),
        option("--anti-affinity anti_affinity_labels", "KEY",
               "No two pods where this label is alike, like kubernetes.io/hostname",
               read.label_keys, multiple=True),
        click.Option(["--host-network"], is_flag=True, help="Use the nodes' own network, as some RDMA networks need."),
        option("--priority-class", "NAME", "Priority class of the pods.", read.names("a priority class")),
        option("--gang", "NAME", "Start all pods or none, by volcano or coscheduling; with Kueue, use --label.",
               pattern_reader("|".join(SCHEDULERS), " or ".join(SCHEDULERS), str.lower)),
        option("--scheduler-name scheduler", "NAME", "Scheduler of the pods.  [default: --gang's]",
               read.names("a scheduler")),
    ),
    "For Kubernetes": (
        option("--namespace", "NAME", "Namespace of the job.  [default: kubectl's]",
               pattern_reader(r"(?-i:[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)", "small letters, digits and dashes")),
        JOB_NAME,
        click.Option(["--unique-name"], is_flag=True, help="Append five random characters to the name."),
        click.Option(["--kind"], metavar="KIND", default=JOB, show_default=True,
                     help="job, jobset, or for Kubeflow trainjob (Trainer) or pytorchjob (Training Operator).",
                     callback=pattern_reader(f"{JOB}|{JOBSET}|{TRAINJOB}|{PYTORCHJOB}",
                                             "job, jobset, trainjob or pytorchjob", str.lower)),
        option("--runtime", "NAME", f"ClusterTrainingRuntime of a TrainJob.  [default: {RUNTIME}]",
               read.names("a runtime")),
        option("--label labels", "KEY=VALUE",
               "A label for the job and its pods, like team=vision; kueue.x-k8s.io/queue-name=NAME is a queue of Kueue",
               read.labels, multiple=True),
        option("--annotation annotations", "KEY=VALUE",
               "An annotation for the job and its pods, like k8s.v1.cni.cncf.io/networks=ib0",
               read.object_annotations, multiple=True),
        option("--backoff-limit retries", "N",
               "How often all pods may be started again.  [default: as often as nodes are lost or preempted]",
               pattern_reader(r"\d{1,6}", "a number, like 3", int)),
        option("--ttl", "TIME", "Delete the job this long after its end: minutes, 4:00:00, or 1-0.", read.ttl_time),
        option("--service-account", "NAME", "Service account of the pods.", read.names("a service account")),
        click.Option(["--restricted"], is_flag=True, help="Meet the Pod Security Standard of that name: "
                     "no root, no capabilities; /tmp is an empty folder."),
        option("--run-as user", "UID[:GID]", "User and group of the pods, by number.  [default: the image's]",
               read.user),
        option("--patch patches", "FILE", "Merge this YAML into the job", read.patches, multiple=True, path=True),
        CONFIG,
    ),
    "Environment of the job": (
        option("--container-image image", "IMAGE", "Image of the pods; it must have ddplaunch and the target.",
               pattern_reader(r"[a-z0-9][\w./:@-]*", "an image like nvcr.io/nvidia/pytorch:25.01-py3")),
        option("--image-pull-policy pull", "WHEN",
               "When the image is pulled: Always, IfNotPresent or Never.  [default: Kubernetes']",
               pattern_reader("|".join(PULL_POLICIES), "Always, IfNotPresent or Never",
                              lambda text: PULL_POLICIES[text.lower()])),
        option("--image-pull-secret pull_secrets", "NAME", "Secret with which the image is pulled",
               read.names("a secret"), multiple=True),
        option("--container-mounts mounts", "LIST",
               "SRC:DST,… to mount; SRC is a folder of the node, a PersistentVolumeClaim, configmap/NAME, secret/NAME, "
               "emptydir/SIZE",
               read.mounts, multiple=True),
        option("--env", "NAME[=VALUE]", "A variable for the pods; without a value, the value in this shell",
               read.variables, multiple=True),
        option("--env-secret secrets", "SECRET",
               "A variable from a key of a secret, NAME=SECRET:KEY; or all of a secret's keys", read.secrets,
               multiple=True),
    ),
    "Dry run and help": (
        click.Option(["--dry-run"], is_flag=True, help="Print also the source of each value, on stderr."),
    ),
}  # fmt: skip
"""Options by heading of the help."""
