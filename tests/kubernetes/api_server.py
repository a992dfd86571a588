"""An API server: it stores objects, runs the pods of jobs, and serves their logs; each fault is one line of a test.

Jobs are checked by the schemas of Kubernetes. The rules of a failed pod are those of the Job that ``manifest`` writes.
"""

import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from tests.conftest import free_port
from tests.kubernetes import spdy
from tests.kubernetes.kubelet import ContainerProcess, Log
from tests.kubernetes.objects import Object, job_templates, now, pod_variables, status_reply, with_metadata
from tests.kubernetes.volumes import in_own_folders, mount_volumes

JOBS = ("jobs", "jobsets", "trainjobs", "pytorchjobs")
_PATH = re.compile(
    r"/apis?(?:/([a-z.0-9-]*\.?[a-z0-9-]+(?=/v)))?/(v\w+)/namespaces/([^/]+)/(\w+)(?:/([^/]+)(?:/(\w+))?)?"
)
RESTART_CODES = (69, 75, 143)
_SYNC_DELAY_S = (
    1.0  # between the end of a pod and what the Job controller does then (pkg/controller/job: syncJobBatchPeriod)
)
_VERSION = "1.31"  # of the schemas


@dataclass
class Fault:
    """What happens to requests whose method and path match: a delay, and a status in place of the reply."""

    pattern: str
    code: int = 0
    reason: str = ""
    message: str = ""
    delay_s: float = 0.0
    times: int = 1 << 30


class ApiServer:
    """The server, its controllers and its machines."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the working directory of the image; the pods have their own folders in it."""
        self.folder = folder
        self.objects: dict[str, Object] = {}  # by path: "/apis/batch/v1/namespaces/default/jobs/wine"
        self.namespaces = {"default"}
        self.kinds = {"services", "configmaps", "pods", "jobs", "events", "podgroups"}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lost_images: dict[str, str] = {}  # images that cannot be pulled, and why
        self.nodes_with_gpus = 8
        self.restart_delay_s = 0.2
        self.processes: dict[str, ContainerProcess] = {}
        self._logs: dict[str, list[Log]] = {}  # of each pod, of its containers one after another
        self._ports: dict[str, int] = {}
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._connections: set[BaseHTTPRequestHandler] = set()
        self._server: ThreadingHTTPServer | None = None
        self._number = free_port()
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._number}"

    def open(self) -> None:
        """Listen, also again after ``close``."""
        handler = type("Handler", (_Handler,), {"api": self})
        ThreadingHTTPServer.allow_reuse_address = ThreadingHTTPServer.daemon_threads = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self._number), handler)
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()

    def close(self) -> None:
        """Be away: no connection is accepted, and all that there are end."""
        assert self._server
        self._server.shutdown()
        self._server.server_close()
        self.break_connections()

    def break_connections(self) -> None:
        for each in [*self._connections]:
            with suppress(OSError):
                each.connection.shutdown(2)

    def stop(self) -> None:
        """End all pods, and the server."""
        with self._lock:
            self.objects.clear()
        for process in [*self.processes.values()]:
            process.stop(0)
        for thread in self._threads:
            thread.join(30)
        self.close()

    def kubeconfig(self, *contexts: str, namespace: str = "default") -> Path:
        """Write a configuration of kubectl; the first context is the current one."""
        path = self.folder / "kubeconfig"
        named = [{"name": each, "context": {"cluster": "c", "user": "u", "namespace": namespace}} for each in contexts]
        clusters, users = [{"name": "c", "cluster": {"server": self.url}}], [{"name": "u", "user": {"token": "t"}}]
        fields = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "users": users, "contexts": named}
        path.write_text(json.dumps({**fields, "current-context": contexts[0]}))
        return path

    # The controllers

    def list_pods(self, job: str = "") -> list[Object]:
        """Return the pods whose names begin with ``job``."""
        with self._lock:
            found = [each for path, each in self.objects.items() if "/pods/" in path]
        return [each for each in found if each["metadata"]["name"].startswith(job)]

    def apply(self, manifest: str) -> None:
        """Create the objects of a manifest, as ``kubectl apply`` does."""
        for each in yaml.safe_load_all(manifest):
            root = "/api" if each["apiVersion"] == "v1" else "/apis"
            path = f"{root}/{each['apiVersion']}/namespaces/default/{each['kind'].lower()}s"
            with self._lock:
                self.create(path, "default", path.rpartition("/")[2], each)

    def evict(self, pod: Object) -> None:
        """Take a pod's machine away: it gets SIGTERM, and a condition that says why it has ended."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        pod["status"].setdefault("conditions", []).append(condition)
        self.processes[pod["metadata"]["name"]].stop(pod["spec"]["terminationGracePeriodSeconds"])

    def create(self, path: str, namespace: str, plural: str, obj: Object) -> Object:
        if plural in ("jobs", "services", "configmaps"):
            kubernetes_validate.validate(obj, _VERSION, strict=True)
        obj = self.objects[f"{path}/{obj['metadata']['name']}"] = with_metadata(obj, namespace)
        if plural in JOBS and not obj["spec"].get("suspend"):
            self._ports[obj["metadata"]["uid"]] = free_port()
            for name, _, template in job_templates(obj):
                self._create_pod(obj, name, template)
        return obj

    def _create_pod(self, job: Object, name: str, template: Object) -> None:
        spec = {**template["spec"], "restartPolicy": template.get("restartPolicy", "Never")}
        owner = [{"kind": job["kind"], "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}]
        metadata = {**template["metadata"], "name": name, "ownerReferences": owner}
        namespace = job["metadata"]["namespace"]
        pod = with_metadata({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, namespace)
        pod["status"] = {"phase": "Pending"}
        self.objects[f"/api/v1/namespaces/{namespace}/pods/{name}"] = pod
        thread = threading.Thread(target=self._run_pod, args=[pod, job], daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_pod(self, pod: Object, job: Object) -> None:
        name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        while gpus and not self.nodes_with_gpus and self._exists(pod):
            why = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu. preemption: 0/8 nodes are available: …"
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
            time.sleep(0.05)
        while (image := container["image"]) in self.lost_images and self._exists(pod):
            waiting = {"reason": "ErrImagePull", "message": self.lost_images[image]}
            self._set_container(pod, {"waiting": waiting}, "Pending")
            time.sleep(0.05)
        own = self.folder / "pods" / name
        while (folders := self._mount_volumes(pod, own)) is None and self._exists(pod):
            self._set_container(pod, {"waiting": {"reason": "ContainerCreating"}}, "Pending")
            time.sleep(0.05)
        words = [in_own_folders(word, folders or {}) for word in (*container["command"], *container["args"])]
        environ = pod_variables(pod, job, self._ports[job["metadata"]["uid"]])
        last: Object = {}
        for restarts in range(100):
            with self._lock:
                if not self._exists(pod) or folders is None:
                    return
                hostname = _without_suffix(name)
                process = ContainerProcess(hostname, words, environ, self.folder, own / str(restarts))
                self.processes[name] = process
                self._logs.setdefault(name, []).append(process.log)
            self._set_container(pod, {"running": {"startedAt": now()}}, "Running", restarts, last)
            code = process.wait()
            ended = {"exitCode": code, "finishedAt": now(), "reason": "Error" if code else "Completed"}
            ended |= {"message": process.log.tail} if code else {}
            is_deleted = "deletionTimestamp" in pod["metadata"]
            if not code or is_deleted or pod["spec"]["restartPolicy"] == "Never" or not self._exists(job):
                break
            last = {"terminated": ended}
            self._set_container(pod, {"waiting": {"reason": "CrashLoopBackOff"}}, "Running", restarts, last)
            time.sleep(self.restart_delay_s)
        with self._lock:
            phase = "Failed" if code else "Succeeded"
            self._set_container(pod, {"terminated": ended}, phase, restarts, last)
            if "deletionTimestamp" in pod["metadata"]:
                self._forget(pod)
            elif self._exists(job):
                self._on_pod_end(job, pod, code)

    def _mount_volumes(self, pod: Object, own: Path) -> dict[str, Path] | None:
        """Make the pod's volumes; None as long as one of its ConfigMaps is missing."""
        root = f"/api/v1/namespaces/{pod['metadata']['namespace']}/configmaps"
        with self._lock:
            return mount_volumes(pod["spec"], own, lambda name: self.objects.get(f"{root}/{name}"))

    def _set_container(
        self, pod: Object, state: Object, phase: str, restarts: int = 0, last: Object | None = None
    ) -> None:
        (container,) = pod["spec"]["containers"]
        status = {"name": container["name"], "image": container["image"], "restartCount": restarts, "state": state}
        status |= {"lastState": last or {}}
        conditions = [*pod["status"].get("conditions", ())]
        pod["status"] = {"phase": phase, "conditions": conditions, "containerStatuses": [status]}

    def _on_pod_end(self, job: Object, pod: Object, code: int) -> None:
        """Start a pod again that was lost; else the job has failed, or has completed with its last pod."""
        disrupted = any(each["type"] == "DisruptionTarget" for each in pod["status"]["conditions"])
        if code and (disrupted or code in RESTART_CODES):
            same = _without_suffix(pod["metadata"]["name"])
            fresh = next((name, template) for name, _, template in job_templates(job) if _without_suffix(name) == same)
            threading.Timer(self.restart_delay_s, self._restart, [job, *fresh]).start()
        elif code:
            why = f"Container ddplaunch for pod {pod['metadata']['name']} failed with exit code {code} matching …"
            threading.Timer(_SYNC_DELAY_S, self._end_job, [job, "Failed", "PodFailurePolicy", why]).start()
        elif all(each["status"]["phase"] == "Succeeded" for each in self._current_pods(job)):
            types = {"JobSet": "Completed", "PyTorchJob": "Succeeded"}
            self._end_job(job, types.get(job["kind"], "Complete"), "CompletionsReached", "Reached expected number")

    def _restart(self, job: Object, name: str, template: Object) -> None:
        with self._lock:
            if self._exists(job) and "deletionTimestamp" not in job["metadata"]:
                self._create_pod(job, name, template)

    def _current_pods(self, job: Object) -> list[Object]:
        latest = {}
        for pod in self.list_pods():
            if pod["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]:
                latest[_without_suffix(pod["metadata"]["name"])] = pod
        return [*latest.values()]

    def _end_job(self, job: Object, kind: str, reason: str, message: str) -> None:
        with self._lock:
            if not job["status"].get("conditions"):
                job["status"]["conditions"] = [{"type": kind, "status": "True", "reason": reason, "message": message}]
        for pod in self._current_pods(job):
            if process := self.processes.get(pod["metadata"]["name"]):
                process.stop(pod["spec"]["terminationGracePeriodSeconds"])

    def delete(self, path: str) -> Object:
        """Delete an object and what it owns, the pods first: they get SIGTERM and their grace."""
        obj = self.objects[path]
        obj["metadata"]["deletionTimestamp"] = now()
        owned = [each for each in self.objects.values() if self._owner(each) == obj["metadata"]["uid"]]
        pods = [each for each in (*owned, obj) if each["kind"] == "Pod"]
        for pod in pods:
            pod["metadata"]["deletionTimestamp"] = now()
            process = self.processes.get(pod["metadata"]["name"])
            if process and process.code is None:
                process.stop(pod["spec"]["terminationGracePeriodSeconds"])
            else:
                self._forget(pod)
        for each in owned:
            if each not in pods:
                self._forget(each)
        if obj not in pods:
            threading.Thread(target=self._finish_deletion, args=[obj, pods], daemon=True).start()
        return obj

    def _finish_deletion(self, obj: Object, pods: list[Object]) -> None:
        while any(map(self._exists, pods)):
            time.sleep(0.02)
        self._forget(obj)

    @staticmethod
    def _owner(obj: Object) -> str | None:
        return next((each["uid"] for each in obj["metadata"].get("ownerReferences", ())), None)

    def _exists(self, obj: Object) -> bool:
        with self._lock:
            return any(each is obj for each in self.objects.values())

    def _forget(self, obj: Object) -> None:
        with self._lock:
            self.objects = {path: each for path, each in self.objects.items() if each is not obj}

    # Requests

    def fault_of(self, request: str) -> Fault | None:
        found = next((each for each in self.faults if each.times > 0 and re.search(each.pattern, request)), None)
        if found:
            found.times -= 1
        return found

    def reply(self, method: str, path: str, query: dict[str, str], body: bytes) -> Object:
        """Return the reply to a request; a Status is an error."""
        if path in _DISCOVERY:
            return _DISCOVERY[path]
        found = _PATH.fullmatch(path)
        if not found or found[4] not in self.kinds:
            return status_reply(404, "NotFound", "the server could not find the requested resource")
        namespace, plural, name = found[3], found[4], found[5]
        with self._lock:
            if method == "POST":
                if namespace not in self.namespaces:
                    return status_reply(404, "NotFound", f'namespaces "{namespace}" not found')
                obj = json.loads(body)
                if f"{path}/{obj['metadata']['name']}" in self.objects:
                    what = f'{plural} "{obj["metadata"]["name"]}" already exists'
                    return status_reply(409, "AlreadyExists", what)
                try:
                    return self.create(path, namespace, plural, obj)
                except kubernetes_validate.ValidationError as error:
                    return status_reply(422, "Invalid", f"{obj['kind']} is invalid: {error.message}")
            if name:
                if path not in self.objects:
                    return status_reply(404, "NotFound", f'{plural} "{name}" not found')
                return self.delete(path) if method == "DELETE" else self.objects[path]
            wanted = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
            fields = query.get("fieldSelector", "").removeprefix("involvedObject.name=")
            items = [each for at, each in self.objects.items() if at.rpartition("/")[0] == path]
            items = [each for each in items if wanted.items() <= each["metadata"].get("labels", {}).items()]
            items = [each for each in items if not fields or each["involvedObject"]["name"] == fields]
            return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}

    def log_of(self, name: str, *, previous: bool) -> Log | None:
        """The log of a pod's container, or of the one before, which the kubelet keeps too."""
        logs = self._logs.get(name, [])
        return next(iter(logs[-2:-1] if previous else logs[-1:]), None)


def _resource(name: str, kind: str) -> Object:
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list", "create"]}


_DISCOVERY: dict[str, Object] = {
    "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [_resource("pods", "Pod"), _resource("pods/exec", "PodExecOptions")],
    },
}
"""What kubectl asks for before ``exec``."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    api: ApiServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.api._connections.add(self)

    def finish(self) -> None:
        self.api._connections.discard(self)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):  # it was broken
            super().handle()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        body = self._read_body()
        lists = parse_qs(parts.query, keep_blank_values=True)
        query = {name: values[0] for name, values in lists.items()}
        request = f"{self.command} {self.path}"
        self.api.requests.append(request)
        if fault := self.api.fault_of(request):
            time.sleep(fault.delay_s)  # the network is slow
            if fault.code:
                return self._send(status_reply(fault.code, fault.reason, fault.message))
        if (found := _PATH.fullmatch(parts.path)) and found[6] == "log":
            return self._send_log(found[5], query)
        if found and found[6] == "exec":
            return spdy.serve_exec(self, self.api.processes[found[5]].start, lists)
        return self._send(self.api.reply(self.command, parts.path, query, body))

    do_POST = do_DELETE = do_GET

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, reply: Object) -> None:
        data = json.dumps(reply).encode()
        self.send_response(reply["code"] if reply.get("kind") == "Status" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_log(self, pod: str, query: dict[str, str]) -> None:
        log = self.api.log_of(pod, previous="previous" in query)
        if log is None:
            return self._send(
                status_reply(400, "BadRequest", f'container "ddplaunch" in pod "{pod}" is waiting to start')
            )
        since = _seconds(query["sinceTime"]) if "sinceTime" in query else 0
        tail = int(query["tailLines"]) if "tailLines" in query else None
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in log.read(since * 10**9, tail, follow="follow" in query):
            if data:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")
        return None

    def log_message(self, *_: object) -> None:
        pass


def _seconds(text: str) -> int:
    """The API server passes whole seconds on to the kubelet."""
    return int(time.mktime(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone)


def _without_suffix(pod: str) -> str:
    """Return the name of a pod without what makes it unique."""
    return re.sub("-[a-z]{5}$", "", pod)
