"""A Grid Engine: its daemons on virtual hosts, and its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.tools.virtual_hosts.cluster import Cluster
from tests.tools.virtual_hosts.host import Host
from tests.tools.virtual_hosts.network import Network
from tests.tools.virtual_hosts.network import unsupported as no_hosts

LIBRARY, SHARE = Path("/usr/lib/gridengine"), Path("/usr/share/gridengine")

COMMANDS = {"sge_qmaster": "gridengine-master", "sge_execd": "gridengine-exec", "qsub": "gridengine-client"}
"""What there must be, and the Debian packages that have it."""

_FOREIGN = ("SGE_", "SLURM", "JOB_ID", "PE", "CUDA_VISIBLE_DEVICES")

_BOOTSTRAP = """\
admin_user root
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {spooled}
binary_path /usr/sbin
qmaster_spool_dir {spool}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""

_ENVIRONMENT = """\
pe_name {name}
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves TRUE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""

ENVIRONMENTS = {"spread": "1", "pairs": "2", "packed": "$pe_slots"}
"""The parallel environments, each with its rule: one or two slots on each host, and all on one host."""


class GridEngine(Cluster):
    """A cluster whose nodes take jobs when this returns; commands run in ``folder``."""

    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__(network)
        self.folder = folder
        self._root, self._spool = folder / "sge", folder / "spool"
        ours = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.environment = {
            **ours,
            "SGE_ROOT": str(self._root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
        }
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def run(self, *words: str | Path, host: Host | None = None, check: bool = True) -> str:
        """Run any command on the login host, or another, and return its stdout."""
        on = host or self.login
        return on.run(*words, check=check, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL)

    def describe_state(self) -> str:
        logs = "\n".join(path.read_text() for path in self._spool.rglob("messages"))
        return self.run("qstat", "-f", check=False) + logs

    def _set_up(self) -> None:
        common = self._root / "default" / "common"
        for path in (
            common,
            self._root / "utilbin",
            *(self._spool / each for each in ("qmaster/job_scripts", "execd")),
        ):
            path.mkdir(parents=True)
        (self._root / "util").symlink_to(SHARE / "util")
        (self._root / "utilbin" / "lx-amd64").symlink_to(LIBRARY)
        spooled = f"{common};{self._spool}/qmaster"
        (common / "bootstrap").write_text(_BOOTSTRAP.format(spooled=spooled, spool=self._spool))
        (common / "act_qmaster").write_text(f"{self.login.name}\n")
        changed = {"execd_spool_dir": f"{self._spool}/execd", "min_uid": "0", "min_gid": "0", "login_shells": "none"}
        changed["reporting_params"] = "accounting=true reporting=false flush_time=00:00:01 joblog=false"
        self.run(LIBRARY / "spoolinit", "classic", "libspoolc", spooled, "init")
        conf = self._file("conf", _with((SHARE / "default-configuration").read_text(), changed))
        resources = SHARE / "util" / "resources"
        for words in ("configuration", conf), ("complexes", resources / "centry"), ("usersets", resources / "usersets"):
            self.run(LIBRARY / "spooldefaults", *words)
        self.run(LIBRARY / "spooldefaults", "managers", "root")
        self.run("sge_qmaster")
        self.wait_until(lambda: self.login.name in self.run("qconf", "-sh", check=False), "the master")
        for host in self.network.hosts:
            if host is not self.login:
                self.run("qconf", "-ah", host.name)
            self.run("qconf", "-as", host.name)
        soon = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
        self.run("qconf", "-Msconf", self._file("sched", _with(self.run("qconf", "-ssconf"), soon)))
        for name, rule in ENVIRONMENTS.items():
            self.run("qconf", "-Ap", self._file(name, _ENVIRONMENT.format(name=name, rule=rule)))
        names = " ".join(node.name for node in self.nodes)
        queue = {"hostlist": names, "pe_list": " ".join(ENVIRONMENTS), "slots": "4", "load_thresholds": "NONE"}
        queue |= {"shell": "/bin/bash", "shell_start_mode": "unix_behavior", "qname": "all.q"}
        self.run("qconf", "-Aq", self._file("queue", _with(self.run("qconf", "-sq"), queue)))
        self.start_nodes(self.nodes)

    def start_nodes(self, nodes: Sequence[Host]) -> None:
        """Let compute nodes take jobs, also those that were booted again."""
        for node in nodes:
            self.run("sge_execd", host=node)

        def ready() -> bool:
            rows = re.findall(r"^all\.q@\S+ +\S+ +\S+ +(\S+) +(\S+) *(\S*)$", self.run("qstat", "-f"), re.MULTILINE)
            return len(rows) == len(self.nodes) and all("-NA-" not in row and not row[2] for row in rows)

        self.wait_until(ready, "the queue")

    def _file(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.conf"
        path.write_text(text)
        return path


def _with(configuration: str, changed: dict[str, str]) -> str:
    """Put values into lines of a name and a value; a line that ends with a backslash goes on."""
    for name, value in changed.items():
        configuration = re.sub(rf"(?m)^{name} (.*\\\n)*.*$", f"{name} {value}", configuration)
    return configuration


def unsupported() -> str | None:
    """Why there can be no Grid Engine here; None if there can."""
    missing = sorted({package for command, package in COMMANDS.items() if shutil.which(command) is None})
    return f"apt-get install {' '.join(missing)}" if missing else no_hosts()
