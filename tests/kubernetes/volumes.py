"""The volumes of a pod as folders of this machine: empty ones, and those that have the data of ConfigMaps."""

import base64
from collections.abc import Callable
from pathlib import Path

from tests.kubernetes.objects import Object


def mount_volumes(spec: Object, own: Path, find_config_map: Callable[[str], Object | None]) -> dict[str, Path] | None:
    """Return the folder of each volume of ddplaunch by its path in the container; None if a ConfigMap is missing.

    ``own``: a folder of the pod.
    """
    (container,) = spec["containers"]
    paths = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", ())}
    folders = {}
    for volume in spec.get("volumes", ()):
        if not paths[volume["name"]].startswith("/ddplaunch/"):
            continue
        folders[paths[volume["name"]]] = folder = own / "volumes" / volume["name"]
        files: dict[str, bytes] = {}
        for source in volume.get("projected", {}).get("sources", ()):
            if (found := find_config_map(source["configMap"]["name"])) is None:
                return None
            files |= {name: base64.b64decode(data) for name, data in found["binaryData"].items()}
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    return folders


def in_own_folders(word: str, folders: dict[str, Path]) -> str:
    """Return a word of the command with the pod's own folders: containers have the root of this machine here."""
    for path, folder in folders.items():
        word = word.replace(path, str(folder))
    return word
