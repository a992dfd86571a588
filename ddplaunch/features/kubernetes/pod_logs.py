"""The output of a job: the logs of all its pods in one stream. The launchers have put the rank before each line.

Each line of a log has a timestamp. After a broken connection the log is read again from the last timestamp, which the
API server takes in whole seconds: ``LineCursor`` drops the lines that were printed before.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import sys
import threading
import time
from calendar import timegm
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, Queue
from typing import NamedTuple
from urllib.parse import urlencode

from ddplaunch.base.errors import LaunchError
from ddplaunch.features.kubernetes.kubectl import PROGRAM, Place, parse_error
from ddplaunch.features.kubernetes.objects import PODS, Pod
from ddplaunch.system.schedulers.log_follower import print_line
from ddplaunch.system.schedulers.scheduler import BatchJobState, LogSource

RETRY_INTERVAL_S = 1.0  # between attempts to read a log
REST_TIMEOUT_S = 90.0  # for the rest of all logs after the job's end
MAX_LINES = 10_000  # read and not yet printed
MAX_STREAMS = 64  # pods that are followed at a time: each is a process here


class LogLine(NamedTuple):
    """A line of a pod's log, with its moment in nanoseconds."""

    moment: int
    text: bytes  # with its line end


class LineCursor:
    """The position up to which a pod's log was read; drops earlier lines when the log is read again.

    Several lines may have the same moment, so the lines with the last moment are counted.
    """

    def __init__(self) -> None:
        self.since: str | None = None  # the last timestamp
        self._moment, self._count = -1, 0  # of the last line; how many lines of that moment were read
        self._skipped = 0  # how many of these lines came in the current reading

    def reread(self) -> None:
        """Called before the log is read again, from ``since`` or from its beginning."""
        self._skipped = 0

    def accept(self, raw: bytes) -> LogLine | None:
        """Parse a line of the log; return None if the line was read before."""
        stamp, _, text = raw.partition(b" ")
        moment = parse_moment(stamp.decode(errors="replace"))
        if moment is None:  # a message of the kubelet, or the rest of a line that was split
            return LogLine(max(0, self._moment), raw)
        if moment < self._moment:
            return None
        if moment == self._moment:
            if self._skipped < self._count:
                self._skipped += 1
                return None
            self._count += 1
            self._skipped = self._count
        else:
            self._moment, self._count, self._skipped = moment, 1, 1
            self.since = stamp.decode()
        return LogLine(moment, text)


def parse_moment(text: str) -> int | None:
    """Return the nanoseconds since the epoch of "2026-11-29T12:00:00.5Z"; None if it is something else."""
    match = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))", text)
    if not match:
        return None
    offset_s = (int(match[9]) * 60 + int(match[10])) * 60 * (-1 if match[8] == "-" else 1) if match[8] else 0
    seconds = timegm(tuple(int(match[number]) for number in range(1, 7))) - offset_s
    return seconds * 1_000_000_000 + int((match[7] or "0").ljust(9, "0"))


class _PodLogThread(threading.Thread):
    """Thread that follows the log of one container of a pod, and puts its lines into a queue; None at the end."""

    def __init__(self, place: Place, pod: Pod, lines: int, queue: Queue[tuple[_PodLogThread, LogLine | None]]) -> None:
        super().__init__(daemon=True, name=f"log of {pod.name}")
        self.pod, self._place, self._lines, self._queue = pod.name, place, lines, queue
        self._container, self._can_restart = pod.container.name, pod.spec.restart_policy != "Never"
        self._cursor = LineCursor()
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._is_closed = self._has_ended = False
        self._containers_since = 0  # how many containers have replaced this one in the pod
        self._updates = 0  # how often ``update`` was called

    def update(self, *, has_ended: bool, containers_since: int) -> None:
        """Called after each query of the pod; ``containers_since``: how many containers have replaced this one."""
        with self._changed:
            self._has_ended = self._has_ended or has_ended
            self._containers_since = containers_since
            self._updates += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the stream."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._process:
            self._process.kill()

    def run(self) -> None:
        while not self._is_closed:
            is_last = self._has_ended  # before it is read
            is_complete = self._containers_since > 1 or self._read(follow=not is_last)
            if is_last and is_complete:
                break
            self._wait_for_retry(is_last)
        self._queue.put((self, None))

    def _wait_for_retry(self, is_last: bool) -> None:
        """Wait before the log is read again; if the container may restart, wait until the pod's new state is known."""
        seen = self._updates + (2 if self._can_restart else 1 << 62)  # the next state may have been queried before
        timeout_s = None if self._can_restart and not is_last else RETRY_INTERVAL_S
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._updates >= seen or self._has_ended > is_last, timeout_s
            )

    def _read(self, *, follow: bool) -> bool:
        """Continue to read the log; return whether its rest was read, which is all of it if the container has ended."""
        cursor = self._cursor
        cursor.reread()
        lines = self._lines if cursor.since is None else 0
        previous, since = self._containers_since == 1, cursor.since
        query = log_query(self._container, follow=follow, previous=previous, since=since, lines=lines)
        self._process = process = start_reading_log(self._place, self.pod, query)
        if self._is_closed:
            process.kill()
        assert process.stdout
        assert process.stderr
        rest = b""
        for raw in process.stdout:
            if not raw.endswith(b"\n"):
                rest = raw  # the connection broke, or that is the last line
            elif line := cursor.accept(raw):
                self._queue.put((self, line))
        error = parse_error(process.stderr.read().decode(errors="replace"))
        if process.wait():
            return error.reason == "NotFound"
        if rest and not follow and (line := cursor.accept(rest)):
            self._queue.put((self, line))
        return True


def log_query(
    container: str, *, follow: bool = False, previous: bool = False, since: str | None = None, lines: int = 0
) -> dict[str, str]:
    """Return the URL parameters to request a log; ``previous``: of the container before; ``lines``: only the last."""
    query = {"container": container, "timestamps": "true"}
    query |= {"follow": "true"} if follow else {}
    query |= {"previous": "true"} if previous else {}
    query |= {"sinceTime": since} if since else {}
    return query | ({"tailLines": str(lines)} if lines else {})


def start_reading_log(place: Place, pod: str, query: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start to read the log of a pod."""
    words = [PROGRAM, "get", *place.words, "--raw", f"{PODS.path(place, pod)}/log?{urlencode(query)}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)


class PodLogs(LogSource):
    """The logs of all pods of a job."""

    def __init__(self, place: Place, job: str, find_pods: Callable[[], list[Pod]], lines: int) -> None:
        """``find_pods``: returns all pods of the job as last seen; ``lines``: so many last lines of each, 0: all."""
        self._place, self._job, self._find_pods, self._lines = place, job, find_pods, lines
        self._streams: dict[tuple[str, int], _PodLogThread] = {}  # by pod, and number of its container's restarts
        self._finished: set[_PodLogThread] = set()
        self._queue: Queue[tuple[_PodLogThread, LogLine | None]] = Queue(MAX_LINES)
        self._is_followed = False
        self._has_noted = False

    def update(self, state: BatchJobState) -> None:
        """Update the streams with the latest state of their pods."""
        pods = {pod.name: pod for pod in self._find_pods()}
        for (name, restarts), stream in self._streams.items():
            pod = pods.get(name)  # None: it was deleted
            since = pod.container_status.restart_count - restarts if pod else 0
            stream.update(has_ended=pod is None or since > 0 or pod.has_ended, containers_since=since)

    def copy_new(self) -> None:
        """Follow the logs of pods that have started since the last call, and print all new lines."""
        self._is_followed = True
        self._follow_started_pods()
        while True:
            try:
                stream, line = self._queue.get_nowait()
            except Empty:
                break
            self._on_line_or_end(stream, line)
        sys.stdout.buffer.flush()

    def copy_rest(self) -> None:
        """Print the rest of all logs: sorted by time or, if they were followed, all lines not yet printed."""
        if not self._is_followed:
            self._print_all()
            return
        self.copy_new()
        for stream in self._streams.values():  # the job has ended
            stream.update(has_ended=True, containers_since=0)
        until = time.monotonic() + REST_TIMEOUT_S
        while len(self._finished) < len(self._streams):
            try:
                self._on_line_or_end(*self._queue.get(timeout=max(0.0, until - time.monotonic())))
            except Empty:
                missing = [each.pod for each in self._streams.values() if each not in self._finished]
                print_line(f"the end of the log is missing of {', '.join(missing)}")
                break
        sys.stdout.buffer.flush()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _on_line_or_end(self, stream: _PodLogThread, line: LogLine | None) -> None:
        if line is None:
            self._finished.add(stream)
        else:
            sys.stdout.buffer.write(line.text)

    def _follow_started_pods(self) -> None:
        pods = self._find_pods()
        for pod in pods:
            status = pod.container_status
            key = (pod.name, status.restart_count)
            has_started = status.state.running is not None or status.state.terminated is not None
            if key not in self._streams and has_started:
                if len(self._streams) - len(self._finished) >= MAX_STREAMS:
                    self._note_limit(len(pods))
                    continue
                self._streams[key] = _PodLogThread(self._place, pod, self._lines, self._queue)
                self._streams[key].start()

    def _note_limit(self, count: int) -> None:
        if not self._has_noted:
            self._has_noted = True
            print_line(f"following {MAX_STREAMS} of {count} pods; ddplaunch logs {self._job} prints all later")

    def _print_all(self) -> None:
        """Print the logs of all pods, merged by timestamps; also the log of the container before the last restart."""
        all_pods = self._find_pods()
        failures: list[str] = []
        previous = [self._stored_lines(pod, [], previous=True) for pod in all_pods if pod.has_previous_log]
        logs = [*previous, *(self._stored_lines(pod, failures) for pod in all_pods if pod.has_log)]
        for line in heapq.merge(*logs, key=lambda line: line.moment):
            sys.stdout.buffer.write(line.text)
        sys.stdout.buffer.flush()
        if failures or not all_pods:
            why = failures[0] if failures else "it has no pods, or no longer"
            raise LaunchError(f"no log of job {self._job}: {why}", f"ddplaunch report {self._job} shows its result")

    def _stored_lines(self, pod: Pod, failures: list[str], *, previous: bool = False) -> Iterator[LogLine]:
        query = log_query(pod.container.name, previous=previous, lines=self._lines)
        process = start_reading_log(self._place, pod.name, query)
        cursor = LineCursor()
        assert process.stdout
        assert process.stderr
        try:
            for raw in process.stdout:
                if line := cursor.accept(raw):
                    yield line
            error = parse_error(process.stderr.read().decode(errors="replace"))
            if process.wait():
                failures.append(f"{pod.name}: {error.message}")
        finally:
            process.kill()
            process.wait()
