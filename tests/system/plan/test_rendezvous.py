"""Tests of where rank 0's store is, and of addresses that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.plan.rendezvous import SourcedValue, check_init_method, choose_backend, locate_store, uses_nccl

NOT_A_HOST = "is not a host name"

ENVIRON = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(
    ("given", "environ", "address", "port"),
    [
        ({"nnodes": 1}, ENVIRON, ("127.0.0.1", "one node"), ("0", "any free port")),
        ({"nnodes": 1, "port": 0}, {}, ("127.0.0.1", "one node"), ("0", "any free port")),
        ({"nnodes": 1, "port": 5000}, {}, ("127.0.0.1", "one node"), ("5000", "--master-port")),
        ({"nnodes": 1, "address": "localhost"}, {}, ("localhost", "--master-addr"), ("0", "any free port")),
        ({"nnodes": 2}, ENVIRON, ("10.0.0.9", "MASTER_ADDR"), ("4000", "MASTER_PORT")),
        ({"nnodes": 2, "address": "a-1.b"}, ENVIRON, ("a-1.b", "--master-addr"), ("4000", "MASTER_PORT")),
        ({"nnodes": 2, "port": 7}, ENVIRON, ("10.0.0.9", "MASTER_ADDR"), ("7", "--master-port")),
        ({"nnodes": 2}, {}, ("NODE0", "missing"), ("29500", "assumed")),
        ({"nnodes": 2, "here": "gpu-a"}, {}, ("gpu-a", "assumed"), ("29500", "assumed")),
        ({"nnodes": 2, "here": "gpu-a"}, {"MASTER_ADDR": ""}, ("gpu-a", "assumed"), ("29500", "assumed")),
        ({"nnodes": 2, "address": "fe80::1%eth0"}, {}, ("fe80::1%eth0", "--master-addr"), ("29500", "assumed")),
        ({"nnodes": 2, "method": "tcp://h:99"}, ENVIRON, ("h", "--init-method"), ("99", "--init-method")),
        ({"nnodes": 1, "method": "tcp://[::1]:99"}, {}, ("::1", "--init-method"), ("99", "--init-method")),
        (
            {"nnodes": 2, "method": "tcp://h:99", "address": "h", "port": 99},
            {},
            ("h", "--init-method"),
            ("99", "--init-method"),
        ),
    ],
)
def test_locate(given, environ, address, port):
    found = locate_store(
        given.get("address"),
        given.get("port"),
        given.get("method"),
        nnodes=given["nnodes"],
        here=given.get("here"),
        environ=environ,
    )
    assert found == (SourcedValue(*address), SourcedValue(*port))


@pytest.mark.parametrize(
    ("address", "port", "method", "nnodes", "environ", "message"),
    [
        (None, 0, None, 2, {}, "--master-port 0: several nodes must agree on a port"),
        (None, None, None, 2, {"MASTER_PORT": "http"}, "MASTER_PORT http: expected a port"),
        (None, None, None, 2, {"MASTER_PORT": "70000"}, "MASTER_PORT 70000: expected a port"),
        (None, None, None, 2, {"MASTER_ADDR": "a b"}, f"MASTER_ADDR a b {NOT_A_HOST}"),
        ("10.0.0.300", None, None, 2, {}, f"--master-addr 10.0.0.300 {NOT_A_HOST}"),
        ("10.0.0.1:29500", None, None, 2, {}, f"--master-addr 10.0.0.1:29500 {NOT_A_HOST}"),
        ("http://x", None, None, 2, {}, f"--master-addr http://x {NOT_A_HOST}"),
        ("", None, None, 1, {}, f"--master-addr  {NOT_A_HOST}"),
        (None, None, "tcp://h:0", 1, {}, "--init-method 0: expected a port"),
        (None, None, "tcp://h:70000", 1, {}, "--init-method 70000: expected a port"),
        (None, 98, "tcp://h:99", 1, {}, "--init-method tcp://h:99 and --master-port 98 contradict"),
        ("g", 99, "tcp://h:99", 1, {}, "--init-method tcp://h:99 and --master-addr g contradict"),
    ],
)
def test_invalid_addresses_of_the_store_are_refused(address, port, method, nnodes, environ, message):
    with pytest.raises(UsageError) as refusal:
        locate_store(address, port, method, nnodes=nnodes, here=None, environ=environ)
    assert refusal.value.message.startswith(message)
    assert refusal.value.hint


@pytest.mark.parametrize("method", [None, "env://", "tcp://10.0.0.1:29500", "tcp://[::1]:1"])
def test_init_methods(method):
    check_init_method(method)


def test_init_method_in_a_file(tmp_path: Path):
    check_init_method(f"file://{tmp_path}/store")
    (tmp_path / "there").touch()
    check_init_method(f"file://{tmp_path}/there")


@pytest.mark.parametrize("method", ["http://x", "tcp://x", "tcp://:1", "", "env", "file:/x", "zk://x:1"])
def test_unknown_init_methods(method):
    with pytest.raises(UsageError, match="unknown --init-method"):
        check_init_method(method)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("store", "the path must be absolute"),
        ("/", "/ is a folder"),
        ("{tmp}/no/store", "folder {tmp}/no does not exist"),
        ("/proc/self/store", "/proc/self/store is not writable"),  # not even by root
    ],
)
def test_files_that_cannot_be(path, message, tmp_path: Path):
    with pytest.raises(UsageError) as refusal:
        check_init_method("file://" + path.format(tmp=tmp_path))
    assert message.format(tmp=tmp_path) in refusal.value.message


@pytest.mark.parametrize(
    ("asked", "method", "of_device", "chosen"),
    [
        (None, None, "nccl", None),
        ("gloo", None, "nccl", "gloo"),
        ("NCCL", None, "gloo", "nccl"),
        ("auto", None, "nccl", "nccl"),
        ("auto", None, "xccl", "xccl"),
        (None, "env://", "gloo", "gloo"),
    ],
)
def test_backend(asked, method, of_device, chosen):
    assert choose_backend(asked, method, of_device) == chosen


@pytest.mark.parametrize(
    ("name", "nccl"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False), ("nccl2", False), (None, False)]
)
def test_is_nccl(name, nccl):
    assert uses_nccl(name) is nccl
