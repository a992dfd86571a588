"""Tests of ``report A B``: what differs between runs, and how they went."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from msgspec.structs import replace

from ddplaunch.features.runs import comparison_report, rerun_check
from ddplaunch.features.runs.printed_step_rate import find_step_rate
from ddplaunch.features.runs.provenance import GitState, Provenance
from ddplaunch.features.runs.run_comparison import Row, compare_arguments, compare_provenance, read_arguments
from ddplaunch.observe.history import history_store
from tests.conftest import assert_refused, write_program
from tests.features.runs.test_provenance import git, project  # noqa: F401, a fixture
from tests.observe.history.test_history import keep
from tests.start_modes import FORKED, LIGHT

pytestmark = pytest.mark.usefixtures("state")

TRAIN = """
import os, sys
rank = os.environ["RANK"]
print(f"\\r100%|####| 300/300 [00:24<00:00, 1{sys.argv.count('--amp')}.5it/s]")
print("rank", rank, "loss 0.25 after 300 steps", flush=True)
print("done", flush=True)
sys.exit(int(sys.argv[-1]))
"""


def cells(text: str) -> dict[str, list[str]]:
    """The rows of the tables by their first cell."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def two_runs(run_ddplaunch, project):  # noqa: F811
    """Two runs of a program, which was committed and changed between them; their names."""
    write_program(project, "train.py", TRAIN)
    git(project, "commit", "-qam", "train")
    run_ddplaunch("run", *LIGHT, "--nproc", "2", "--run-id", "first", "train.py", "--lr", "0.1", "0", cwd=project)
    write_program(project, "model.py", "WIDTH = 7")
    write_program(project, "train.py", f"{TRAIN}# more\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "wider")
    (project / "train.py").write_text(f"{TRAIN}# changed\n")
    words = ("--nproc", "3", "--run-id", "second", "train.py", "--lr", "0.2", "--amp", "3")
    run_ddplaunch("run", *LIGHT, *words, cwd=project)
    return "first", "second"


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        (" 30%|###  | 30/100 [00:02<00:05, 14.0it/s]\r 31%|###  | 31/100 [00:02<00:05, 13.5it/s]\nloss 0.5", 13.5),
        ("Epoch 1: 100%|####| 20/20 [00:40<00:00,  0.50it/s, v_num=0]", 0.5),
        ("2/9 [00:08<00:28,  4.00s/it]", 0.25),
        ("{'train_runtime': '2.1', 'train_samples_per_second': '80', 'train_steps_per_second': '9.5'}\n5.0it/s", 9.5),
        ("{'eval_steps_per_second': 40.1}", None),
        ("steps: 120/1000, 12.3/s, 1:12 left\nsteps: 240/1000, 1.23e+03/s", 1230.0),
        ("step 3 | 8.25 steps/sec | 3,000 tokens/s", 8.25),
        ("read 3.5 MB/s, 12 bit/s", None),
        ("0/9 [00:00<?, ?it/s]", None),
        ("0.00s/it 9e999it/s", None),
        ("", None),
    ],
)
def test_steps_a_second_as_programs_print_them(text, rate):
    assert find_step_rate(text) == rate


def test_a_table_of_what_differs_and_how_it_went(run_in_fork, two_runs, project, tmp_path):  # noqa: F811
    done = run_in_fork("report", *two_runs)
    assert (done.returncode, done.stderr) == (0, "")
    found = cells(done.stdout)
    assert found["DIFFERS"] == [*two_runs]
    assert found["--nproc"] == ["2", "3"]
    assert found["--lr"] == ["0.1", "0.2"]
    assert found["--amp"] == ["-", "3"]  # it cannot be told that this is an argument of its own
    assert found["diffstat"] == ["-", "2 files, +2 -0"]
    last, now = git(project, "rev-parse", "HEAD~1")[:12], git(project, "rev-parse", "HEAD")[:12]
    assert found["commit"] == [f"{last} on main", f"{now} on main, 1 file changed"]
    assert found["changes"] == ["none", "version 1"]
    assert not {"Python", "torch", "host", "folder", "msgspec"} & {*found}
    assert found["state"] == ["done", "failed (3)"]
    assert found["ranks"] == ["2", "3"]
    assert found["last line"] == ["rank 0 loss 0.25 after 300 steps"] * 2
    assert found["steps/s"] == ["10.5", "11.5"]
    assert [cell.endswith("MiB") for cell in found["peak memory"]] == [True, True]
    as_json = json.loads(run_in_fork("report", *two_runs, "--json").stdout)
    assert as_json["runs"] == [*two_runs]
    assert as_json["differs"]["--lr"] == {"first": "0.1", "second": "0.2"}
    assert as_json["differs"]["diffstat"] == {"first": None, "second": "2 files, +2 -0"}
    assert [as_json["results"][name]["code"] for name in two_runs] == [0, 3]
    assert [as_json["results"][name]["steps_per_second"] for name in two_runs] == [10.5, 11.5]
    page = tmp_path / "both.html"
    assert run_in_fork("report", *two_runs, "--html", page).stdout == f"written: {page}\n"
    text = page.read_text()
    assert "<title>first and second: ddplaunch</title>" in text
    assert "<td>--lr</td><td>0.1</td><td>0.2</td>" in text
    assert text.count("<h3>") == 2


def test_equal_runs(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "print('step 7')")
    for name in ("a", "b"):
        assert run_ddplaunch("run", *FORKED, "--run-id", name, "train.py").returncode == 0
    lines = run_in_fork("report", "a", "b").stdout.splitlines()
    found = cells("\n".join(lines))
    assert found.pop("--run-id") == ["a", "b"]
    assert "DIFFERS" in lines[0]
    assert {*found} >= {"state", "lasted"}
    assert "commit" not in found


def test_runs_of_which_less_is_known(run_in_fork):
    keep(run_id="old")
    keep(run_id="older")
    done = run_in_fork("report", "old", "older")
    assert "commit and versions of old, older are not recorded" in done.stdout
    assert "nothing that is recorded differs" in done.stdout
    assert cells(done.stdout)["state"] == ["done", "done"]


def test_refusals(run_in_fork):
    for name in ("a1", "a2"):
        keep(run_id=name)
    assert_refused(run_in_fork("report", "a1", "a1"), "a1, a1 are the same run: a1", "name two runs")
    assert_refused(run_in_fork("report", "a1", "b7"), 'no run named "b7"')
    assert_refused(run_in_fork("report", "a1", "a"), '"a" matches 2 runs')
    assert_refused(run_in_fork("report", "a1", "a2", "--serve"), "--serve is for one run, not for 2", "--html FILE")
    assert_refused(run_in_fork("report", "a1", "a2", "--since", "7d"), "--since 7d is for all runs, not for a1 a2")
    assert_refused(run_in_fork("report", "a1", "a2", "--json", "--html", "x"), "contradict each other")
    assert len(history_store.list_runs()) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --lr 0.1 --amp", {"argument 1": "train.py", "--lr": "0.1", "--amp": "set"}),
        ("train.py --lr=0.1 -1", {"argument 1": "train.py", "--lr": "0.1", "argument 2": "-1"}),
        ("--merge train.py lr=0.1", {"--merge": "set", "argument 1": "train.py", "lr": "0.1"}),
        ("train.py --tag a --tag b", {"argument 1": "train.py", "--tag": "a b"}),
        ("train.py --shift -0.5", {"argument 1": "train.py", "--shift": "-0.5"}),
    ],
)
def test_arguments_by_name(words, expected):
    assert read_arguments(words.split(), {"--merge"}) == expected


def test_only_arguments_that_differ_are_listed():
    words = [["train.py", "--lr", "1", "x"], ["train.py", "--lr", "2", "x"], ["train.py", "x"]]
    assert [*compare_arguments(words)] == [Row("--lr", ("1", "2", "-"))]


def test_versions_machines_and_variables():
    git_state = GitState("/p", "1" * 40, "main", changed=("a.py",))
    base = Provenance("n0", "3.11.7", "2.12", "12.4", gpus=("H100", "H100"), packages={"numpy": "1.0"}, git=git_state)
    other = Provenance(
        "n1",
        "3.11.7",
        "2.13",
        "12.4",
        gpus=("A100",),
        packages={"numpy": "2.0"},
        variables=("NCCL_DEBUG",),
        git=git_state,
    )
    assert [*compare_provenance([base, other], [b"a", b"b"])] == [
        Row("changes", ("version 1", "version 2")),
        Row("torch", ("2.12", "2.13")),
        Row("host", ("n0", "n1")),
        Row("GPUs", ("2 x H100", "A100")),
        Row("numpy", ("1.0", "2.0")),
        Row("$NCCL_DEBUG", ("-", "set")),
    ]
    assert next(compare_provenance([base, None], [b"a", b""])) == Row(
        "commit", ("1" * 12 + " on main, 1 file changed", "-")
    )
    many = [Provenance("n0", "3.11.7", packages={f"p{n}": version for n in range(30)}) for version in ("1", "2")]
    rows = [*compare_provenance(many, [b"", b""])]
    assert (len(rows), rows[-1]) == (21, Row("and 10 more packages", ("…", "…")))


def test_the_row_of_further_packages_has_no_values(monkeypatch, tmp_path):
    """Before a rerun it is a line of its own, not a difference of "…" and "…"."""
    before = Provenance("n0", "3.11.2", packages={f"p{number:02}": "1" for number in range(30)})
    now = replace(before, packages=dict.fromkeys(before.packages, "2"))
    monkeypatch.setattr(rerun_check, "read_current_provenance", lambda folder: (now, b""))
    monkeypatch.setattr(rerun_check, "MAX_DIFFERENCES", 50)
    lines = rerun_check.describe_differences("r", before, b"", str(tmp_path), with_code=True)
    assert lines[0] == "p00: 1 then, 2 now"
    assert lines[20] == "and 10 more packages"


def test_a_run_that_is_deleted_while_it_is_compared(run_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", "print('step 7')")
    for name in ("a", "b"):
        assert run_ddplaunch("run", *FORKED, "--run-id", name, "train.py").returncode == 0
    runs = comparison_report.find_compared_runs(["a", "b"])
    shutil.rmtree(history_store.run_dir("b"))
    comparison_report.write_comparison(runs, str(tmp_path / "both.html"))
    assert "<title>a and b: ddplaunch</title>" in (tmp_path / "both.html").read_text()


def test_a_hook_of_git_does_not_change_what_is_compared(project, monkeypatch, tmp_path):  # noqa: F811
    """Its variables name the repository and the index of the commit that it is run for."""
    first = git(project, "rev-parse", "HEAD")
    write_program(project, "train.py", "print('trained longer')")
    git(project, "commit", "-qam", "longer")
    states = [GitState(str(project), commit) for commit in (first, git(project, "rev-parse", "HEAD"))]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    before, after = (Provenance("n0", "3.11.2", git=state) for state in states)
    assert comparison_report.describe_diff(before, after) == "1 file, +1 -1"
