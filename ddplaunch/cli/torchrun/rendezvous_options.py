"""Translates torchrun's rendezvous options: node 0's address, the node rank, timeouts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.torchrun.torchrun_options import TorchrunOptions, TorchrunValue, TranslatedOption
from ddplaunch.system.network.addresses import find_interface, resolve
from ddplaunch.system.plan.numbers import parse_float

C10D_PORT = "29400"  # torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, DEFAULT_PORT

_ENDPOINT = r"(?P<host>\[[^\]]*\]|[^:]*)(:(?P<port>\d+))?"  # 10.0.0.1:29500, n0, [fd00::1]:29500

_TIMEOUT_OPTIONS = {"join_timeout": "--join-timeout", "last_call_timeout": "--join-window", "timeout": "--join-timeout"}
_KEEP_ALIVE_DEFAULTS = {"keep_alive_interval": 5.0, "keep_alive_max_attempt": 3.0}
"""Their product is the heartbeat timeout; the defaults are torch's (dynamic_rendezvous.py)."""
_STATIC = {"timeout"}
_C10D = {"join_timeout", "last_call_timeout", "is_host", *_KEEP_ALIVE_DEFAULTS}
_TRUE_WORDS = ("1", "true", "t", "yes", "y")  # torch/distributed/elastic/rendezvous/api.py, get_as_bool


def translate_rendezvous(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """Translate the rendezvous. Raises UsageError for an unsupported backend, or an invalid endpoint or setting."""
    if "--standalone" in torchrun:
        if torchrun.max_nodes > 1:
            nnodes = f"{torchrun.source('--nnodes')} {torchrun.value('--nnodes')}"
            raise UsageError(f"--standalone does not work with {nnodes}", "leave one of them out")
        yield "--nnodes", "1", torchrun.source("--standalone")
        yield from torchrun.as_ddplaunch_option("--master-port")
        return
    yield from torchrun.as_ddplaunch_option("--nnodes")
    backend = torchrun.value("--rdzv-backend", "static")
    if backend == "static":
        yield from _translate_static(torchrun)
    elif backend == "c10d":
        yield from _translate_c10d(torchrun)
    else:
        what = f"{torchrun.source('--rdzv-backend')} {backend}: ddplaunch does not use a rendezvous server"
        raise UsageError(what, "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, where HOST is one of the nodes")


def _translate_static(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    yield from torchrun.as_ddplaunch_option("--node-rank")
    if torchrun.value("--rdzv-endpoint"):
        yield from _translate_endpoint(torchrun, "")
        torchrun.ignore_options("--master-addr", "--master-port")
    else:
        yield from torchrun.as_ddplaunch_option("--master-addr")
        yield from torchrun.as_ddplaunch_option("--master-port")
    yield from _translate_rdzv_conf(torchrun, _STATIC)


def _translate_c10d(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    if torchrun.max_nodes > 1:
        if not torchrun.value("--rdzv-endpoint"):
            source = torchrun.source("--rdzv-backend")
            what = f"{source} c10d on {torchrun.max_nodes} nodes needs --rdzv-endpoint HOST:PORT"
            raise UsageError(what, "HOST is an address of one of the nodes, the same on each")
        yield from _translate_endpoint(torchrun, C10D_PORT)
        is_host = _parse_rdzv_conf(torchrun).get("is_host", "").lower() in _TRUE_WORDS
        yield "--node-rank", "0" if is_host else "auto", torchrun.source("--rdzv-backend")
    torchrun.ignore_options("--node-rank", "--master-addr", "--master-port")
    yield from _translate_rdzv_conf(torchrun, _C10D)


def _translate_endpoint(torchrun: TorchrunOptions, default_port: str) -> Iterator[TranslatedOption]:
    text, source = torchrun.value("--rdzv-endpoint").strip(), torchrun.source("--rdzv-endpoint")
    match = re.fullmatch(_ENDPOINT, text)
    if not match or not match["host"]:
        raise UsageError(f"{source} {text}: expected HOST:PORT", "--rdzv-endpoint 10.0.0.1:29500")
    yield "--master-addr", match["host"].strip("[]"), source
    if port := match["port"] or default_port:
        yield "--master-port", port, source


def _parse_rdzv_conf(torchrun: TorchrunOptions) -> dict[str, str]:
    """Parse --rdzv-conf: "join_timeout=600,last_call_timeout=60"."""
    text = torchrun.value("--rdzv-conf").strip()
    given: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, _, value = (each.strip() for each in part.partition("="))
        if not key or not value:
            source = torchrun.source("--rdzv-conf")
            raise UsageError(f"{source} {text}: expected KEY=VALUE,…", "--rdzv-conf join_timeout=600")
        given[key] = value
    return given


def _translate_rdzv_conf(torchrun: TorchrunOptions, known: set[str]) -> Iterator[TranslatedOption]:
    """Translate the settings of --rdzv-conf that this backend has; torchrun too ignores all others."""
    if not (given := _parse_rdzv_conf(torchrun)):
        return
    source = torchrun.source("--rdzv-conf")
    if ignored := [f"{key}={value}" for key, value in given.items() if key not in known]:
        torchrun.without_effect.append(TorchrunValue(",".join(ignored), source))
    for key, option in _TIMEOUT_OPTIONS.items():
        if key in given and key in known:
            yield option, given[key], source
    if known & given.keys() & _KEEP_ALIVE_DEFAULTS.keys():
        timeout_s = 1.0
        for key, default in _KEEP_ALIVE_DEFAULTS.items():
            number = parse_float(given[key]) if key in given else default
            if number is None:
                raise UsageError(f"{source} {key}={given[key]}: expected a number", f"{key}={default:g}")
            timeout_s *= number
        yield "--heartbeat-timeout", f"{timeout_s:g}", source


def translate_local_addr(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """Translate --local-addr to the interface with this address. Raises UsageError if there is none."""
    address = torchrun.value("--local-addr")
    if not address or ("--nnodes" in torchrun and torchrun.max_nodes == 1):
        return torchrun.ignore_options("--local-addr")

    try:
        literals = {str(where[0]) for _, where in resolve(address)}
    except OSError:
        literals = set()
    interface = next((name for each in literals if (name := find_interface(each))), None)
    if interface is None:
        source = torchrun.source("--local-addr")
        raise UsageError(f"{source} {address} is not an address of this machine", "leave it out, or --interface NAME")
    yield "--interface", interface, torchrun.source("--local-addr")
