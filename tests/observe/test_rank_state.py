"""Tests of what is read of a rank: the call that it is in, and the workers of a DataLoader."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.core.rank.rank_runner import load_private_module
from ddplaunch.observe.diagnosis.inspection import Worker
from ddplaunch.observe.node import dataloader_workers
from tests.conftest import wait_until

torch_state = load_private_module("observe/rank/torch_state")
method_call = load_private_module("observe/rank/method_call")
Named = lambda name: SimpleNamespace(__name__=name)  # noqa: E731
WORLD = {"world": 10, "pair": 20}  # the first global rank of each group


@pytest.mark.parametrize(
    ("function", "variables", "rank"),
    [
        ("broadcast", {"src": 3, "group": "pair"}, 3),
        ("broadcast", {"src": None, "group": None, "group_src": 1}, 11),
        ("reduce", {"dst": None, "group": "pair", "group_dst": 1}, 21),
        ("broadcast", {"dst": 3}, -1),
        ("all_reduce", {"src": 3}, -1),
    ],
)
def test_the_rank_that_a_collective_names(function, variables, rank):
    module = SimpleNamespace(
        _get_default_group=lambda: "world", get_global_rank=lambda group, number: WORLD[group] + number
    )
    frame = SimpleNamespace(f_code=SimpleNamespace(co_name=function), f_locals=variables)
    assert torch_state._rank_in_arguments(cast("Any", module), cast("Any", frame)) == rank


@pytest.mark.parametrize(
    ("has_group", "has_agent", "expected"),
    [
        (True, None, True),
        (True, False, True),
        (False, True, True),
        (False, False, False),
        (False, None, False),  # RPC was not imported
    ],
)
def test_torch_has_threads_of_a_process_group_or_of_rpc(monkeypatch, has_group, has_agent, expected):
    monkeypatch.delitem(sys.modules, "torch.distributed.rpc.api", raising=False)
    if has_agent is not None:
        rpc = SimpleNamespace(_is_current_rpc_agent_set=lambda: has_agent)
        monkeypatch.setitem(sys.modules, "torch.distributed.rpc.api", rpc)
    assert torch_state.has_torch_threads(SimpleNamespace(is_initialized=lambda: has_group)) is expected


@pytest.mark.parametrize(
    ("of_loader", "found"),
    [(True, [Worker(12, code=1), Worker(13, stopped=True)]), (False, [Worker(n, stopped=True) for n in (13, 15)])],
)
def test_workers_that_cannot_be_asked(monkeypatch, of_loader, found):
    """A rank that waits for its DataLoader waits for no other child process; other ranks wait for any that is alive."""
    stats = {
        11: ("pt_data_worker", None, False),
        12: ("pt_data_worker", 1, False),
        13: ("pt_data_worker", None, True),
        14: ("python", 1, False),
        15: ("python", None, True),
    }
    monkeypatch.setattr(dataloader_workers, "_list_children", lambda pid: [*stats])
    monkeypatch.setattr(dataloader_workers, "_read_stat", lambda pid, parent: stats[pid])
    process = cast("Any", SimpleNamespace(pid=10))
    assert dataloader_workers.WorkerStackDumps(process, cast("Any", None), of_loader=of_loader).inspected == found


def test_no_worker_is_asked_after_one_that_gives_no_reply(monkeypatch):
    """Its late dump would be taken for that of the next one; the others are asked again at the next inspection."""
    asked, dumps, now = list[int](), {1: None, 2: b"", 3: None}, iter(range(99))

    class Dump:
        def __init__(self, process, *_):
            asked.append(process.pid)
            self.text, self.give_up = dumps[process.pid], lambda: None

        def poll(self) -> bool:
            return self.text is None

    monkeypatch.setattr(dataloader_workers, "RankStackDump", Dump)
    monkeypatch.setattr(dataloader_workers, "time", SimpleNamespace(monotonic=lambda: next(now) / 9))
    monkeypatch.setattr(dataloader_workers, "_list_children", lambda pid: [2, 1, 3])
    monkeypatch.setattr(dataloader_workers, "_read_stat", lambda pid, parent: ("pt_data_worker", None, False))
    monkeypatch.setattr(dataloader_workers, "open_pidfd", lambda pid: None)
    channel = SimpleNamespace(stack_signals=(1, 2), stacks_fd=3)
    process = cast("Any", SimpleNamespace(pid=10, rank=None))
    workers = dataloader_workers.WorkerStackDumps(process, cast("Any", channel), of_loader=True)
    assert workers.poll()
    assert asked == [2, 2, 1], "a dump without its frames may be a second one of the rank"
    while workers.poll():
        pass
    assert asked == [2, 2, 1]


def test_the_processes_that_a_rank_has_started():
    """Its own children only: a process id may have been given to another process."""
    alive, stopped, ended = (
        subprocess.Popen(["sh", "-c", line]) for line in ("exec sleep 600", "kill -STOP $$", "exit 3")
    )
    try:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert {alive.pid, stopped.pid, ended.pid} <= {*dataloader_workers._list_children(os.getpid())}
        assert dataloader_workers._read_stat(alive.pid, os.getpid())[1:] == (None, False)
        assert dataloader_workers._read_stat(stopped.pid, os.getpid()) == ("sh", None, True)
        assert dataloader_workers._read_stat(ended.pid, os.getpid()) == ("sh", 3, False)
        assert dataloader_workers._read_stat(alive.pid, os.getppid()) is None
    finally:
        for each in (alive, stopped, ended):
            each.send_signal(signal.SIGKILL)
            each.wait()
    assert dataloader_workers._read_stat(alive.pid, os.getpid()) is None


class Group:
    def __init__(self, name: str, count: int | None) -> None:
        self.group_desc, self._count = name, count

    def _get_sequence_number_for_group(self) -> int:
        return int(cast("int", self._count))


def test_the_process_groups_of_a_rank():
    first, second = Group("default_pg", 7), Group('my "mesh"\n', None)
    world = SimpleNamespace(pg_names={first: "0", second: "1"}, pg_group_ranks={first: {2: 0, 1: 1}})
    module = cast("Any", SimpleNamespace(_world=world))
    assert torch_state._groups(module, members=True) == b'[["0","default_pg",[1,2],7],["1","my _mesh__",[],-1]]'
    assert torch_state._groups(module, members=False) == b'[["0","default_pg",[],7],["1","my _mesh__",[],-1]]'
    assert torch_state._groups(cast("Any", SimpleNamespace()), members=True) == b"[]", "another version of torch"


class Work:
    def __init__(self, kind: int, module: Any) -> None:
        self._get_op_type = lambda: kind
        self.wait = lambda: torch_state._describe_wait_in_c(module, sys._getframe(1))
        self.is_completed = self.wait


def test_the_wait_for_a_send_or_recv_that_a_rank_is_in():
    """The peer is that of the only operation of this kind in the frame."""
    isend, irecv = (Named(name) for name in ("isend", "irecv"))
    module = SimpleNamespace(Work=Work, P2POp=SimpleNamespace)
    sent, received = Work(12, module), Work(13, module)
    ops = [SimpleNamespace(op=isend, peer=3), SimpleNamespace(op=irecv, peer=5)]

    def wait(work: Any, of: list[Any]) -> str:
        return cast("str", work.wait())

    assert [wait(work, ops) for work in (sent, received, Work(0, module))] == [
        "wait isend 3", "wait irecv 5", "wait wait -1"]  # fmt: skip
    assert wait(sent, ops[1:]) == wait(sent, [*ops, SimpleNamespace(op=isend, peer=4)]) == "wait isend -1"
    assert sent.is_completed() == "", "it is in another method"


class Store:
    """A store, and an object of the program whose method has the same name."""

    def __init__(self, module: Any) -> None:
        self.wait = self.get = lambda *_: torch_state._describe_wait_in_c(module, sys._getframe(1))
        self.inner = self


def test_the_wait_of_a_store_or_another_object_is_no_send_or_recv():
    module = SimpleNamespace(Work=Work, P2POp=SimpleNamespace, Store=())
    store, received = Store(module), Work(13, module)
    number, keys = 3, ["step 1", "b"]
    words = [store.wait(["ready"]), received.wait()]  # not in an ``assert``, whose code pytest rewrites
    assert words == ["", "wait irecv -1"], "the first is an object of the program"
    module.Store = Store
    words = [
        store.wait(["ready"]),
        store.inner.wait(["ready", "b"], 1.0),
        store.get(f"epoch|{number}"),
        store.wait(keys),
        store.wait([str(number)]),
    ]
    keys_seen = [" - ready", " - ready", " - epoch\\x7c3", " - step\\x201", ""]
    assert words == [f"wait store.wait -1{key}" for key in keys_seen]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("box.item.call(key)", "item of box"),
        ("items[1].call()", "second"),
        ("names['a'].call([key, key], 2)", "by name"),
        ("make(key, 1).call(key)", "make"),
        ("make(key, at=1).call(key)", "make"),
        ("box.make(key, at=1).call(f'{key}/{1}', timeout=box.item)", "make"),
        ("[each.call(key) for each in items[:1]]", "first"),
        ("box.lazy.call(key)", ""),
        ("items[1].call(key + key)", "second"),
    ],
)
def test_the_object_whose_method_a_frame_calls(expression, value):
    """No code of the program runs: what a property would return is unknown."""
    read: Callable[[], Any] = lambda: method_call.read_method_call(sys._getframe(2), {"call"})  # noqa: E731

    class Item(str):
        def call(self, *_: object, **__: object) -> None:
            found.append(read())

    class Box:
        item = property(lambda self: pytest.fail("the program's code has run"))
        lazy = property(lambda self: Item())
        make = staticmethod(lambda *_, **__: Item())

    found, box = list[Any](), Box()
    box.__dict__["item"] = Item("item of box")
    names = {"box": box, "key": "key", "items": [Item("first"), Item("second")], "make": box.make}
    names["names"] = {"a": Item("by name")}
    if "box.item" in expression:
        del Box.item
    eval(expression, names)
    ((method, on, argument),) = found
    assert method == "call"
    assert (on if isinstance(on, str) else on.function) == value
    assert argument in ("key", "key/1", ["key", "key"]) or argument.function == ""


def test_only_the_end_of_a_long_program_is_decoded():
    """A reply that takes half a second is taken for native code that holds the GIL."""
    sizes, calls = list[int](), list[Any]()

    def read(key: str) -> None:
        sizes.append(len(method_call._decode_last_instructions(sys._getframe(1))))
        calls.append(method_call.read_method_call(sys._getframe(1), {"get"}))

    store = SimpleNamespace(get=read)
    exec("\n".join(["number = {}.get('a', 1) + 300"] * 3000 + ["store.get('epoch')"]), {"store": store})
    assert calls == [("get", store, "epoch")]
    assert sizes[0] <= method_call._MAX_BYTES // 2 + 1


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("lock.acquire()", "acquire lock -1"),
        ("with lock: pass", "acquire lock -1"),
        ("with locks['a']: pass", "acquire lock -1"),
        ("own.acquire()", ""),
        ("with own: pass", ""),
    ],
)
def test_the_wait_for_a_lock_of_threads(statement, words):
    """It is read in another thread, as in a rank, while the thread that waits has no frame for the call."""
    if "with" in statement and sys.version_info >= (3, 14):
        pytest.skip("there a with statement has another form")
    module: Any = SimpleNamespace(Work=Work, Store=(), P2POp=SimpleNamespace)
    lock = threading.Lock()
    lock.acquire()

    class Own:
        acquire = __enter__ = property(lambda self: lock.acquire)
        __exit__ = property(lambda self: lambda *_: None)

    names = {"lock": lock, "locks": {"a": lock}, "own": Own()}
    thread = threading.Thread(target=exec, args=(statement, names))
    thread.start()

    def read() -> str:
        frame = sys._current_frames()[cast("int", thread.ident)]
        in_program = frame.f_code.co_filename == "<string>"
        return cast("str", torch_state._describe_wait_in_c(module, frame)) if in_program else "not begun"

    try:
        wait_until(lambda: read() == words, words, 10)
    finally:
        lock.release()
        thread.join()


DISTRIBUTED = """
def broadcast_object_list(call): return wrapper(lambda: broadcast(3, call))
def wrapper(function): return function()
def broadcast(src, call): return call()
def _exception_logger(call): return broadcast_object_list(call)
def _object_to_tensor(call): return call()
def _private(call): return _private_too(call)
def _private_too(call): return call()
def barrier(call): return call()
def init_process_group(call, rank=-1, world_size=-1): return connect(call, 1, 3) if world_size < 0 else call()
def connect(call, rank, world_size): return call()
"""


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (["_exception_logger"], b"broadcast_object_list broadcast 3"),
        (["barrier"], b"barrier barrier -1"),
        (["_private"], b"_private _private_too -1"),
        (["_exception_logger", "_object_to_tensor"], b""),
        ([], b""),
        (["init_process_group"], b"init_process_group init_process_group 1 - - 3"),
    ],
)
def test_the_call_that_a_rank_is_in(functions, words):
    """The function that the program has called, not a decorator around it; while it pickles, it is in none."""
    names: dict[str, Any] = {}
    exec(compile(DISTRIBUTED, "distributed_c10d.py", "exec"), names)
    module = cast("Any", SimpleNamespace(__file__="distributed_c10d.py", Work=(), **names))
    call: Callable[[], bytes] = lambda: torch_state._call(module)  # noqa: E731
    for name in reversed(functions):
        call = partial(names[name], call)
    assert call() == words


@pytest.mark.parametrize("fails", [False, True])
def test_a_dump_of_nccl_that_fails_is_replaced_by_the_json(monkeypatch, tmp_path, fails):
    """The file is awaited."""

    def dump(*_: bool) -> bytes:
        if fails:
            raise RuntimeError("no memory")
        return b"pickled"

    recorder = SimpleNamespace(
        _dump_nccl_trace=dump, _dump_nccl_trace_json=lambda *_: b'{"entries": "nccl:all_reduce"}'
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=recorder)))
    torch_state.write_flight_recorder_dump(str(tmp_path / "rank_0"), 1000)
    expected = ("rank_0.json", b'{"entries": "nccl:all_reduce"}') if fails else ("rank_0", b"pickled")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [expected]
