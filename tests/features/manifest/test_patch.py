"""Tests of patches of a manifest: merged by Kubernetes' rules, comments kept, errors named by their line."""

from __future__ import annotations

import importlib.resources
import json

import pytest
import yaml as pyyaml

from ddplaunch.features.manifest.patch import MERGE_KEYS
from tests.conftest import assert_refused, write_program
from tests.features.manifest.test_kubernetes import JOBS, check, golden
from tests.features.manifest.test_kubernetes import manifest as manifest

IMAGE = "registry.example/wine:1"


@pytest.fixture
def merged(manifest, tmp_path):
    """The objects of a job's manifest after patches, by their kinds; the Job's spec of pods is ``pod``."""

    def make(*texts: str, job="smallest"):
        files = [write_program(tmp_path, f"{number}.yaml", text) for number, text in enumerate(texts)]
        text = manifest(" ".join([*(f"--patch {file}" for file in files), JOBS[job]]))
        objects = {each["kind"]: each for each in pyyaml.safe_load_all(text)}
        if "Job" in objects:
            objects["pod"] = objects["Job"]["spec"]["template"]["spec"]
        return objects

    return make


def pod(text: str) -> str:
    return f"spec: {{template: {{spec: {{{text}}}}}}}\n"


def test_the_keys_of_lists_are_those_of_kubernetes():
    """Its OpenAPI document has it; ours is the table of what a Job can reach."""
    text = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema/v1.37.0-local/_definitions.json"
    definitions = json.loads(text.read_text())["$defs"]
    found, left = {}, ["io.k8s.api.batch.v1.Job"]
    seen = set(left)
    while left:
        for name, field in definitions[left.pop()].get("properties", {}).items():
            if "x-kubernetes-patch-merge-key" in field:
                found.setdefault(name, set()).add(field["x-kubernetes-patch-merge-key"])
            for each in (field, field.get("items") or {}, *field.get("allOf", [])):
                target = each.get("$ref", "").rpartition("/")[2]
                if target and target not in seen:
                    seen.add(target)
                    left.append(target)
    others = {"conditions", "ownerReferences", "ephemeralContainers", "evictionResponders"}
    """Of a status, of the cluster alone, and too new for 1.36."""
    known = {name: {key} for name, key in MERGE_KEYS.items() if name != "replicatedJobs"}
    assert {name: keys for name, keys in found.items() if name not in others} == known


def test_fields_are_merged_and_removed(merged):
    job = merged(pod("runtimeClassName: nvidia, terminationGracePeriodSeconds: 99, restartPolicy: null"))
    assert job["pod"]["runtimeClassName"] == "nvidia"
    assert job["pod"]["terminationGracePeriodSeconds"] == 99
    assert "restartPolicy" not in job["pod"]
    assert job["pod"]["containers"][0]["image"] == IMAGE


def test_entries_with_the_same_key_are_merged_and_others_appended(merged):
    job = merged(
        pod(
            "containers: [{name: ddplaunch, imagePullPolicy: Always, env: [{name: A, value: b},"
            " {name: DDPLAUNCH_NNODES, value: '7'}]}, {name: other, image: 'x:1'}],"
            " volumes: [{name: shm, emptyDir: {sizeLimit: 1Gi}}, {name: more, emptyDir: {}}]"
        )
    )
    ours, other = job["pod"]["containers"]
    assert (ours["image"], ours["imagePullPolicy"], other["name"]) == (IMAGE, "Always", "other")
    assert ours["env"] == [{"name": "DDPLAUNCH_NNODES", "value": "7"}, {"name": "A", "value": "b"}]
    assert job["pod"]["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "more", "emptyDir": {}},
    ]
    check(job["Job"])


def test_tolerations_are_appended_and_other_lists_replaced(merged):
    first, second = ({"key": key, "operator": "Exists"} for key in ("a", "b"))
    added = pod(f"tolerations: [{json.dumps(first)}]"), pod(f"tolerations: [{json.dumps(second)}]")
    assert merged(*added)["pod"]["tolerations"] == [first, second]
    command = merged(pod("containers: [{name: ddplaunch, args: [other.py]}]"))["pod"]["containers"][0]
    assert command["args"] == ["other.py"]


def test_entries_and_fields_are_replaced_whole(merged):
    job = merged(
        pod("volumes: [{name: shm, $patch: delete}, {name: new, emptyDir: {}}, {name: none, $patch: delete}]"),
        "metadata: {labels: {$patch: replace, only: this}}",
    )
    assert job["pod"]["volumes"] == [{"name": "new", "emptyDir": {}}]
    assert job["Job"]["metadata"]["labels"] == {"only": "this"}


def test_a_patch_is_for_the_object_of_its_kind(merged):
    text = "kind: Service\nspec: {ipFamilyPolicy: PreferDualStack}\n---\n---\nspec: {suspend: true}\n"
    job = merged(text, job="two_nodes")
    assert job["Service"]["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    assert job["Job"]["spec"]["suspend"] is True


def test_a_patch_of_the_job_is_for_the_job_in_a_jobset(merged):
    text = "apiVersion: batch/v1\nkind: Job\n" + pod("hostIPC: true") + "---\nkind: JobSet\nspec: {suspend: true}\n"
    jobset = merged(text, job="jobset")["JobSet"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"]["hostIPC"] is True
    assert replicated["template"]["metadata"]["annotations"] == {"scheduling.volcano.sh/group-min-member": "2"}
    assert jobset["spec"]["suspend"] is True
    check(jobset)


def test_comments_stay_where_values_stay(manifest, tmp_path):
    file = write_program(tmp_path, "patch.yaml", "spec:\n  backoffLimitPerIndex: 9\n  podFailurePolicy: {rules: []}\n")
    before, after = (text.splitlines() for text in (golden("smallest"), manifest(f"--patch {file} {JOBS['smallest']}")))
    assert "  # A pod that could not start is retried three times." in set(before) - set(after)
    assert "  # A pod is a node: one ddplaunch, which starts the ranks there." in after
    assert "  backoffLimitPerIndex: 9" in after
    assert "    rules: []" in after


def test_values_are_what_kubernetes_reads(merged):
    """A date is a string, and a number without a dot no number: else a label would change on its way."""
    text = (
        'metadata: {annotations: {a: 2026-11-21, d: "yes"}}\nspec: {x: 1.5, y: 1.0e+20, z: [[1]], completions: {a: 1}}'
    )
    job = merged(text)["Job"]
    assert job["metadata"]["annotations"]["a"] == "2026-11-21"
    assert job["metadata"]["annotations"]["d"] == "yes"
    assert (job["spec"]["x"], job["spec"]["y"], job["spec"]["z"]) == (1.5, 1e20, [[1]])
    assert job["spec"]["completions"] == {"a": 1}, "kubectl refuses it"


def test_json_is_yaml(merged):
    assert merged('{"spec": {"suspend": true}}')["Job"]["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spec:\n  template:\n   a: 1\n  b: [\n", "FILE, line 5: not YAML: expected the node content, but found"),
        ("spec:\n\ta: 1\n", "FILE, line 2: not YAML: found character '\\t' that cannot start any token"),
        ("---\nspec: {}\n---\n- a\n", "FILE: expected fields, like spec:"),
        ("spec: &a\n  b: *a\n", "FILE: not YAML: Circular reference detected"),
        ("a: \0\n", "FILE: not YAML: unacceptable character"),
        ("spec: {2026-11-21: x}\n", "FILE: not YAML: keys must be str, int, float, bool or None, not date"),
        ("# nothing\n", "FILE: the file is empty"),
        ("tolerations: []\n", "FILE: tolerations: a Job has apiVersion, kind, metadata, spec"),
        ("kind: Deployment\n", "FILE: kind Deployment: the manifest has Job"),
        ("metadata: {name: x}\n", "FILE: metadata.name cannot be changed: other objects share it"),
        ("metadata: {namespace: x}\n", "FILE: metadata.namespace cannot be changed"),
        ("spec: {$retainKeys: [a]}\n", "FILE: spec.$retainKeys: ['a']"),
        (pod("containers: {name: x}"), "FILE: spec.template.spec.containers: expected a list"),
        (pod("containers: [{image: x}]"), "FILE: spec.template.spec.containers[0] has no name"),
        (pod("containers: [{name: ddplaunch, env: [x]}]"), "FILE: spec.template.spec.containers[0].env[0] has no name"),
        ("spec: {template: x}\n", "FILE: spec.template: expected fields, like metadata:"),
        ("spec: {x: .inf}\n", "FILE: not YAML: Out of range float values"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged(run_in_fork, tmp_path, text, expected):
    (tmp_path / "patch.yaml").write_text(text)
    done = run_in_fork("manifest", "--container-image", "img:1", "--patch", "patch.yaml", "train.py")
    assert_refused(done, expected.replace("FILE", "--patch patch.yaml"))


def test_a_file_that_is_not_there(run_in_fork):
    done = run_in_fork("manifest", "--container-image", "img:1", "--patch", "patch.yaml", "train.py")
    assert_refused(done, "--patch patch.yaml: cannot read it: No such file or directory")
