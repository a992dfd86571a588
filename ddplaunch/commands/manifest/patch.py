"""Patches for a manifest: a file of YAML or JSON, merged as ``kubectl patch --type strategic`` merges.

Mappings are merged, null removes a field, and other values replace. A list replaces too, unless Kubernetes gives its
entries a key (x-kubernetes-patch-merge-key of its OpenAPI document): then entries with the same key are merged, and
others appended. Two lists without a key are appended to, since to replace them would lose what the options ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddplaunch import TYPE_CHECKING
from ddplaunch.commands.manifest.yaml import Noted
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError
from ddplaunch.files import read_named
from ddplaunch.words import named

if TYPE_CHECKING:
    import yaml

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
class Patch:
    """One document of a file, for the object of its kind; a Job's may be inside a JobSet."""

    file: str
    content: Mapping[str, Any]

    def __str__(self) -> str:
        return self.file

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", "Job"))


def read(path: str) -> tuple[Patch, ...]:
    """Read the patches of a file, one a document.

    Raises UsageError if it cannot be read, is not YAML (with the line), or is not a patch of a manifest.
    """
    try:
        text = read_named(path, MAX_BYTES).decode()
    except OSError as error:
        raise UsageError(f"--patch {path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--patch {path}: not YAML: it is not UTF-8") from None
    found = tuple(Patch(path, document) for document in _documents(path, text))
    for patch in found:
        _check(patch)
    if not found:
        raise UsageError(f"--patch {path}: there is nothing in it", "write the fields to change, from spec: on")
    return found


def _documents(path: str, text: str) -> Iterator[Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError(f"--patch {path} needs PyYAML, to read it", "pip install pyyaml") from None
    try:
        loader = _loader(text)
        while loader.check_node():
            node = loader.get_node()
            document = loader.construct_document(node)
            if document is None:
                continue
            if not isinstance(document, dict):
                line = node.start_mark.line + 1
                raise UsageError(
                    f"--patch {path}, line {line}: expected fields, like spec:", "leave out the - before them"
                )
            _walk(document)
            yield document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        what = "" if isinstance(error, yaml.constructor.ConstructorError) else "not YAML: "
        raise UsageError(f"--patch {path}{where}: {what}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"--patch {path}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"--patch {path}: a value contains itself, or is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"--patch {path}: {str(error).splitlines()[0]}") from None


def _walk(value: Any) -> None:
    """Raises RecursionError if a value contains itself."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _walk(each)


def _loader(text: str) -> yaml.SafeLoader:
    """YAML as Kubernetes reads it: a date is a string; keys are strings, and none is there twice."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            if isinstance(node, yaml.MappingNode):
                self.flatten_mapping(node)
            seen = set()
            for key, _ in node.value:
                name = self.construct_object(key, deep=True)
                if not isinstance(name, str):
                    what = f"the key {key.value} is not a string; put it in quotes"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                if name in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", key.start_mark)
                seen.add(name)
            return dict(super().construct_mapping(node, deep))

    other = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
    Loader.yaml_implicit_resolvers = {
        first: [each for each in resolvers if each[0] not in other]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag in ("binary", "omap", "pairs", "set", "timestamp"):
        Loader.add_constructor(f"tag:yaml.org,2002:{tag}", yaml.SafeLoader.construct_undefined)
    return Loader(text)


def _check(patch: Patch) -> None:
    for name in patch.content:
        if name not in _TOP:
            what = f"--patch {patch.file}: {name}: a {patch.kind} has {named(_TOP)}"
            raise UsageError(what, "a field of the pods stands below spec: template: spec:")
    metadata = patch.content.get("metadata")
    for name, option in (("name", "--job-name"), ("namespace", "--namespace")):
        if isinstance(metadata, dict) and name in metadata:
            what = f"--patch {patch.file}: metadata.{name} cannot be changed: other objects have it too"
            raise UsageError(what, f"{option} {metadata[name]}")


def patched(objects: Sequence[Mapping[str, Any]], patches: Iterable[Patch]) -> list[Mapping[str, Any]]:
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
        content: Mapping[str, Any] = {
            name: each for name, each in patch.content.items() if name in ("metadata", "spec")
        }
        if where != patch.kind:
            name = found[index]["spec"]["replicatedJobs"][0]["name"]
            content = {"spec": {"replicatedJobs": [{"name": name, "template": content}]}}
        found[index] = _Merge(f"--patch {patch.file}").mapping(found[index], content, ())
    return found


@dataclass(frozen=True)
class _Merge:
    """One merge; comments of what stays stay."""

    whose: str  # what errors begin with

    def value(self, old: Any, new: Any, path: tuple[str, ...]) -> Any:
        if isinstance(old, Noted):
            merged = self.value(old.value, new, path)
            return Noted(old.comment, merged) if isinstance(new, (dict, list)) else merged
        if isinstance(old, list) and isinstance(new, dict):
            raise UsageError(f"{self.whose}: {'.'.join(path)}: expected a list", "- before the first field makes one")
        if isinstance(old, Mapping) and not isinstance(new, dict):
            raise UsageError(f"{self.whose}: {'.'.join(path)}: expected fields, like {next(iter(old), 'name')}:")
        if isinstance(new, dict):
            return self.mapping(old if isinstance(old, Mapping) else {}, new, path)
        if isinstance(new, list):
            return self.list(old if isinstance(old, list) else [], new, path)
        return new

    def mapping(self, old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        merged = {} if new.get(_DIRECTIVE) == "replace" else dict(old)
        for name, value in new.items():
            if name == _DIRECTIVE and value == "replace":
                continue
            if name.startswith("$"):
                what = f"{self.whose}: {'.'.join((*path, name))}: {value}"
                raise UsageError(what, "use $patch: replace, $patch: delete in a list, or null")
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = self.value(merged.get(name), value, (*path, name))
        return merged

    def list(self, old: Sequence[Any], new: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        key = KEYS.get(path[-1])
        if key is None:
            return [*(old if path[-1] in APPENDED else ()), *(self.value(None, each, path) for each in new)]
        merged = list(old)
        for number, each in enumerate(new):
            place = f"{path[-1]}[{number}]"
            if not isinstance(each, dict) or key not in each:
                raise UsageError(f"{self.whose}: {'.'.join((*path[:-1], place))} has no {key}")
            values = [at.value if isinstance(at, Noted) else at for at in merged]
            index = next((i for i, at in enumerate(values) if at.get(key) == each[key]), None)
            if each.get(_DIRECTIVE) == "delete":
                if index is not None:
                    del merged[index]
            elif index is None:
                merged.append(self.value(None, each, (*path[:-1], place)))
            else:
                merged[index] = self.value(merged[index], each, (*path[:-1], place))
        return merged
