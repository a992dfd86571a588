"""Strategic merge patches of a manifest (``--patch``): YAML or JSON files, merged like ``kubectl patch``.

Mappings are merged, null removes a field, and other values replace. A list also replaces, unless Kubernetes gives its
entries a key (x-kubernetes-patch-merge-key of its OpenAPI document): then entries with the same key are merged, and
others appended. Two lists without a key are appended to, since replacing them would drop what the options request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import read_user_file
from ddplaunch.base.text import join_names
from ddplaunch.features.manifest.pod_job import NODE, ManifestPatch

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "replicatedJobs": "name",  # of a JobSet
}
"""Lists whose entries are merged, and the field by which entries are matched."""

APPENDED_LISTS = ("tolerations", "envFrom")
"""Lists to which a patch appends."""

MAX_BYTES = 1 << 20
_DIRECTIVE = "$patch"
_TOP = ("apiVersion", "kind", "metadata", "spec")


def read_patches(path: str) -> list[ManifestPatch]:
    """Read the patches of a file, one per document.

    Raises UsageError if it cannot be read, is not YAML (with the line), or is not a patch of a manifest.
    """
    try:
        documents = list(yaml.safe_load_all(read_user_file(path, MAX_BYTES).decode()))
        # As Kubernetes gets it: keys and dates are strings.
        documents = json.loads(json.dumps(documents, allow_nan=False, default=str))
    except OSError as error:
        raise UsageError(f"--patch {path}: cannot read it: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"--patch {path}{where}: not YAML: {what}") from None
    found = [ManifestPatch(path, each) for each in documents if each is not None]
    if not found:
        raise UsageError(f"--patch {path}: the file is empty", "write the fields to change, from spec: on")
    for patch in found:
        _check(patch)
    return found


def _check(patch: ManifestPatch) -> None:
    if not isinstance(patch.content, dict):
        raise UsageError(f"--patch {patch.file}: expected fields, like spec:", "leave out the - before them")
    if unknown := patch.content.keys() - set(_TOP):
        what = f"--patch {patch.file}: {min(unknown)}: a {patch.kind} has {join_names(_TOP)}"
        raise UsageError(what, "fields of the pods belong below spec: template: spec:")
    metadata = patch.content.get("metadata") or {}
    for name, option in (("name", "--job-name"), ("namespace", "--namespace")):
        if name in metadata:
            what = f"--patch {patch.file}: metadata.{name} cannot be changed: other objects share it"
            raise UsageError(what, f"{option} {metadata[name]}")


def apply_patches(objects: Sequence[Mapping[str, Any]], patches: Iterable[ManifestPatch]) -> list[Mapping[str, Any]]:
    """Merge patches into the objects of their kinds, one after the other.

    Raises UsageError if no object has the kind, or a patch does not fit.
    """
    found = {each["kind"]: each for each in objects}
    for patch in patches:
        kind = patch.kind
        content = {name: value for name, value in patch.content.items() if name in ("metadata", "spec")}
        if kind == "Job" and "JobSet" in found:
            kind, content = "JobSet", {"spec": {"replicatedJobs": [{"name": NODE, "template": content}]}}
        if kind not in found:
            what = f"--patch {patch.file}: kind {kind}: the manifest has {join_names(found)}"
            raise UsageError(what, "leave kind out for a patch of the Job")
        found[kind] = _merge_field(found[kind], content, f"--patch {patch.file}: ", "")
    return list(found.values())


def _merge_field(old: Any, new: Any, path: str, name: str) -> Any:
    """Return a field after the patch; ``path`` is its path, with which error messages start."""
    if isinstance(old, list) and isinstance(new, dict):
        raise UsageError(f"{path}: expected a list", "- before the first field makes it a list")
    if isinstance(old, dict) and not isinstance(new, dict):
        raise UsageError(f"{path}: expected fields, like {next(iter(old), 'name')}:")
    if isinstance(new, dict):
        return _mapping(old if isinstance(old, dict) else {}, new, path)
    if isinstance(new, list):
        return _list(old if isinstance(old, list) else [], new, path, name)
    return new


def _mapping(old: dict[str, Any], new: dict[str, Any], path: str) -> dict[str, Any]:
    """Merge two mappings. The comment of a replaced scalar is dropped; that of a mapping or list stays."""
    if new.get(_DIRECTIVE) == "replace":
        old, new = {}, {name: value for name, value in new.items() if name != _DIRECTIVE}
    keeps_comment = {name for name in old if isinstance(new.get(name, {}), (dict, list))}
    merged = {name if name in keeps_comment else str(name): value for name, value in old.items()}
    for name, value in new.items():
        inner = f"{path}{name}" if path.endswith(" ") else f"{path}.{name}"
        if name.startswith("$"):
            raise UsageError(f"{inner}: {value}", "use $patch: replace, $patch: delete in a list, or null")
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_field(merged.get(name), value, inner, name)
    return merged


def _list(old: list[Any], new: list[Any], path: str, name: str) -> list[Any]:
    key = MERGE_KEYS.get(name)
    if key is None:
        return [*(old if name in APPENDED_LISTS else ()), *(_merge_field(None, each, path, "") for each in new)]
    merged = list(old)
    for number, each in enumerate(new):
        if not isinstance(each, dict) or key not in each:
            raise UsageError(f"{path}[{number}] has no {key}")
        index = next((i for i, at in enumerate(merged) if at.get(key) == each[key]), len(merged))
        before = next(iter(merged[index : index + 1]), None)
        is_deleted = each.get(_DIRECTIVE) == "delete"
        merged[index : index + 1] = [] if is_deleted else [_merge_field(before, each, f"{path}[{number}]", "")]
    return merged
