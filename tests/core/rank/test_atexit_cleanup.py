"""Tests that resources of preloaded modules are released once, and ranks do not share them."""

from __future__ import annotations

import pytest

from tests.conftest import write_program

pytestmark = pytest.mark.slow

SHARED = """
    import atexit, functools, logging, os, shutil, tempfile, weakref

    class Owner: pass
    def drop(path): shutil.rmtree(path)

    owner = Owner()
    folders = [tempfile.mkdtemp(prefix="shared-") for _ in range(5)]
    atexit.register(shutil.rmtree, folders[0])                      # matplotlib
    atexit.register(drop, folders[1])
    atexit.register(functools.partial(shutil.rmtree, folders[2]))
    weakref.finalize(owner, shutil.rmtree, folders[3])
    weakref.finalize(owner, lambda: print("flushed too by", os.environ.get("RANK"), flush=True))
    held = tempfile.TemporaryDirectory(prefix="shared-")            # wandb
    atexit.register(held.cleanup)
    file = folders[4] + "/file"
    open(file, "w").close()
    atexit.register(os.rmdir, folders[4])
    atexit.register(os.remove, file)
    paths = [*folders, held.name, file]

    @atexit.register
    def flush():
        print("flushed by", os.environ.get("RANK"), flush=True)
"""

PROGRAM = """
    import os, time
    from pathlib import Path
    import shared
    if os.environ["RANK"] == "0":  # which would stay till the end in any case
        while not Path("first").exists() or Path("/proc", Path("first").read_text()).exists():
            time.sleep(0.01)
        print("all there:", all(map(os.path.exists, shared.paths)))
        shared.held.cleanup()
        print("its own doing:", os.path.exists(shared.held.name))
    else:
        Path("mine").write_text(str(os.getpid()))
        os.rename("mine", "first")
"""


def test_shared_folders_live_as_long_as_the_job(run_ddplaunch, tmp_path):
    """They are removed at its end; handlers that flush or close a process's own files run in each rank."""
    write_program(tmp_path, "shared.py", SHARED)
    script = write_program(tmp_path, "train.py", PROGRAM)
    (tmp_path / "tmp").mkdir()
    environment = {"TMPDIR": str(tmp_path / "tmp")}
    done = run_ddplaunch("run", "--preload", "shared", "--nproc", "2", script, env=environment)
    assert done.returncode == 0, done.stderr
    assert "[0] all there: True\n" in done.stdout
    assert "[0] its own doing: False\n" in done.stdout
    flushed = sorted(line for line in done.stdout.splitlines() if "flushed" in line)
    assert flushed == [f"[{rank}] flushed {how} {rank}" for rank in (0, 1) for how in ("by", "too by")]
    assert not list((tmp_path / "tmp").iterdir())


def test_an_unsafe_preload_removes_its_temporary_files(run_ddplaunch, tmp_path):
    """The zygote starts over then, as another program; its imports are undone before."""
    write_program(tmp_path, "shared.py", SHARED)
    write_program(
        tmp_path, "threaded.py", "import shared, threading; threading.Thread(target=input, daemon=True).start()"
    )
    script = write_program(tmp_path, "train.py", "")
    (tmp_path / "tmp").mkdir()
    done = run_ddplaunch("run", "--preload", "threaded", "--nproc", "2", script, env={"TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "tmp").iterdir())


ARROW = """
    import os, threading
    chosen = os.environ.get("JE_ARROW_MALLOC_CONF")
    if chosen != "background_thread:false":  # as pyarrow's jemalloc does when it is loaded
        threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize("theirs", [None, "background_thread:true"])
def test_monitor_threads_of_libraries_are_disabled(run_ddplaunch, tmp_path, theirs):
    """Ranks do not see the variables that disable them."""
    write_program(tmp_path, "arrow.py", ARROW)
    script = write_program(tmp_path, "train.py", "import os; print(os.environ.get('JE_ARROW_MALLOC_CONF'))")
    environment = {} if theirs is None else {"JE_ARROW_MALLOC_CONF": theirs}
    done = run_ddplaunch("run", "--preload", "arrow", "--nproc", "2", script, env=environment)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[0] {theirs}", f"[1] {theirs}"]
    assert ("started as new interpreters: 2 threads" in done.stderr) == (theirs is not None)


def test_a_slow_removal_does_not_end_the_job(run_ddplaunch, tmp_path):
    """After this preload ranks cannot be forked, so they start one by one."""
    slow = """
        import atexit, threading, time
        def drop():
            time.sleep(60); import shutil; shutil.rmtree("nothing")
        atexit.register(drop)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    """
    write_program(tmp_path, "slow.py", slow)
    write_program(tmp_path, "train.py", "print('trained')")
    done = run_ddplaunch("run", "--preload", "slow", "--nproc", "2", "train.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] trained", "[1] trained"]), done.stderr
    assert "ranks are not forked but started as new interpreters" in done.stderr
