"""Tests of Slurm's node lists, compared with a table and with the real ``scontrol``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters.nodelist import expand_counts, expand_hosts

HOSTS = [
    ("n1", "n1"),
    ("login", "login"),
    ("alpha,beta,gamma", "alpha beta gamma"),
    ("n[1-3]", "n1 n2 n3"),
    ("n[7]", "n7"),
    ("n[0-0]", "n0"),
    ("n[01-03]", "n01 n02 n03"),
    ("n[00-02,5]", "n00 n01 n02 n5"),
    ("n[08-11]", "n08 n09 n10 n11"),
    ("n[8-11]", "n8 n9 n10 n11"),
    ("n[099-101]", "n099 n100 n101"),
    ("n[99-0101]", "n99 n100 n101"),
    ("n[1-010]", "n1 n2 n3 n4 n5 n6 n7 n8 n9 n10"),
    ("n[01-2]", "n01 n02"),
    ("n[3]", "n3"),
    ("gpu[3],gpu[7-9]", "gpu3 gpu7 gpu8 gpu9"),
    ("n[1-3,7,9-10]", "n1 n2 n3 n7 n9 n10"),
    ("n[008-010,12]", "n008 n009 n010 n12"),
    ("n[2,1]", "n2 n1"),
    ("n[1,1]", "n1 n1"),
    ("n1,n1", "n1 n1"),
    ("n2,n1", "n2 n1"),
    ("n007,n08", "n007 n08"),
    ("a[1-2],b,c[3]", "a1 a2 b c3"),
    ("tux[1-2]rack[3-4]", "tux1rack3 tux1rack4 tux2rack3 tux2rack4"),
    ("tux[1-2]rack[3-4],gpu[07-09]", "tux1rack3 tux1rack4 tux2rack3 tux2rack4 gpu07 gpu08 gpu09"),
    ("n[1-2][3-4]", "n13 n14 n23 n24"),
    ("rack-1-n[1-2]", "rack-1-n1 rack-1-n2"),
    ("a.b-c_d[1]", "a.b-c_d1"),
    ("gpu-st-p4d24xlarge-[1-2]", "gpu-st-p4d24xlarge-1 gpu-st-p4d24xlarge-2"),
    ("n[1-2],x,n[1-2]", "n1 n2 x n1 n2"),
    ("[1-3]", "1 2 3"),
    ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
]

COUNTS = [
    ("1", (1,)),
    ("2(x3),1", (2, 2, 2, 1)),
    ("4(x2)", (4, 4)),
    ("1,2,3", (1, 2, 3)),
    ("72(x1)", (72,)),
    ("1(x2),8,1(x2)", (1, 1, 8, 1, 1)),
]

BAD_HOSTS = [
    ("", "at its end"),
    (",", "at ',', character 1"),
    ("a,,b", "at ',b', character 3"),
    ("a,", "at its end"),
    ("a b", "at ' b', character 2"),
    ("n[1-2", "at its end: expected a comma or ]"),
    ("n[1-,3]", "at '-,3]', character 4: expected a comma or ]"),
    ("n[]", "at ']', character 3: expected a number"),
    ("n[a]", "at 'a]', character 3: expected a number"),
    ("n[1,]", "at ']', character 5: expected a number"),
    ("n[9-7]", "a range that rises, not 9-7"),
    ("n[1-2-3]", "at '-3]', character 6"),
    ("n[[1]]", "character 3: expected a number"),
    ("n]", "at ']', character 2"),
    ("(null)", "at '(null)', character 1"),
    ("n[1-99999999]", "names more than 65536 nodes"),
    ("n[1-1000][1-1000]", "names more than 65536 nodes"),
    ("n[1-999999999999999999]", "names more than 65536 nodes"),
    (f"n[{'9' * 5000}]", "character 21: expected a comma or ]"),
]

BAD_COUNTS = ["", "x", "2(x", "2(x)", "2(3)", "2,,1", "2(x3)1", "-1", "2 (x3)", "1(x99999999999)", "9" * 5000]


@pytest.mark.parametrize(("listed", "hosts"), HOSTS)
def test_hosts(listed: str, hosts: str) -> None:
    assert expand_hosts(listed, "SLURM_JOB_NODELIST") == tuple(hosts.split())


def test_three_brackets_and_names_that_go_on() -> None:
    assert len(set(expand_hosts("n[1-2]x[3-4]y[5-6]", "it"))) == 8
    assert expand_hosts("n[1-2]-ib", "it") == ("n1-ib", "n2-ib")


@pytest.mark.parametrize(("listed", "where"), BAD_HOSTS)
def test_a_list_that_does_not_parse_says_where(listed: str, where: str) -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST") as raised:
        expand_hosts(listed, "SLURM_JOB_NODELIST")
    assert where in raised.value.message


@pytest.mark.parametrize(("listed", "counts"), COUNTS)
def test_task_counts_are_expanded(listed: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(listed, "SLURM_TASKS_PER_NODE") == counts


@pytest.mark.parametrize("listed", BAD_COUNTS)
def test_counts_that_do_not_parse(listed: str) -> None:
    with pytest.raises(UsageError, match="SLURM_TASKS_PER_NODE"):
        expand_counts(listed, "SLURM_TASKS_PER_NODE")


@pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm's scontrol is not installed here")
def test_the_same_as_scontrol(tmp_path: Path) -> None:
    """scontrol needs a configuration, but no controller, to expand a list."""
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    for listed, _ in HOSTS:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            env={**os.environ, "SLURM_CONF": str(configuration)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert list(expand_hosts(listed, "it")) == done.stdout.split(), listed
