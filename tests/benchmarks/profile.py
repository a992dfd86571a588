"""Measures what profiling costs a rank: in one run, steps with and without a profile follow each other."""

import threading
import time
from itertools import pairwise

from ddplaunch.core.control_socket import client
from ddplaunch.core.control_socket.socket_dir import list_sockets
from ddplaunch.features.profile.request import ProfileJobRequest
from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS
from tests.benchmarks.experiments import Experiment, Row, Size, Values
from tests.benchmarks.measure import Failed, Job

RANKS = 2


def profile_experiments(size: Size) -> list[Experiment]:
    seconds = max(size.idle / 2, 2.0)  # of a profile, and of each time without one
    what = f"{RANKS} ranks, DDP steps while a profile of {seconds:g} s is taken, over those before and after"
    return [Experiment("profile", {OURS: lambda: _steps(seconds)}, (Row(what, "ratio", "", None, 1.02),))]


def _steps(seconds: float) -> Values:
    """The time of a step with a profile, from its begin until all ranks have reported, over that without."""
    with Job(contenders.ddplaunch()(RANKS, "steps.py")) as job:
        job.until("block", 2)
        (door,) = [path for path in list_sockets() if path.endswith(f".{job.pid}")]
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for profiled in (False, True, False, True, False):
            began = time.monotonic()
            asking = threading.Thread(target=_ask, args=(door, seconds))
            if profiled:
                asking.start()
            job.watch(seconds if not profiled else seconds + 0.2)
            while asking.is_alive():
                job.watch(0.05)
            times[profiled].append((began, time.monotonic()))
        job.release()
        if job.finish():
            raise Failed(job.last_errors())
        blocks = [*pairwise(job.times("block"))]
    mean = {}
    for profiled, spans in times.items():
        spent = [end - begin for begin, end in blocks if any(first <= begin and end <= last for first, last in spans)]
        if not spent:
            raise Failed("no block of steps")
        mean[profiled] = sum(spent) / len(spent)
    return {"ratio": mean[True] / mean[False]}


def _ask(door: str, seconds: float) -> None:
    for _ in client.stream_replies(door, ProfileJobRequest(seconds), seconds + 20):
        pass
