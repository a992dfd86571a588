"""``ddplaunch submit --scheduler kubernetes``: what was typed, read as Kubernetes has it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ddplaunch.cli.submit_options import seconds, where
from ddplaunch.cli.surroundings import TOKEN, check_token
from ddplaunch.errors import UsageError
from ddplaunch.submit.kubernetes import NAME, OWN_VARIABLES, Mount, Request, longest_name, name_from

_SHORT = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"([a-z0-9][a-z0-9.-]{{0,252}}/)?{_SHORT}"
_LABEL = re.compile(rf"(?P<key>{_KEY})=(?P<value>({_SHORT})?)", re.ASCII)
"""A label, as in "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3" (Labels and Selectors in Kubernetes' manual)."""

_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII | re.IGNORECASE)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_.-][\w.-]*", re.ASCII)


def request(target: str, command: Sequence[str], flags: dict[str, Any]) -> Request:
    """Read the options for Kubernetes.

    Raises:
        UsageError: one makes no sense there, or the image is missing.
    """
    return Request(
        command=command,
        name=_name(target, flags),
        image=_image(flags["container_image"]),
        nodes=flags["nodes"],
        gpus=_gpus(flags["gpus_per_node"]),
        cpus=flags["cpus_per_task"],
        memory=_memory(flags["mem"]),
        seconds=seconds(flags["time"] or "UNLIMITED") or None,
        grace=flags["grace"],
        preempt_grace=flags["preempt_grace"] if flags["preempt_signal"] == signal.SIGTERM else 0.0,
        namespace=_namespace(flags["namespace"]),
        labels=dict(_labels("labels", flags["labels"])),
        node_labels=dict(_labels("constraint", (flags["constraint"] or "").split(","))) if flags["constraint"] else {},
        variables=dict(_variables(flags["env"])),
        mounts=_mounts(flags["container_mounts"]),
    )


def _refused(name: str, what: str, hint: str) -> UsageError:
    """Say what is wrong with an option, by click's name of it, and where its value stands if nobody typed it."""
    context = click.get_current_context()
    param = next(param for param in context.command.params if param.name == name)
    return UsageError(f"{param.opts[-1]} {what}{where(context, param)}", hint)


def _name(target: str, flags: dict[str, Any]) -> str:
    asked, nodes = flags["job_name"], flags["nodes"]
    if asked is None:
        return name_from(target, nodes)
    if not NAME.fullmatch(asked) or len(asked) > longest_name(nodes):
        rule = f"small letters, digits and dashes, at most {longest_name(nodes)}, the first a letter"
        raise _refused("job_name", f"{asked} is no name in Kubernetes: {rule}", f"--job-name {name_from(asked, nodes)}")
    return str(asked)


def _namespace(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise _refused("namespace", f"{text} is no name of one", "small letters, digits and dashes: kubectl get ns")
    return text


def _image(text: str | None) -> str:
    if text is None:
        raise UsageError(
            "a pod runs in an image, and --container-image is missing",
            "--container-image REGISTRY/NAME:TAG, of one that has ddplaunch and the target",
        )
    if not _IMAGE.fullmatch(text):
        raise _refused("container_image", f"{text} is no image", "give one like nvcr.io/nvidia/pytorch:25.01-py3")
    return text


def _gpus(text: str | None) -> int:
    kind, _, number = (text or "0").rpartition(":")
    if kind:
        raise _refused(
            "gpus_per_node",
            f"{text}: Kubernetes counts GPUs, whatever they are",
            f"--gpus-per-node {number} --constraint nvidia.com/gpu.product=NAME, a label of the nodes with such",
        )
    return int(number)


def _memory(text: str | None) -> str | None:
    """Slurm's units are powers of 1024, and without one it is M; 0 is as much as there is."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)B?", text or "0", re.IGNORECASE).groups()  # type: ignore[union-attr]
    return f"{int(number)}{(unit or 'M').upper()}i" if int(number) else None


def _labels(name: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        found = _LABEL.fullmatch(text)
        if found is None:
            example = "team=vision" if name == "labels" else "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"
            raise _refused(name, f"{text} is no label", f"give KEY=VALUE, like {example}")
        yield found["key"], found["value"]


def _variables(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Read --env: NAME=VALUE, or NAME for this shell's value."""
    for text in texts:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise _refused(
                "env", f"{text} names no variable", "give NAME=VALUE, or NAME for the value that it has here"
            )
        if name in OWN_VARIABLES:
            raise _refused("env", f"{text}: {name} tells a pod its place, and is set already", "leave it out")
        if not equals and name not in os.environ:
            raise _refused("env", f"{name}: it is not set here", f"--env {name}=VALUE")
        value = value if equals else os.environ[name]
        if name == TOKEN:
            check_token(value, f"--env {TOKEN}")
        yield name, value


def _mounts(texts: Sequence[str]) -> tuple[Mount, ...]:
    paths = {"/dev/shm": "ddplaunch's own"}
    mounts = []
    for text in (each for value in texts for each in value.split(",") if each):
        source, path, flags, *rest = (*text.split(":"), "", "")
        if any(rest) or flags not in ("", "ro", "rw") or not path.startswith("/"):
            raise _refused(
                "container_mounts", f"{text} is no SRC:DST", "give one like my-claim:/data or /data:/data:ro"
            )
        if not source.startswith("/") and not _CLAIM.fullmatch(source):
            raise _refused(
                "container_mounts",
                f"{text}: {source or 'nothing'} is neither a path from / of the machines nor a claim's name",
                "kubectl get pvc shows the PersistentVolumeClaims",
            )
        if path in paths:
            raise _refused("container_mounts", f"{text}: {path} is {paths[path]}", "give it another place")
        paths[path] = f"that of {source} already"
        mounts.append(Mount(source, path, flags == "ro"))
    return tuple(mounts)
