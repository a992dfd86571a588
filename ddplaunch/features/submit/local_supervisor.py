"""Runs one job of ``submit --scheduler local``, with all indices of an array, in a session of its own.

This file is run by its path, with the folder of the job (see ``local_job``). It uses the standard library only, as the
process stays until the job has ended. An index starts when the one before has what it waits for: one waits at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

POLL_INTERVAL_S = 0.1
EXIT_CANCELLED = 128 + signal.SIGTERM
SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


def process_identity(pid: int) -> dict[str, object]:
    """Return a lasting identity of a process: its PID, and the moment of its start in ticks since boot."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return {"pid": pid, "ticks": int(fields[19])}


def write_file(path: str, text: str) -> None:
    """Write a file atomically, so that no reader sees a part of it."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


class Supervisor:
    """Starts the script of each index of a job, and stops these scripts."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "job.json"), encoding="utf-8") as file:
            job = json.load(file)
        self._folder, self._log, self._number = folder, job["log"], job["number"]
        self._is_array, self._limit = job["is_array"], job["limit"] or len(job["indices"])
        self._pending: list[str] = job["indices"]
        self._running: dict[int, str] = {}  # indices that run, by the PID of the script
        self._scripts: list[subprocess.Popen[bytes]] = []  # an object that is deleted would reap its process
        self._stopping = False
        self._seen: set[str] = set()  # indices that have what they waited for

    def run(self) -> None:
        """Run all indices of the job; return when all have ended."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        write_file(os.path.join(self._folder, "process.json"), json.dumps(process_identity(os.getpid())))
        while self._pending or self._running:
            if self._pending and (self._stopping or os.path.exists(self._path(self._pending[0], "cancel"))):
                self._cancel(self._pending.pop(0))
            elif self._pending and self._may_start():
                self._start(self._pending.pop(0))
            else:
                self._wait()

    def _wait(self) -> None:
        timeout_s = POLL_INTERVAL_S if self._pending else 3600.0
        info = signal.sigtimedwait(SIGNALS, timeout_s)
        if info and info.si_signo == signal.SIGTERM:
            self._stopping = True
            for pid in self._running:
                os.kill(pid, signal.SIGTERM)
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if (index := self._running.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._record_end(index, code if code >= 0 else 128 - code)

    def _may_start(self) -> bool:
        for index in self._running.values():
            if index not in self._seen:
                if not os.path.exists(self._path(index, "started")):
                    return False
                self._seen.add(index)
        return len(self._running) < self._limit

    def _start(self, index: str) -> None:
        name = f"{self._number}_{index}" if self._is_array else self._number
        variables = {"DDPLAUNCH_LOCAL_JOB": name, "DDPLAUNCH_START_FILE": self._path(index, "started")}
        if self._is_array:
            variables["DDPLAUNCH_ARRAY_INDEX"] = index
        try:
            with open(self._log.replace("%a", index), "ab") as log:
                script = subprocess.Popen(
                    ["bash", os.path.join(self._folder, "script"), index, self._path(index, "end")],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_restore_signals,
                )
        except OSError:
            self._record_end(index, 126)
            return
        self._scripts.append(script)
        self._running[script.pid] = index
        write_file(self._path(index, "process"), json.dumps(process_identity(script.pid)))

    def _cancel(self, index: str) -> None:
        write_file(self._path(index, "cancel"), "")
        self._record_end(index, EXIT_CANCELLED)

    def _record_end(self, index: str, code: int) -> None:
        """Write the exit code of an index to a file, unless its script has done that."""
        if not os.path.exists(self._path(index, "end")):
            write_file(self._path(index, "end"), f"{code}\n")

    def _path(self, index: str, kind: str) -> str:
        return os.path.join(self._folder, f"{index}.{kind}")


def _restore_signals() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


if __name__ == "__main__":
    Supervisor(sys.argv[1]).run()
