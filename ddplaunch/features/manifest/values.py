"""Parsers and checks for the option values of ``ddplaunch manifest``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

from ddplaunch.cli.cluster_detection import TOKEN_VARIABLE, check_token
from ddplaunch.features.manifest.pod_job import OWN_VARIABLES, Mount
from ddplaunch.features.manifest.pod_spec import NVIDIA
from ddplaunch.features.submit.batch_command import (
    OptionReader,
    check_unique_names,
    invalid_value_error,
    parse_time_s,
    pattern_reader,
    time_reader,
)

_SHORT = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?:[a-z0-9][a-z0-9.-]{{0,252}}/)?{_SHORT}"
"""The key of a label, as in "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3" (see "Labels and Selectors")."""

_VALUE = rf"(?:{_SHORT})?"
_OBJECT = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"  # the name of a secret, a claim, … (RFC 1123, lowercase)
_SOURCE = re.compile(rf"/.*|emptydir(/\d+[KMGT]?i?B?)?|((configmap|secret)/)?{_OBJECT}", re.ASCII)
_VARIABLE = r"[A-Za-z_.-][\w.-]*"
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_CPUS = re.compile(r"\d{1,9}(\.\d{1,3})?|\d{1,9}m", re.ASCII)
_DEVICE = re.compile(rf"(?:[a-z0-9][a-z0-9.-]{{0,252}})/{_SHORT}", re.ASCII)

OWN_OPTIONS = {"cpu": "--cpus-per-task", "memory": "--mem", NVIDIA: "--gpus-per-node"}
"""Resources with an option of their own."""

UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def to_kubernetes_size(text: str) -> str | None:
    """Convert a size to Kubernetes' form: units are powers of 1024; the default unit is M, as in Slurm; None for 0."""
    found = _SIZE.fullmatch(text)
    assert found, text
    number, unit = found.groups()
    return f"{int(number)}{(unit or 'M').upper()}i" if int(number) else None


def parse_quantity(text: str) -> float:
    """Return a number of CPUs, or a size in the form of ``to_kubernetes_size``, as a number."""
    if text.endswith("m"):
        return int(text[:-1]) / 1000
    return int(text[:-2]) * UNITS[text[-2]] if text.endswith("i") else float(text)


def parse_node_range(text: str) -> tuple[int, int]:
    """Parse N or MIN:MAX; return the minimum and the maximum."""
    lowest, _, highest = text.partition(":")
    return int(lowest), int(highest or lowest)


def read_node_range(ctx: click.Context, param: click.Parameter, text: str) -> str:
    if not re.fullmatch(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?", text, re.ASCII):
        raise invalid_value_error(ctx, param, text, "expected a number of nodes, 1 or more, or a range like 2:4")
    lowest, highest = parse_node_range(text)
    if lowest > highest:
        raise invalid_value_error(ctx, param, text, "the range is reversed", f"--nodes {highest}:{lowest}")
    return text


def read_gpus(ctx: click.Context, param: click.Parameter, text: str | None) -> int:
    text = text or "0"
    kind, _, number = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise invalid_value_error(ctx, param, text, "expected a number of GPUs, like 8")
    if kind:
        hint = f"--gpus-per-node {number} --constraint nvidia.com/gpu.product=NAME, a label of the nodes with such GPUs"
        raise invalid_value_error(ctx, param, text, "Kubernetes does not distinguish types of GPUs", hint)
    return int(number)


def read_resources(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check NAME=N, or NAME=SIZE for memory and disks."""
    check_unique_names(ctx, param, texts)
    for text in texts:
        name, _, value = text.partition("=")
        if name in OWN_OPTIONS:
            raise invalid_value_error(
                ctx, param, text, f"{name} has its own option", f"{OWN_OPTIONS[name]} {value or 'N'}"
            )
        if name == "ephemeral-storage" or name.startswith("hugepages-"):
            if not _SIZE.fullmatch(value) or to_kubernetes_size(value) is None:
                raise invalid_value_error(ctx, param, text, "expected a size, like ephemeral-storage=500G")
        elif not _DEVICE.fullmatch(name) or not re.fullmatch(r"[1-9]\d{0,8}", value, re.ASCII):
            hint = "kubectl describe node shows the names, under Allocatable"
            raise invalid_value_error(ctx, param, text, "expected NAME=N, like rdma/hca=8", hint)
    return texts


def read_resource_requests(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    check_unique_names(ctx, param, texts)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ("cpu", "memory", "ephemeral-storage"):
            what = "expected cpu=N, memory=SIZE or ephemeral-storage=SIZE"
            raise invalid_value_error(ctx, param, text, what, "for all other resources the request equals the limit")
        if not (_CPUS if name == "cpu" else _SIZE).fullmatch(value):
            example = "cpu=32 or cpu=500m" if name == "cpu" else f"{name}=500G"
            raise invalid_value_error(ctx, param, text, f"expected {example}")
    return texts


def read_user(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Read UID or UID:GID; the group defaults to the number of the user."""
    if text is None:
        return None
    user, _, group = text.partition(":")
    if not re.fullmatch(r"\d{1,9}(:\d{1,9})?", text, re.ASCII):
        what = "expected a number, or two with : between them, like 1000:1000"
        raise invalid_value_error(ctx, param, text, what, "id shows yours")
    return int(user), int(group or user)


def name_reader(expected: str) -> OptionReader:
    """Return a reader for names of Kubernetes objects; ``expected``: the kind of object, for error messages."""
    return pattern_reader(f"(?-i:{_OBJECT})", f"the name of {expected}: small letters, digits, dashes and dots")


size_option = pattern_reader(_SIZE.pattern, "a size like 200G, or 0 for no limit", to_kubernetes_size)
labels = pattern_reader(f"(?-i:{_KEY}={_VALUE})", "KEY=VALUE, like team=vision")
object_annotations = pattern_reader(f"(?-i:{_KEY}=(?s:.*))", "KEY=VALUE, like k8s.v1.cni.cncf.io/networks=ib0,ib1")
label_keys = pattern_reader(
    f"(?-i:{_KEY})",
    "the key of a label, like kubernetes.io/hostname",
    hint="kubectl get nodes --show-labels",
    unique_names=True,
)
tolerations = pattern_reader(
    f"(?-i:{_KEY}(?:={_SHORT})?(?::(?:NoSchedule|PreferNoSchedule|NoExecute))?)",
    "KEY[=VALUE][:EFFECT], like nvidia.com/gpu or team=vision:NoSchedule",
    hint="kubectl describe node shows the Taints; an effect is NoSchedule, …",
)
_constraint = pattern_reader(
    rf"(?-i:{_KEY}!?={_VALUE}(?:\|{_VALUE})*)",
    "KEY=VALUE, like nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",
    hint="or KEY=A|B, or KEY!=VALUE; kubectl get nodes --show-labels",
)
_secret = pattern_reader(
    rf"(?-i:{_OBJECT}|{_VARIABLE}={_OBJECT}:[\w.-]+)",
    "SECRET for all of its keys, or NAME=SECRET:KEY for one",
    hint="--env-secret HF_TOKEN=hugging-face:token, for example",
    unique_names=True,
)


def read_constraints(ctx: click.Context, param: click.Parameter, text: str | None) -> object:
    return _constraint(ctx, param, tuple(text.split(",")) if text else ())


def read_variables(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check NAME=VALUE, or NAME for this shell's value."""
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(_VARIABLE, name, re.ASCII):
            raise invalid_value_error(ctx, param, text, "expected NAME=VALUE, or NAME for its value in this shell")
        if name in OWN_VARIABLES:
            raise invalid_value_error(ctx, param, text, f"ddplaunch sets {name} in each pod", "leave it out")
        if not equals and name not in os.environ:
            raise invalid_value_error(ctx, param, text, f"{name} is not set here", f"--env {name}=VALUE")
        if name == TOKEN_VARIABLE:
            check_token(value if equals else os.environ[name], f"--env {TOKEN_VARIABLE}")
    return texts


def read_secrets(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    _secret(ctx, param, texts)
    for text in texts:
        if (name := text.partition("=")[0]) in OWN_VARIABLES:
            raise invalid_value_error(ctx, param, text, f"ddplaunch sets {name} in each pod", "leave it out")
    return texts


def read_mounts(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[Mount, ...]:
    used = {"/dev/shm": "ddplaunch mounts memory"}
    mounts = []
    for text in (each for value in texts for each in value.split(",") if each):
        source, path, flags, *rest = (*text.split(":"), "", "")
        if any(rest) or flags not in ("", "ro", "rw") or not path.startswith("/"):
            raise invalid_value_error(ctx, param, text, "expected SRC:DST, like my-claim:/data or /data:/data:ro")
        if not _SOURCE.fullmatch(source):
            what = f"{source or 'nothing'} is neither an absolute path on the nodes nor a claim"
            hint = "kubectl get pvc shows the claims; others are configmap/NAME, secret/NAME, emptydir, emptydir/100G"
            raise invalid_value_error(ctx, param, text, what, hint)
        if path in used:
            raise invalid_value_error(ctx, param, text, f"{used[path]} at {path} already", "choose another DST")
        used[path] = f"{source} is mounted"
        kind, _, limit = source.partition("/")
        if kind == "emptydir" and limit:
            source = f"emptydir/{to_kubernetes_size(limit) or ''}".rstrip("/")
        mounts.append(Mount(source, path, flags == "ro"))
    return tuple(mounts)


def positive_time_reader(example: str, hint: str, *, unlimited: bool) -> OptionReader:
    """Return a reader for times above 0; ``hint``: how to set no limit; ``unlimited``: UNLIMITED is allowed."""
    form = time_reader(example)

    def read_positive_time(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
        text = form(ctx, param, text)
        if text and parse_time_s(text) is None and (text[0].isdigit() or not unlimited):
            raise invalid_value_error(ctx, param, text, f"expected a time above 0, like {example}", hint)
        return text

    return read_positive_time


time_limit = positive_time_reader("4:00:00", "leave it out for a job without a limit", unlimited=True)
ttl_time = positive_time_reader("1-0 for a day", "leave it out to keep the job", unlimited=False)


def parse_key_values(values: Sequence[str]) -> dict[str, str]:
    """Return a mapping from several texts of the form KEY=VALUE."""
    return dict(text.split("=", 1) for text in values)
