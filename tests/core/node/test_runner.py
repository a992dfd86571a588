"""Tests of the runner, where the order of effects matters."""

from __future__ import annotations

from tests.constant_override import write_launcher

RECORD_CLOSING = """
    from ddplaunch.core.net.coordinator_server import CoordinatorServer
    from ddplaunch.core.node.process_tree import ProcessTree
    from ddplaunch.core.node.run_temp_dir import RunTempDir
    from ddplaunch.core.node.store_host import StoreHost

    def record(owner, name):
        original = getattr(owner, name)

        def call(self, *arguments):
            with open("closed", "a") as file:
                file.write(owner.__name__ + "\\n")
            return original(self, *arguments)

        setattr(owner, name, call)

    record(CoordinatorServer, "close")
    record(ProcessTree, "close")
    record(RunTempDir, "remove")
    record(StoreHost, "close")
"""


def test_the_order_of_closing(start_ddplaunch, tmp_path):
    """Files go after the processes that use them, and the store's port last: another job may take it then."""
    launcher = write_launcher(tmp_path, RECORD_CLOSING)
    job = start_ddplaunch("run", "--nproc", "2", "--no-python", "true", executable=launcher)
    assert job.wait() == 0, job.stderr()
    closed = (tmp_path / "closed").read_text().split()
    assert closed == ["CoordinatorServer", "ProcessTree", "RunTempDir", "StoreHost"]
