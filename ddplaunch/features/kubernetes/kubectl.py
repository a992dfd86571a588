"""Calls ``kubectl``, which has the user's contexts, login plug-ins and proxies.

Objects are read and written by their paths in the API (``--raw``): one request each, without the lists of kinds and
schemas that kubectl would request first.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from urllib.parse import quote, urlencode

from msgspec import Struct

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.system.schedulers.scheduler import SchedulerNotResponding

PROGRAM = "kubectl"


class Place(Struct, frozen=True):
    """Where a job is: a namespace, and a context of the user's kubeconfig, which is "" in a pod of the cluster."""

    context: str
    namespace: str

    @classmethod
    def parse(cls, text: str | None) -> Place:
        """Parse "CONTEXT/NAMESPACE", as in run records; a context may have slashes, a namespace has none."""
        context, _, namespace = (text or "").rpartition("/")
        return cls(context, namespace or "default")

    def __str__(self) -> str:
        return f"{self.context}/{self.namespace}"

    @property
    def words(self) -> list[str]:
        """The options of kubectl for this context and namespace."""
        return [*(["--context", self.context] if self.context else []), "--namespace", self.namespace]


class Collection(Struct, frozen=True):
    """A kind of Kubernetes objects: their path in the API, and their name for users."""

    group: str  # "" is the core group
    version: str
    plural: str
    kind: str

    def path(self, place: Place, name: str = "", **query: str) -> str:
        """Return the path of one object, or of all of them in a namespace."""
        root = f"/apis/{self.group}" if self.group else "/api"
        path = f"{root}/{self.version}/namespaces/{quote(place.namespace)}/{self.plural}"
        path += f"/{quote(name)}" if name else ""
        return f"{path}?{urlencode(query)}" if query else path


class ServerError(Struct, frozen=True):
    """Why a call of kubectl failed: the API server's status or, if ``reason`` is "", kubectl's own message."""

    reason: str  # NotFound, Forbidden, AlreadyExists, Invalid, …
    message: str

    @property
    def is_from_server(self) -> bool:
        return bool(self.reason)


_FROM_SERVER = re.compile(r"^Error from server(?: \((\w+)\))?: (.*)", re.MULTILINE | re.DOTALL)
_INVALID = re.compile(r"^The (.* is invalid: .*)", re.MULTILINE | re.DOTALL)
_OVERLOADED = ("Timeout", "ServerTimeout", "ServiceUnavailable", "TooManyRequests", "InternalError")
"""Errors that do not concern the object: the same call may succeed later."""


def parse_error(stderr: str) -> ServerError:
    """Parse what kubectl has printed on stderr for a call that failed."""
    if (found := _FROM_SERVER.search(stderr)) and found[1] not in _OVERLOADED:
        return ServerError(found[1] or "Unknown", " ".join(found[2].split()))
    if found := _INVALID.search(stderr):
        return ServerError("Invalid", " ".join(found[1].split()))
    lines = [line for line in stderr.splitlines() if line.strip() and not re.match(r"[EWI]\d{4} ", line)]
    last = lines[-1] if lines else "no message"
    return ServerError("", sanitize_line(re.sub(r"^(error|Error from server.*?): ", "", last), 300))


class CallFailed(LaunchError):
    """Raised when a call of kubectl fails, or gets no reply in time."""

    def __init__(self, error: ServerError) -> None:
        super().__init__(error.message)
        self.error = error


class Call:
    """A running process of kubectl; several may run at a time."""

    def __init__(self, place: Place | None, *words: str, body: bytes | None = None) -> None:
        """Start kubectl. Raises OSError if there is no kubectl."""
        self._body = body
        self._process = subprocess.Popen(
            [PROGRAM, *words[:1], *(place.words if place else []), *words[1:]],
            stdin=subprocess.DEVNULL if body is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches ddplaunch alone
        )

    def result(self, seconds: float) -> bytes:
        """Wait up to ``seconds`` for kubectl, and return its output. Raises CallFailed if it fails or takes longer."""
        try:
            out, err = self._process.communicate(self._body, max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self.close()
            raise CallFailed(ServerError("", f"no answer within {seconds:.0f} s")) from None
        if self._process.returncode:
            raise CallFailed(parse_error(err.decode(errors="replace")))
        return out

    def close(self) -> None:
        """Kill kubectl if it still runs."""
        self._process.kill()
        self._process.communicate()


def get(place: Place, path: str) -> Call:
    """Start to read an object or a list from the API server."""
    return Call(place, "get", "--raw", path)


def read_current_namespace(namespace: str | None, environ: Mapping[str, str], seconds: float) -> Place:
    """Return the current context with ``namespace``, by default its own. Raises UsageError if there is no context."""
    form = "{.current-context}{'\\n'}{.contexts[0].context.namespace}"
    context, own = "", ""
    try:
        text = Call(None, "config", "view", "--minify", "--output", f"jsonpath={form}").result(seconds).decode()
        context, _, own = text.strip().partition("\n")
    except CallFailed as error:
        if "KUBERNETES_SERVICE_HOST" not in environ:  # in a pod kubectl uses its service account
            what = f"kubectl has no context to submit to: {error.message}"
            raise UsageError(what, "kubectl config get-contexts lists them, kubectl config use-context NAME") from None
    if not context and "KUBERNETES_SERVICE_HOST" not in environ:
        raise UsageError(
            "kubectl has no context to submit to", "kubectl config get-contexts lists them, kubectl config use-context"
        )
    return Place(context, namespace or own or _pod_namespace() or "default")


def _pod_namespace() -> str:
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
            return file.read().strip()
    except OSError:
        return ""


def unreachable_error(place: Place, what: str) -> SchedulerNotResponding:
    """Return the error for an API server that does not answer."""
    where = f"context {place.context}" if place.context else "this pod"
    return SchedulerNotResponding(
        f"the API server of {where} does not answer: {what}", "kubectl cluster-info shows whether it is up"
    )
