"""Code in Kubernetes: immutable ConfigMaps with the parts of an archive, their volumes, and the command to unpack it.

A pod that is restarted finds the ConfigMaps again. Pure: ``manifest`` writes the objects; nothing here runs kubectl.
"""

from __future__ import annotations

import base64
import shlex

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_size
from ddplaunch.base.types import JsonObject
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.system.code_version import CodeVersion

MAX_BYTES = 8 << 20
"""Of the packed code: etcd holds it, and each node reads it from the API server."""

PART_BYTES = 900 << 10
"""Of an archive in one ConfigMap, which has 1 MiB at most with its metadata."""

PARTS_FOLDER, CODE_FOLDER = "/ddplaunch/parts", "/ddplaunch/code"


class CodePart(Struct, frozen=True):
    """A part of the archive: the name of its ConfigMap, its file name in the volume, and its bytes in base64."""

    name: str
    file: str
    data: str


class CodeVolume(Struct, frozen=True):
    """The parts of a Kubernetes job that provide its code: volumes, mounts and the command that unpacks them."""

    version: CodeVersion
    parts: tuple[CodePart, ...]
    volumes: tuple[JsonObject, ...]  # of the pod
    mounts: tuple[JsonObject, ...]  # of the container
    command: str  # of a shell: unpacks the code and enters the folder that the job runs in


def build_code_volume(archive: CodeArchive, name: str, run_folder: str) -> CodeVolume:
    """Build volumes for a job's code, with names that begin with ``name``. Raises UsageError if the code is too large.

    ``run_folder``: relative to the code. The names have the hash of the code: no job gets the ConfigMaps of other code.
    """
    if len(archive.data) > MAX_BYTES:
        what = f"--code {archive.version.folder} has {format_size(len(archive.data))} packed"
        hint = "use an image that has the code, or a volume: --container-mounts CLAIM:/path"
        raise UsageError(f"{what}: Kubernetes gets at most {format_size(MAX_BYTES)}", hint)
    chunks = [archive.data[at : at + PART_BYTES] for at in range(0, len(archive.data), PART_BYTES)]
    parts = tuple(
        CodePart(
            f"{name}-code-{archive.version.sha[:8]}-{number}", f"part-{number:02}", base64.b64encode(each).decode()
        )
        for number, each in enumerate(chunks)
    )
    folder = shlex.quote(f"{CODE_FOLDER}/{run_folder}")
    sources = [{"configMap": {"name": part.name}} for part in parts]
    return CodeVolume(
        archive.version,
        parts,
        ({"name": "code-parts", "projected": {"sources": sources}}, {"name": "code", "emptyDir": {}}),
        (
            {"name": "code-parts", "mountPath": PARTS_FOLDER, "readOnly": True},
            {"name": "code", "mountPath": CODE_FOLDER},  # any user may write there
        ),
        f"cat {PARTS_FOLDER}/part-* | tar -xz -C {CODE_FOLDER} && cd {folder}",
    )
