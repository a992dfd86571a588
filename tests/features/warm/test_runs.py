"""Tests that a run from a warm zygote is like any other: program, variables, output and end."""

import os
import re

import pytest

from tests.conftest import write_program
from tests.features.warm.conftest import BUSY, SHOWS, WAITS, Shell, wait_for_exit, wait_for_text
from tests.features.warm.test_kills import import_slowly

pytestmark = pytest.mark.slow


@pytest.mark.ci
def test_torch_itself_is_imported_once(tmp_path):
    shell = Shell(tmp_path, {"PYTHONPATH": ""})
    try:
        text = """
            import os, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            sum = torch.ones(1)
            dist.all_reduce(sum)
            dist.destroy_process_group()
            print("sum", int(sum), "seed", torch.initial_seed(), flush=True)
        """
        write_program(tmp_path, "reduces.py", text)
        runs = [shell.run(shell.launch("--log-dir", "log", "reduces.py")) for _ in range(2)]
        assert [each.code for each in runs] == [0, 0], runs
        assert all(each.stdout.count("sum 2") == 2 for each in runs)
        assert len(set(re.findall(r"seed (\d+)", "".join(each.stdout for each in runs)))) == 4
        assert shell.reasons("log") == []
        (line,) = shell.warm().stdout.splitlines()[1:]
        assert re.search(r" MiB .* 2 +torch +" + re.escape(str(tmp_path)), line)
    finally:
        shell.close()


@pytest.mark.ci
def test_edited_user_files_are_used(shell: Shell):
    write_program(shell.folder, "beside.py", "value = 'old'\n")
    write_program(shell.folder, "shows.py", SHOWS + "import beside\nprint(beside.value, flush=True)\n")
    first = shell.run()
    write_program(shell.folder, "beside.py", "value = 'newer'\n")
    write_program(shell.folder, "shows.py", SHOWS + "import beside\nprint('now', beside.value, flush=True)\n")
    second = shell.run()
    assert second.made == first.made
    assert second.stdout.count("now newer") == 2


@pytest.mark.ci
def test_a_rank_sees_what_that_of_a_cold_run_sees(shell: Shell):
    """A rank has the same variables, descriptors, streams, limits and signals as one of a cold run."""
    text = """
        import os, resource, signal, stat, sys
        def kind(fd):
            try:
                return stat.S_IFMT(os.fstat(fd).st_mode)
            except OSError:
                return None
        own = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "DDPLAUNCH_PREEMPTED_FILE")
        environ = {name: value for name, value in os.environ.items() if name not in own}
        with open("/proc/self/status") as file:
            status = [line for line in file if line.startswith(("SigB", "SigI", "SigC", "Umask", "NoNew", "Secc"))]
        print(sorted(environ.items()), sys.argv, sys.path, sys.flags, [kind(fd) for fd in range(1100)], status)
        handlers = [str(signal.getsignal(n)).partition(" at ")[0] for n in signal.valid_signals()]
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), handlers)
        print(resource.getrlimit(resource.RLIMIT_NOFILE), os.getcwd(), os.getpgid(0) == os.getsid(0) == os.getpid())
        print(open("/proc/self/cmdline").read(), sorted(sys.modules), len(os.listdir("/proc/self/task")))
        try:
            print(os.pread(7, 5, 0), os.get_inheritable(7))
        except OSError as error:
            print(error)
    """
    write_program(shell.folder, "sees.py", text)
    write_program(shell.folder, "seven", "seven")
    cold = shell.run(shell.launch("sees.py", "--x").replace(" --warm ", " ") + " 7<seven")
    shell.run(shell.launch("sees.py", "first"))
    done = shell.run(shell.launch("sees.py", "--x") + " 7<seven")
    assert not {*re.split(r", |\n", done.stdout)} ^ {*re.split(r", |\n", cold.stdout)}
    assert done.stderr == cold.stderr
    assert "b'seven'" in cold.stdout
    assert shell.warm().stdout.splitlines()[1].split()[-3] == "2"


ENDS = """
    import os, sys, time, torch
    print("made", torch.made, flush=True)
    if os.environ["RANK"] == "0":
        open("printed", "w").close()
        time.sleep(600)  # it is still there to be stopped
    while not os.path.exists("printed"):
        time.sleep(0.01)
    os.unlink("printed")
    sys.exit(7)
"""


def test_exit_code_and_report_are_those_of_a_cold_run(shared: Shell):
    write_program(shared.folder, "ends.py", ENDS)
    cold = shared.run(shared.launch("ends.py").replace(" --warm ", " "))
    warm = [shared.run(shared.launch("ends.py")) for _ in range(2)]
    assert {cold.code, warm[0].code, warm[1].code} == {7}
    assert warm[0].made == warm[1].made

    def same(text: str) -> str:
        return re.sub(r"made \d+|\d{4,}|\d+\.\d+ s", "N", text)

    assert same(warm[1].stderr) == same(cold.stderr)


def test_a_refused_run_leaves_the_store_of_another_job(shared: Shell):
    shared.run()
    store = shared.folder / "store"
    store.write_text("of a job that runs")
    words = ("--init-method", f"file://{store}", "--metrics", "nowhere/job.prom", "shows.py")
    assert "there is no folder nowhere" in shared.run(shared.launch(*words)).stderr
    assert shared.run().code == 0  # meanwhile the fork for the refused run has ended
    assert store.read_text() == "of a job that runs"


@pytest.mark.ci
def test_a_pipe_ends_with_the_run(shell: Shell):
    for _ in range(2):
        done = shell.run(f"{shell.launch('shows.py')} 2>&1 | cat")
        assert done.stdout.count("made") == 2
    assert len(shell.list_zygotes()) == 1


@pytest.mark.parametrize(
    ("imports", "stdout", "stderr"),
    [
        ("import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n", "to stdout\n", "to stderr\n"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
         "made", ": 2 threads run"),
    ],
    ids=["prints", "starts a thread"],
)  # fmt: skip
def test_a_zygote_is_not_kept_if_its_import(shell: Shell, imports, stdout, stderr):
    shell.torch_also(imports)
    done = shell.run()
    assert done.code == 0
    assert done.stdout.count(stdout) == (2 if stdout == "made" else 1)
    assert done.stderr.count(stderr) == 1
    assert shell.list_zygotes() == []


@pytest.mark.ci
def test_open_files_variables_and_exit_handlers_of_an_import(shell: Shell):
    """An import's open files take no descriptor of a rank, its variables arrive, and its exit handlers run once."""
    shell.torch_also("""
import atexit, shutil, tempfile
kept = [open(os.devnull) for _ in range(30)]
os.environ["KMP_X"] = "set"
os.environ.pop("GOES", None)
folder = tempfile.mkdtemp(prefix="of-torch")
atexit.register(shutil.rmtree, folder)
""")
    prints = "print(os.pread(7, 5, 0), os.environ.get('KMP_X'), os.environ.get('GOES'), flush=True)\n"
    write_program(shell.folder, "shows.py", SHOWS + prints + "print('in', torch.folder, flush=True)\n")
    write_program(shell.folder, "seven", "seven")
    runs = [shell.run(before="GOES=1", after=f"7<seven {more}") for more in ("", "", "8<seven")]
    assert all(each.stdout.count("b'seven' set None") == 2 for each in runs), runs
    assert runs[0].made == runs[1].made != runs[2].made, "its 8 is taken"
    folders = {*re.findall(r"in (\S+)", runs[0].stdout + runs[1].stdout)}
    assert [os.path.exists(each) for each in folders] == [True]
    shell.warm("--stop")
    assert not any(map(os.path.exists, folders))


@pytest.mark.ci
def test_two_runs_share_a_zygote_at_once(shell: Shell):
    write_program(shell.folder, "waits.py", WAITS)
    first, one = shell.begin("exec " + shell.launch("waits.py"))
    wait_for_text(one, "made", 2)
    second, two = shell.begin("exec " + shell.launch("waits.py"))
    wait_for_text(two, "made", 2)
    (pid,) = shell.list_zygotes()
    assert f"made {pid}" in two.read_text()
    (shell.folder / "go").touch()
    wait_for_exit(first, second)
    assert shell.list_zygotes() == [pid]


@pytest.mark.ci
def test_a_zygote_that_still_imports_delays_no_other_run(shell: Shell):
    import_slowly(shell)
    first, out = shell.begin("exec " + shell.launch("shows.py"))
    wait_for_text(shell.folder / "importing", "\n")
    shell.set_reply_timeout(0.2)
    second, other = shell.begin("exec " + shell.launch("--log-dir", "log", "shows.py"))
    wait_for_text(shell.folder / "importing", "\n", 2)
    (shell.folder / "go").touch()
    wait_for_exit(first, second)
    assert out.read_text().count("made") == other.read_text().count("made") == 2
    assert shell.reasons("log") == [BUSY]
