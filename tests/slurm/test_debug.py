"""The debugger of ranks on every node of a job of Slurm: from the login host, and from a node of the job."""

import pytest

from tests.conftest import command
from tests.slurm.test_attach import login as login
from tests.starts import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]


def test_ranks_of_all_nodes_are_reached(login, tmp_path):
    at = login()
    cluster = at.cluster
    job = at.submit("--nodes", "2", "--exclusive", "--debug", *LIGHT, "--nproc", "2", "waits.py")
    cluster.wait_for(job, "ready", 4)
    lines = tmp_path / "lines"
    lines.write_text("p 'rank', rank, os.uname().nodename\n")
    places = {}

    def debug(host, *words):
        with lines.open() as typed:
            return host.run(*command("debug", *words), cwd=cluster.folder, env=at.environment, stdin=typed)

    for rank in range(4):
        told = debug(cluster.login, str(job), "--rank", str(rank))
        assert f"(rank {rank}) p 'rank', rank" in told
        places[rank] = told.rpartition(f"('rank', '{rank}', '")[2].partition("'")[0]
    assert places[0] == places[1] != places[2] == places[3], places
    node = next(host for host in cluster.network.hosts if host.name == places[3])
    told = debug(node, f"{job}.0", "--rank", "0")  # and back
    assert f"('rank', '0', '{places[0]}')" in told
    assert at.type("stop", str(job), "--now").code == 0
