"""Reads torch.distributed's state in this rank: process groups, the current call, the flight recorder's entries.

Called in the thread of ``inspection_endpoint``; what this version of torch lacks is left out. It runs in ranks, by the
rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Any

    from ddplaunch.core.rank.rank_runner import load_private_module
    from ddplaunch.observe.rank import method_call
else:
    method_call = load_private_module("observe/rank/method_call")

_MAX_GROUPS, _MAX_MEMBERS = 1024, 4096
_PACKING = {"_object_to_tensor", "_tensor_to_object"}  # run the program's __reduce__, outside the communication
_SENDS_AND_RECEIVES = {12: "isend", 13: "irecv", 14: "irecv"}  # OpType in torch/csrc/distributed/c10d/Work.hpp
_MAX_OPS = 256
_RPC_RESULTS = ("rpc_async", "_collect_all", "collect_all")  # functions of torch that return a torch.Future
_RPC_API = "/torch/distributed/rpc/api.py"
_STORE_METHODS = ("get", "multi_get")  # they wait too, as its ``wait`` does
_LOCK_METHODS = ("acquire", "__enter__")
_LOCK_MODULES = ("_thread", "_multiprocessing", "multiprocessing.synchronize")  # of the classes of locks
_MAX_KEY_CHARS = 80
_NAMES = {
    **dict.fromkeys(("send", "isend", "reduce", "gather"), "dst"),
    **dict.fromkeys(("recv", "irecv", "broadcast", "scatter"), "src"),
}
"""Functions of torch.distributed with an argument that names a rank; with the prefix "group_", a rank of the group."""


def describe(module: ModuleType, *, details: bool) -> list[bytes]:
    """Return whether there is a process group (``1`` or ``0``), the groups, the current call, each recorder's dump."""
    parts = [b"%d" % module.is_initialized(), _groups(module, members=details), _call(module)]
    return [*parts, *traces(details=details)]


def has_torch_threads(module: ModuleType) -> bool:
    """Whether torch has threads of its own: of a process group, or of RPC."""
    rpc = sys.modules.get("torch.distributed.rpc.api")
    return bool(module.is_initialized() or (rpc and rpc._is_current_rpc_agent_set()))


def traces(*, details: bool) -> list[bytes]:
    """Dump each flight recorder as JSON, in one line without tabs."""
    torch = getattr(sys.modules["torch"]._C, "_distributed_c10d", None)
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    found = [getattr(torch, name)(details, False) for name in names if hasattr(torch, name)]
    return [bytes(each).replace(b"\t", b" ").replace(b"\n", b" ") for each in found]


def write_flight_recorder_dump(path: str, max_bytes: int) -> None:
    """Write the flight recorder's dump: NCCL's to ``path``, as ``torchfrtrace`` reads it; others as JSON to PATH.json.

    Instead of a dump larger than ``max_bytes``, its size is written. The launcher waits for a file: if NCCL's own
    format fails, its dump is written as JSON too.
    """
    dumps = traces(details=True)
    data = _dump_nccl() if any(b'"nccl:' in each for each in dumps) else b""
    if not data:
        data, path = b"\n".join(dumps) or b"{}", path + ".json"
    if len(data) > max_bytes:
        data = b'{"left_out_bytes": %d}' % len(data)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path + ".part", flags, 0o600), "wb") as file:
        file.write(data)
    os.rename(path + ".part", path)


def _dump_nccl() -> bytes:
    """Dump NCCL's flight recorder, with the lines of the calls; empty if this torch cannot."""
    try:
        return bytes(sys.modules["torch"]._C._distributed_c10d._dump_nccl_trace(True, True, False))
    except Exception:
        return b""


def _groups(module: ModuleType, *, members: bool) -> bytes:
    """List the process groups of this rank, in order of creation, as JSON; see ``_group``."""
    try:
        world = module._world
        found = list(world.pg_names.items())[:_MAX_GROUPS]
        ranks = world.pg_group_ranks if members else {}
        return b"[" + b",".join(_format_group(name, each, ranks.get(each, {})) for each, name in found) + b"]"
    except Exception:
        return b"[]"


def _format_group(name: object, group: Any, members: dict[int, int]) -> bytes:
    """Format a group as a JSON array: name, description, members, number of operations so far (-1 if unknown)."""
    try:
        count = int(group._get_sequence_number_for_group())
    except Exception:
        count = -1
    words = [str(name), str(getattr(group, "group_desc", "") or "")]
    texts = ['"' + "".join(c if c.isalnum() or c in " _-.:/()[]" else "_" for c in word[:200]) + '"' for word in words]
    ranks = ",".join(str(int(rank)) for rank in sorted(members)[:_MAX_MEMBERS])
    return f"[{texts[0]},{texts[1]},[{ranks}],{count}]".encode("ascii", "replace")


def _call(module: ModuleType) -> bytes:
    """Find the torch.distributed function that the program is in, the one that it calls, and the rank in its arguments.

    "broadcast_object_list broadcast 0"; -1 if it names no rank; "" if no thread is in one. The members of a group may
    follow, "1,3", the key of a store, and the world size. Of the frames' variables only numbers, groups and what
    ``_describe_wait_in_c`` needs are read.
    """
    try:
        main = sys.modules["threading"].main_thread().ident
        for thread, top in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
            inside = []
            frame: FrameType | None = top
            while frame is not None:
                if frame.f_code.co_filename == module.__file__ and not frame.f_code.co_name.startswith("<"):
                    inside.append(frame)
                frame = frame.f_back
            names = [each.f_code.co_name for each in inside]
            if names and _PACKING.isdisjoint(names):
                outer = next((name for name in reversed(names) if name[0] != "_"), names[-1])
                if outer == "init_process_group":
                    rank, world_size = _find_world_arguments(top, inside[-1])
                    return b"%b %b %d - - %d" % (outer.encode(), outer.encode(), rank, world_size)
                at = next((each for each in inside if each.f_code.co_name in _NAMES), inside[0])
                words = f"{outer} {at.f_code.co_name} {_rank_in_arguments(module, at)} {_find_members(module, inside)}"
                return words.rstrip().encode("ascii", "replace")
            if thread == main and not names and (words := _describe_rpc_sync(top) or _describe_wait_in_c(module, top)):
                return words.encode("ascii", "replace")
    except Exception:
        pass
    return b""


def _find_world_arguments(top: FrameType, init: FrameType) -> tuple[int, int]:
    """The rank and world size of a call of ``init_process_group``: given, or from the environment; -1 and 0 if unknown.

    They are read from the innermost frame that has both: its rendezvous has them before the call itself.
    """
    frame: FrameType | None = top
    while frame is not None:
        rank, world_size = (frame.f_locals.get(name) for name in ("rank", "world_size"))
        if type(rank) is int and type(world_size) is int and rank >= 0 < world_size:
            return rank, world_size
        frame = frame.f_back if frame is not init else None
    return -1, 0


def _find_members(module: ModuleType, inside: list[FrameType]) -> str:
    """The members of the group that a call creates, or that ``monitored_barrier`` waits in: "1,3"; "" for all ranks."""
    ranks: Any = ()
    for frame in inside:
        if frame.f_code.co_name == "_new_process_group_helper":
            ranks = frame.f_locals.get("global_ranks_in_group") or ()
        elif frame.f_code.co_name == "_new_group_with_tag" and frame.f_locals.get("use_local_synchronization"):
            ranks = frame.f_locals.get("ranks") or ()  # its final barrier may be among its members only
        elif frame.f_code.co_name == "monitored_barrier" and (group := frame.f_locals.get("group")) is not None:
            ranks = module.get_process_group_ranks(group)
    return ",".join(str(int(rank)) for rank in sorted(ranks)[:_MAX_MEMBERS])


def _describe_wait_in_c(module: ModuleType, frame: FrameType) -> str:
    """Describe the ``Work.wait()`` or ``Store.wait()`` that a frame calls: "wait irecv 2"; "" for anything else.

    Also "acquire lock -1", for a lock of threads or processes.

    A method in C has no frame; gloo's flight recorder lacks the wait. The object must be a Work, or the result of
    ``isend`` or ``irecv``: other classes have such a method too. The rank is that of a P2POp in the frame or its
    callers; "wait wait -1" if these are unknown. Of a store, "wait store.wait -1 - KEY", the key with escapes.
    """
    called = method_call.read_method_call(frame, {"wait", "to_here", *_STORE_METHODS, *_LOCK_METHODS})
    if called is None:
        return ""
    method, on, argument = called
    if method in _LOCK_METHODS:
        return "acquire lock -1" if type(on).__module__ in _LOCK_MODULES else ""
    if words := _describe_rpc_wait(method, on):
        return words
    if isinstance(on, getattr(module, "Store", ())):
        return f"wait store.wait -1{_escape_key(argument)}"
    if method != "wait" or not (isinstance(on, module.Work) or getattr(on, "function", "") in ("isend", "irecv")):
        return ""
    kind = _SENDS_AND_RECEIVES.get(int(on._get_op_type()), "wait") if isinstance(on, module.Work) else on.function
    peers: set[int] = set()
    at: FrameType | None = frame
    while at is not None and kind != "wait":
        for value in tuple(at.f_locals.values()):
            ops = value[:_MAX_OPS] if isinstance(value, list) else ()
            peers.update(each.peer for each in ops if isinstance(each, module.P2POp) and each.op.__name__ == kind)
        at = at.f_back if "/torch/distributed/pipelining/" in at.f_code.co_filename else None
    return f"wait {kind} {peers.pop() if len(peers) == 1 else -1}"


def _describe_rpc_wait(method: str, on: Any) -> str:
    """Describe a wait for a reply by RPC: "wait to_here 2", with the rank that should reply; "" for any other call."""
    if "torch.distributed.rpc.api" not in sys.modules:
        return ""
    core = sys.modules["torch"]._C
    if method == "to_here":
        return f"wait to_here {on.owner().id if isinstance(on, core._distributed_rpc.PyRRef) else -1}"
    is_future = isinstance(on, core.Future) or getattr(on, "function", "") in _RPC_RESULTS
    return "wait rpc_async -1" if method == "wait" and is_future else ""


def _describe_rpc_sync(top: FrameType) -> str:
    """Describe the call of ``rpc_sync`` that a thread is in: "rpc_sync rpc_sync 2"; "" if it is in none."""
    frame: FrameType | None = top
    while frame is not None:
        if frame.f_code.co_name == "rpc_sync" and frame.f_code.co_filename.endswith(_RPC_API):
            to = frame.f_locals.get("to")
            to = sys.modules["torch.distributed.rpc.api"]._to_worker_info(to).id if type(to) is not int else to
            return f"rpc_sync rpc_sync {to}"
        frame = frame.f_back
    return ""


def _escape_key(argument: Any) -> str:
    """Format the key that a store waits for, or the first of several: " - epoch/1"; "" if it is unknown."""
    key = next(iter(argument), "") if type(argument) in (list, tuple) else argument
    text = key[:_MAX_KEY_CHARS].encode("unicode_escape").decode("ascii") if type(key) is str else ""
    return text and " - " + text.replace(" ", "\\x20").replace("|", "\\x7c")


def _rank_in_arguments(module: ModuleType, frame: FrameType) -> int:
    """The global rank in the arguments of a call of one of ``_NAMES``; -1 for another call."""
    argument = _NAMES.get(frame.f_code.co_name)
    if argument is None:
        return -1
    given = frame.f_locals
    if isinstance(given.get(argument), int):
        return int(given[argument])
    number = given.get(f"group_{argument}")
    group = given.get("group") or module._get_default_group()
    return int(module.get_global_rank(group, number)) if isinstance(number, int) else -1
