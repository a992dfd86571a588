import sys
import threading
from types import SimpleNamespace

TOTAL = 79 << 30

recording = False
_queued_calls, _initialized, _blocks = [], [], []


def _lazy_call(callable, **kwargs):
    callable() if _initialized else _queued_calls.append(callable)


def init():
    _initialized.append(True)
    for each in _queued_calls:
        each()


def _record_memory_history(enabled, *, context, stacks, max_entries):
    global recording
    assert _initialized, "that would start CUDA"
    assert (enabled, context, stacks) == ("all", "alloc", "python")
    recording = True


def _snapshot():
    return {"segments": [{"device": 0, "blocks": list(_blocks)}], "device_traces": [[]]}


memory = SimpleNamespace(_record_memory_history=_record_memory_history, _snapshot=_snapshot)


def allocate(size, *, python=True):
    """Allocate memory; without ``python`` as a thread of autograd does, which has no frames of Python."""
    free = TOTAL - sum(block["size"] for block in _blocks)
    if size > free:
        for observer in sys.modules["torch"]._C.__dict__.get("observers", ()):
            observer(0, size, TOTAL, free)
        raise sys.modules["torch"].OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB.")
    frames, frame = [], sys._getframe(0)
    while frame is not None and python and recording:
        frames.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
        frame = frame.f_back
    _blocks.append({"size": size, "state": "active_allocated", "frames": frames})


def backward(size):
    """Allocate as autograd does: in a thread that has no frame of the program, while the caller waits."""
    failed = []

    def run():
        try:
            allocate(size)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise failed[0]
