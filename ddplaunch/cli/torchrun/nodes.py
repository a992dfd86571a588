"""torchrun's rendezvous as our nodes: where node 0 is, which node this is, how long it is waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddplaunch.cli.torchrun.asked import Asked, Said, Word
from ddplaunch.errors import UsageError
from ddplaunch.plan.numbers import decimal

C10D_PORT = "29400"  # torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, DEFAULT_PORT

_ENDPOINT = r"(?P<host>\[[^\]]*\]|[^:]*)(:(?P<port>\d+))?"  # 10.0.0.1:29500, n0, [fd00::1]:29500

_TIMES = {"join_timeout": "--join-timeout", "last_call_timeout": "--join-window", "timeout": "--join-timeout"}
_KEEP_ALIVE = {"keep_alive_interval": 5.0, "keep_alive_max_attempt": 3.0}
"""A node that misses so many beats is lost; the defaults are torch's (dynamic_rendezvous.py)."""
_STATIC = {"timeout"}
_C10D = {"join_timeout", "last_call_timeout", "is_host", *_KEEP_ALIVE}
_TRUE = ("1", "true", "t", "yes", "y")  # torch/distributed/elastic/rendezvous/api.py, get_as_bool


def words(asked: Asked) -> Iterator[Word]:
    """Say it with our options.

    Raises:
        UsageError: the backend is one that we have no use for, an endpoint or setting makes no sense.
    """
    if "--standalone" in asked:
        if asked.most_nodes > 1:
            nnodes = f"{asked.source('--nnodes')} {asked.value('--nnodes')}"
            raise UsageError(f"--standalone and {nnodes} contradict each other", "leave one of them out")
        yield "--nnodes", "1", asked.source("--standalone")
        yield from asked.plainly("--master-port", "--master-port")
        return
    yield from asked.plainly("--nnodes", "--nnodes")
    backend = asked.value("--rdzv-backend", "static")
    if backend == "static":
        yield from _static(asked)
    elif backend == "c10d":
        yield from _c10d(asked)
    else:
        raise UsageError(
            f"{asked.source('--rdzv-backend')} {backend}: ddplaunch has no use for a server between the nodes",
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, HOST being one of the nodes",
        )


def _static(asked: Asked) -> Iterator[Word]:
    yield from asked.plainly("--node-rank", "--node-rank")
    if asked.value("--rdzv-endpoint"):
        yield from _endpoint(asked, "")
        asked.ignore("--master-addr", "--master-port")
    else:
        yield from asked.plainly("--master-addr", "--master-addr")
        yield from asked.plainly("--master-port", "--master-port")
    yield from _settings(asked, _STATIC)


def _c10d(asked: Asked) -> Iterator[Word]:
    if asked.most_nodes > 1:
        if not asked.value("--rdzv-endpoint"):
            raise UsageError(
                f"{asked.source('--rdzv-backend')} c10d on {asked.most_nodes} nodes needs --rdzv-endpoint HOST:PORT",
                "HOST is an address of one of the nodes, the same on each",
            )
        yield from _endpoint(asked, C10D_PORT)
        is_host = _given(asked).get("is_host", "").lower() in _TRUE
        yield "--node-rank", "0" if is_host else "auto", asked.source("--rdzv-backend")
    asked.ignore("--node-rank", "--master-addr", "--master-port")
    yield from _settings(asked, _C10D)


def _endpoint(asked: Asked, default_port: str) -> Iterator[Word]:
    text, source = asked.value("--rdzv-endpoint").strip(), asked.source("--rdzv-endpoint")
    match = re.fullmatch(_ENDPOINT, text)
    if not match or not match["host"]:
        raise UsageError(f"{source} {text} is no HOST:PORT", "--rdzv-endpoint 10.0.0.1:29500")
    yield "--master-addr", match["host"].strip("[]"), source
    if port := match["port"] or default_port:
        yield "--master-port", port, source


def _given(asked: Asked) -> dict[str, str]:
    """--rdzv-conf: "join_timeout=600,last_call_timeout=60"."""
    text = asked.value("--rdzv-conf").strip()
    given: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, _, value = (each.strip() for each in part.partition("="))
        if not key or not value:
            source = asked.source("--rdzv-conf")
            raise UsageError(f"{source} {text} is no list of settings", "--rdzv-conf join_timeout=600")
        given[key] = value
    return given


def _settings(asked: Asked, heard: set[str]) -> Iterator[Word]:
    """Those of --rdzv-conf that this backend hears; the others, whatever they are called, torchrun itself ignores."""
    if not (given := _given(asked)):
        return
    source = asked.source("--rdzv-conf")
    if idle := [f"{key}={value}" for key, value in given.items() if key not in heard]:
        asked.idle.append(Said(",".join(idle), source))
    for key, ours in _TIMES.items():
        if key in given and key in heard:
            yield ours, given[key], source
    if heard & given.keys() & _KEEP_ALIVE.keys():
        silence = 1.0
        for key, default in _KEEP_ALIVE.items():
            number = decimal(given[key]) if key in given else default
            if number is None:
                raise UsageError(f"{source} {key}={given[key]} is no number", f"{key}={default:g}")
            silence *= number
        yield "--heartbeat-timeout", f"{silence:g}", source


def local_address(asked: Asked) -> Iterator[Word]:
    """--local-addr as the interface that has this address.

    Raises:
        UsageError: none has.
    """
    address = asked.value("--local-addr")
    if not address or ("--nnodes" in asked and asked.most_nodes == 1):
        return asked.ignore("--local-addr")
    from ddplaunch.control.route import interface_of, resolve

    try:
        literals = {str(where[0]) for _, where in resolve(address)}
    except OSError:
        literals = set()
    interface = next((name for each in literals if (name := interface_of(each))), None)
    if interface is None:
        source = asked.source("--local-addr")
        raise UsageError(f"{source} {address} is no address of this machine", "leave it out, or --interface NAME")
    yield "--interface", interface, asked.source("--local-addr")
