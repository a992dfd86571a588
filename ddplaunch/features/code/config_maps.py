"""Code in Kubernetes: immutable ConfigMaps with the parts of an archive, the volume that joins them, and unpacking it.

They are found again when a pod is restarted, and go with the job that owns them. Pure: ``kubectl`` is for others.
"""

from __future__ import annotations

import base64
import shlex

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_size
from ddplaunch.base.types import JsonObject
from ddplaunch.features.code.archive import CodeArchive

MAX_BYTES = 8 << 20
"""Of the packed code: etcd holds it, and each node reads it from the API server."""

PART_BYTES = 900 << 10
"""Of an archive in one ConfigMap, which has 1 MiB at most with its metadata."""

PARTS_FOLDER, CODE_FOLDER = "/ddplaunch/parts", "/ddplaunch/code"


class CodeVolume(Struct, frozen=True):
    """What a job needs for its code, as objects of Kubernetes."""

    config_maps: tuple[JsonObject, ...]
    volume: JsonObject  # of the pod
    mount: JsonObject  # of the container
    command: str  # of a shell: unpacks the code and enters the folder that the job runs in


def build_code_volume(
    archive: CodeArchive, name: str, run_folder: str, labels: JsonObject, owner: JsonObject | None = None
) -> CodeVolume:
    """Return the code as objects with names that begin with ``name``. Raises UsageError if it is too large.

    ``run_folder``: below the code; ``owner``: the ownerReference of the job, with which the objects are deleted.
    """
    if len(archive.data) > MAX_BYTES:
        what = f"--code {archive.version.folder} has {format_size(len(archive.data))} packed"
        hint = "use an image that has the code, or a volume: --container-mounts CLAIM:/path"
        raise UsageError(f"{what}: Kubernetes gets at most {format_size(MAX_BYTES)}", hint)
    parts = [archive.data[at : at + PART_BYTES] for at in range(0, len(archive.data), PART_BYTES)]
    names = [f"{name}-code-{number}" for number in range(len(parts))]
    metadata: JsonObject = {"labels": labels, **({"ownerReferences": [owner]} if owner else {})}
    config_maps = tuple[JsonObject, ...](
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": each, **metadata},
            "immutable": True,
            "binaryData": {f"part-{number:02}": base64.b64encode(part).decode()},
        }
        for number, (each, part) in enumerate(zip(names, parts, strict=True))
    )
    folder = shlex.quote(f"{CODE_FOLDER}/{run_folder}")
    return CodeVolume(
        config_maps,
        {"name": "code", "projected": {"sources": [{"configMap": {"name": each}} for each in names]}},
        {"name": "code", "mountPath": PARTS_FOLDER, "readOnly": True},
        f"mkdir -p {CODE_FOLDER} && cat {PARTS_FOLDER}/part-* | tar -xz -C {CODE_FOLDER} && cd {folder}",
    )
