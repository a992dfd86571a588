"""Patches for a manifest: a file of YAML or JSON, merged as ``kubectl patch --type strategic`` merges.

Mappings are merged, null removes a field, and other values replace. A list replaces too, unless Kubernetes gives its
entries a key (x-kubernetes-patch-merge-key of its OpenAPI document): then entries with the same key are merged, and
others appended. Two lists without a key are appended to, since to replace them would lose what the options ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError
from ddplaunch.files import read_named
from ddplaunch.words import named

KEYS = {
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
"""The lists whose entries are merged, and the field that tells which belong together."""

APPENDED = ("tolerations", "envFrom")
"""The lists that only grow."""

MAX_BYTES = 1 << 20
_DIRECTIVE = "$patch"
_TOP = ("apiVersion", "kind", "metadata", "spec")


@dataclass(frozen=True)
class ManifestPatch:
    """One document of a file, for the object of its kind; a Job's may be inside a JobSet."""

    file: str
    content: Mapping[str, Any]

    def __str__(self) -> str:
        return self.file

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", "Job"))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as Kubernetes reads it: a date is a string; keys are strings, and none is there twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's
        first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = set[str]()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            odd = None if isinstance(name, str) else f"the key {key.value} is not a string; put it in quotes"
            if odd or name in found:
                raise yaml.constructor.ConstructorError(None, None, odd or f"{name} is there twice", key.start_mark)
            found.add(name)
        return dict(super().construct_mapping(node, deep))


def read(path: str) -> tuple[ManifestPatch, ...]:
    """Read the patches of a file, one a document.

    Raises UsageError if it cannot be read, is not YAML (with the line), or is not a patch of a manifest.
    """
    try:
        documents = list(yaml.load_all(read_named(path, MAX_BYTES).decode(), _Loader))
        documents = json.loads(json.dumps(documents, allow_nan=False))  # which is what Kubernetes gets
    except OSError as error:
        raise UsageError(f"--patch {path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--patch {path}: not YAML: it is not UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = "" if isinstance(error, yaml.constructor.ConstructorError) else "not YAML: "
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"--patch {path}{where}: {what}{problem}") from None
    except (RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"--patch {path}: JSON cannot hold it: {str(error).splitlines()[0]}") from None
    found = tuple(ManifestPatch(path, each) for each in documents if each is not None)
    for patch in found:
        _check(patch)
    if not found:
        raise UsageError(f"--patch {path}: there is nothing in it", "write the fields to change, from spec: on")
    return found


def _check(patch: ManifestPatch) -> None:
    if not isinstance(patch.content, dict):
        raise UsageError(f"--patch {patch.file}: expected fields, like spec:", "leave out the - before them")
    for name in patch.content:
        if name not in _TOP:
            what = f"--patch {patch.file}: {name}: a {patch.kind} has {named(_TOP)}"
            raise UsageError(what, "a field of the pods stands below spec: template: spec:")
    metadata = patch.content.get("metadata")
    for name, option in (("name", "--job-name"), ("namespace", "--namespace")):
        if isinstance(metadata, dict) and name in metadata:
            what = f"--patch {patch.file}: metadata.{name} cannot be changed: other objects have it too"
            raise UsageError(what, f"{option} {metadata[name]}")


def patched(objects: Sequence[Mapping[str, Any]], patches: Iterable[ManifestPatch]) -> list[Mapping[str, Any]]:
    """Merge patches into the objects of their kinds, one after the other.

    Raises UsageError if no object has the kind, or what a patch has does not fit.
    """
    found = list(objects)
    for patch in patches:
        kinds = [each["kind"] for each in found]
        where = "JobSet" if patch.kind == "Job" and "Job" not in kinds else patch.kind
        if where not in kinds:
            what = f"--patch {patch.file}: kind {patch.kind}: the manifest has {named(kinds)}"
            raise UsageError(what, "leave kind out for a patch of the Job")
        index = kinds.index(where)
        content = {name: each for name, each in patch.content.items() if name in ("metadata", "spec")}
        if where != patch.kind:
            name = found[index]["spec"]["replicatedJobs"][0]["name"]
            content = {"spec": {"replicatedJobs": [{"name": name, "template": content}]}}
        try:
            found[index] = _merged(found[index], content, ())
        except _Misfit as error:
            raise UsageError(f"--patch {patch.file}: {error}", error.hint) from None
    return found


class _Misfit(Exception):
    """A value of a patch that does not fit; says at which field."""

    def __init__(self, path: Sequence[str], what: str, hint: str | None = None) -> None:
        super().__init__(f"{'.'.join(path)}{what}")
        self.hint = hint


def _merged(old: Any, new: Any, path: tuple[str, ...]) -> Any:
    if isinstance(old, list) and isinstance(new, dict):
        raise _Misfit(path, ": expected a list", "- before the first field makes one")
    if isinstance(old, dict) and not isinstance(new, dict):
        raise _Misfit(path, f": expected fields, like {next(iter(old), 'name')}:")
    if isinstance(new, dict):
        return _mapping(old if isinstance(old, dict) else {}, new, path)
    if isinstance(new, list):
        return _list(old if isinstance(old, list) else [], new, path)
    return new


def _mapping(old: dict[str, Any], new: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Merge two mappings. A comment goes with the value that it is about, but stays above a mapping or a list."""
    if new.get(_DIRECTIVE) == "replace":
        old, new = {}, {name: value for name, value in new.items() if name != _DIRECTIVE}
    kept = {name for name in old if isinstance(new.get(name, {}), (dict, list))}
    merged = {name if name in kept else str(name): value for name, value in old.items()}
    for name, value in new.items():
        if name.startswith("$"):
            raise _Misfit((*path, name), f": {value}", "use $patch: replace, $patch: delete in a list, or null")
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value, (*path, name))
    return merged


def _list(old: list[Any], new: list[Any], path: tuple[str, ...]) -> list[Any]:
    key = KEYS.get(path[-1])
    if key is None:
        return [*(old if path[-1] in APPENDED else ()), *(_merged(None, each, path) for each in new)]
    merged = list(old)
    for number, each in enumerate(new):
        place = (*path[:-1], f"{path[-1]}[{number}]")
        if not isinstance(each, dict) or key not in each:
            raise _Misfit(place, f" has no {key}")
        index = next((i for i, at in enumerate(merged) if at.get(key) == each[key]), len(merged))
        before = merged[index : index + 1]
        if each.get(_DIRECTIVE) == "delete":
            merged[index : index + 1] = []
        else:
            merged[index : index + 1] = [_merged(before[0] if before else None, each, place)]
    return merged
