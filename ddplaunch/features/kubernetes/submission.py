"""Creates the Kubernetes objects of a job. The job is created first, and owns the others: they are deleted with it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import msgspec

from ddplaunch.base.errors import LaunchError, UsageError
from ddplaunch.features.kubernetes import kubectl
from ddplaunch.features.kubernetes.kubectl import Call, CallFailed, Collection, Place, ServerError
from ddplaunch.features.kubernetes.objects import CONFIG_MAPS, JOBS, POD_GROUPS, SERVICES, Job, decode_job
from ddplaunch.features.manifest.kubernetes import build_objects
from ddplaunch.features.manifest.pod_job import JOB, PodJob
from ddplaunch.system.schedulers.scheduler import QUERY_TIMEOUT_S, SchedulerNotResponding

_COLLECTIONS = {each.kind: each for each in (CONFIG_MAPS, SERVICES, POD_GROUPS, *JOBS.values())}


def create_job(place: Place, job: PodJob) -> None:
    """Create all objects of the job.

    Raises UsageError if the API server refuses an object, SchedulerNotResponding if it does not reply. The objects
    created before are then deleted.
    """
    *owned, first = build_objects(job)
    created = decode_job(_create(place, first))
    owner = {
        "apiVersion": first["apiVersion"],
        "kind": first["kind"],
        "name": created.metadata.name,
        "uid": created.metadata.uid,
    }
    try:
        for each in owned:
            _create(place, {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}})
    except LaunchError:
        _remove(place, JOBS[job.kind], created)
        raise


def _create(place: Place, fields: dict[str, Any]) -> bytes:
    collection, name = _COLLECTIONS[fields["kind"]], fields["metadata"]["name"]
    path = collection.path(place, fieldValidation="Strict")  # a field that the server does not know is an error
    try:
        call = Call(place, "create", "--raw", path, "--filename", "-", body=json.dumps(fields).encode())
        data = call.result(QUERY_TIMEOUT_S)
        decode_job(data)  # fits every kind of object: only the metadata is required
    except CallFailed as failed:
        raise explain(failed.error, place, collection, name) from None
    except msgspec.DecodeError as error:
        raise LaunchError(f"kubectl created {collection.kind} {name}, but printed something else: {error}") from None
    return data


def _remove(place: Place, collection: Collection, created: Job) -> None:
    with suppress(CallFailed, OSError):
        path = collection.path(place, created.metadata.name, propagationPolicy="Background")
        Call(place, "delete", "--raw", path).result(QUERY_TIMEOUT_S)


def explain(error: ServerError, place: Place, collection: Collection, name: str) -> LaunchError:
    """Return the error for the user, with a hint: why the API server did not create an object."""
    what, where = error.message, f"namespace {place.namespace}"
    if error.reason == "AlreadyExists":
        hint = "leave --no-unique-name out, or choose another --job-name"
        return UsageError(f"there is a {collection.kind} {name} in {where} already", hint)
    if error.reason == "NotFound" and f'namespaces "{place.namespace}"' in what:
        hint = "kubectl get namespaces lists them; --namespace NAME"
        return UsageError(f"context {place.context} has no {where}", hint)
    if error.reason in ("NotFound", "MethodNotAllowed"):
        hint = "--kind job needs no operator" if collection is not JOBS[JOB] else "kubectl version shows its version"
        return UsageError(f"the cluster of context {place.context} has no {collection.kind}s", hint)
    if error.reason == "Forbidden" and "exceeded quota" in what:
        hint = f"kubectl describe quota --namespace {place.namespace}"
        return UsageError(f"the quota of {where} does not allow {name}: {_text_after('exceeded quota: ', what)}", hint)
    if error.reason == "Forbidden" and (user := re.search(r'User "([^"]*)" cannot', what)):
        hint = f"kubectl auth can-i --list --namespace {place.namespace} shows what you may do"
        return UsageError(f"cannot create {collection.plural} in {where}: forbidden for {user[1]}", hint)
    if error.is_from_server:
        return UsageError(f"Kubernetes rejected {collection.kind} {name}: {what}", "--dry-run shows the manifest")
    if "logged in" in what or "Unauthorized" in what:
        return UsageError(f"kubectl is not logged in to context {place.context}: {what}", "kubectl auth whoami")
    unreachable = kubectl.unreachable_error(place, what)
    hint = f"kubectl get {collection.plural} {name} --namespace {place.namespace} shows whether it was created"
    return SchedulerNotResponding(unreachable.message, hint)


def _text_after(words: str, text: str) -> str:
    return text.partition(words)[2] or text
