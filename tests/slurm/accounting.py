"""The accounting of a cluster: MariaDB and slurmdbd on its controller, so that there is ``sacct``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.slurm.configuration import FOLDER

if TYPE_CHECKING:
    from tests.slurm.cluster import Slurm

COMMANDS = {"mariadbd": "mariadb-server", "slurmdbd": "slurmdbd"}
"""What there must be, and the Debian packages that have it."""

_SLURMDBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=3306
StorageUser=root
"""


def start(slurm: Slurm) -> None:
    """Start both daemons on the login host, before the controller, and give root an account."""
    host, conf = slurm.login, _SLURMDBD_CONF.format(folder=FOLDER, host=slurm.login.name)
    host.run("sh", "-ec", f"cd {FOLDER}; mkdir mariadb; umask 077; cat >slurmdbd.conf <<'END'\n{conf.lstrip()}END\n")
    # Not --skip-grant-tables, which is quicker: procedures are off then, and slurmdbd gives users wrong limits or none.
    # Its root has no password; only the host can reach it.
    shared = ("--no-defaults", "--user=root", f"--datadir={FOLDER}/mariadb", "--innodb-log-file-size=8M")
    host.run("mariadb-install-db", *shared, "--auth-root-authentication-method=normal", "--skip-test-db")
    slurm.daemon(
        host,
        "mariadbd",
        *shared,
        f"--socket={FOLDER}/mariadb.socket",
        f"--log-error={FOLDER}/mariadb.log",
        f"--pid-file={FOLDER}/mariadb.pid",
        "--bind-address=127.0.0.1",
        "--innodb-flush-log-at-trx-commit=0",
    )
    slurm.wait_until(lambda: slurm.answers(3306), "MariaDB")
    slurm.daemon(host, "slurmdbd", "-D")
    slurm.wait_until(lambda: slurm.answers(6819), "slurmdbd")
    for words in (["cluster", "test"], ["account", "test", "cluster=test"], ["user", "root", "account=test"]):
        slurm.run("sacctmgr", "--immediate", "--quiet", "add", *words)
