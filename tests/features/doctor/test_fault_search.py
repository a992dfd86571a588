"""Tests of the search for bad hosts, with made-up commands that fail on random sets of hosts."""

import itertools
import random

import pytest

from ddplaunch.features.doctor.bisect_command import format_report
from ddplaunch.features.doctor.fault_search import FAILURES_TO_BLAME, MAX_FAULTS, FaultSearch, HostFault, TrialResult


def search(hosts, gives):
    """Search with a command of which ``gives(set)`` says what it gives; return the search and the sets tried."""
    found = FaultSearch(hosts)
    trials, tried = found.run(), []
    trial = None
    while True:
        try:
            tried.append(trials.send(trial))
        except StopIteration:
            return found, tried
        trial = gives(frozenset(tried[-1]))


def fails_with(*faults):
    return lambda hosts: TrialResult.FAILED if any(fault <= hosts for fault in faults) else TrialResult.PASSED


def names(count):
    return [f"n{number}" for number in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_bad_hosts_are_found_and_the_rest_passes(seed):
    draw = random.Random(seed)
    hosts = names(draw.randint(1, 40))
    bad = draw.sample(hosts, draw.randint(0, min(4, len(hosts) // 2)))  # not all: that would be the command
    found, tried = search(hosts, fails_with(*({host} for host in bad)))
    assert set(found.excluded_hosts) == set(bad)
    assert found.faults == [HostFault((fault.hosts[0],), fault.hosts) for fault in found.faults]
    assert (found.flaky, found.fails_everywhere) == ([], False)
    assert set(found.good_hosts) == set(hosts) - set(bad)
    depth = (len(hosts) - 1).bit_length()
    assert len(tried) <= 1 + len(bad) * (2 * depth + FAILURES_TO_BLAME)


@pytest.mark.parametrize("seed", range(40))
def test_faults_between_hosts_are_found_and_the_rest_passes(seed):
    draw = random.Random(seed)
    hosts = names(draw.randint(6, 24))
    faults = [frozenset(draw.sample(hosts, draw.choice([1, 2, 2, 2, 3]))) for _ in range(draw.randint(1, 3))]
    gives = fails_with(*faults)
    found, _ = search(hosts, gives)
    least = [fault for fault in faults if not any(other < fault for other in faults)]
    assert all(frozenset(fault.hosts) in least for fault in found.faults)
    assert set(found.excluded_hosts).isdisjoint(found.good_hosts)
    assert set(found.excluded_hosts) | set(found.good_hosts) == set(hosts)
    assert gives(frozenset(found.good_hosts)) is TrialResult.PASSED
    assert len(found.excluded_hosts) <= sum(map(len, least))


@pytest.mark.parametrize("count", [3, 8, 13])
def test_a_host_that_fails_with_any_other_is_named_and_its_partner_kept(count):
    for bad in names(count):
        found, _ = search(names(count), lambda hosts, bad=bad: TrialResult(["passed", "failed"][bad in hosts > {bad}]))
        (fault,) = found.faults
        assert (fault.left_out, fault.with_others, len(fault.hosts)) == ((bad,), True, 2)
        assert len(found.good_hosts) == count - 1
        line, rest = format_report(found, stopped=False)
        assert line.startswith(f"{bad} is bad: it passes alone and fails with others; ")
        assert rest == f"the other {count - 1} hosts pass together"


LINKS = "n0,n1 failed together, 3 times, but pass without any one of them: check the links between them"


def test_of_two_that_fail_together_alone_one_is_left_out():
    found, _ = search(names(8), fails_with({"n2", "n5"}))
    assert found.faults == [HostFault(("n2", "n5"), ("n5",), False)]
    assert found.good_hosts == tuple(host for host in names(8) if host != "n5")
    found, _ = search(names(2), fails_with({"n0", "n1"}))
    assert found.faults == [HostFault(("n0", "n1"), ("n1",), False)]
    assert [*format_report(found, stopped=False)] == [f"{LINKS}; excluding n1 is enough", "the last host passes alone"]
    found = FaultSearch(names(2))  # it was stopped before hosts were readmitted
    found.faults.append(HostFault(("n0", "n1")))
    assert [*format_report(found, stopped=True)] == [LINKS, "stopped: unknown whether the other hosts pass together"]


def test_bad_hosts_that_come_first_do_not_look_like_all():
    found, _ = search(names(32), fails_with({"n0"}, {"n1"}, {"n2"}))
    assert (found.excluded_hosts, found.fails_everywhere) == (("n0", "n1", "n2"), False)


@pytest.mark.parametrize("needs", [1, 2])
def test_a_command_that_never_passes_is_given_up_soon(needs):
    found, tried = search(names(64), lambda hosts: TrialResult.FAILED if len(hosts) >= needs else TrialResult.PASSED)
    assert (found.fails_everywhere, len(found.faults), found.excluded_hosts) == (True, MAX_FAULTS, ())
    assert len(tried) < 60
    failed = ", ".join(",".join(fault.hosts) for fault in found.faults)
    reason = "no run on as many hosts passed: check COMMAND itself"
    assert [*format_report(found, stopped=False)] == [f"COMMAND failed 3 times on each of: {failed}; {reason}"]


def test_a_host_that_failed_once_is_flaky_and_not_excluded():
    result = set()

    def gives(hosts):
        if "n3" not in hosts or (hosts == {"n3"} and hosts in result):
            return TrialResult.PASSED
        result.add(hosts)
        return TrialResult.FAILED

    found, _ = search(names(6), gives)
    assert (found.faults, found.flaky, found.excluded_hosts) == ([], [("n3",)], ())
    once = "n3 failed, but not in a second run: not counted as bad"
    assert [*format_report(found, stopped=False)] == [once, "the other 5 hosts pass together"]


def test_a_skipped_host_is_not_bad_and_others_are_found():
    """A test that needs two hosts skips one alone."""

    def gives(hosts):
        return TrialResult.SKIPPED if len(hosts) < 2 else fails_with({"n6"})(hosts)

    found, _ = search(names(8), gives)
    assert found.excluded_hosts == ("n6",)
    found, tried = search(names(8), lambda hosts: TrialResult.SKIPPED)
    assert (found.faults, found.good_hosts, len(tried)) == ([], None, 1)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_ends_for_random_results(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    found, tried = search(names(count), lambda hosts: draw.choice(list(TrialResult)))
    assert len(tried) <= 12 * count
    named = [*itertools.chain(*(fault.hosts for fault in found.faults)), *itertools.chain(*found.flaky)]
    assert len(named) == len(set(named))
    assert set(found.excluded_hosts) <= set(named)
