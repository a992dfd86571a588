"""Histories of the programs of one node, replayed without processes, and random ones.

``DDPLAUNCH_HISTORIES=100000 pytest -s tests/features/programs/test_machine.py -k random`` checks more of them.
"""

import os
import signal
import time
from random import Random

import pytest

from ddplaunch.base.text import signal_name
from ddplaunch.core.deadlines import Now
from ddplaunch.features.programs import program_commands as do
from ddplaunch.features.programs import program_events as ev
from ddplaunch.features.programs.machine import ALIVE, Gate, ProgramsMachine, ProgramState
from ddplaunch.features.programs.program_commands import Life
from ddplaunch.features.programs.spec import ProgramSpec

HISTORIES = int(os.environ.get("DDPLAUNCH_HISTORIES", "3000"))


def program(name, kind="service", after=(), ready="tcp", grace_s=30.0, restarts=0):
    return ProgramSpec(name, (name,), kind, ready, 60.0, after, {}, grace_s, restarts=restarts)


def describe(command, names):
    match command:
        case do.Spawn(number=number):
            return f"spawn {names[number]}"
        case do.Probe(number=number):
            return f"probe {names[number]}"
        case do.SendSignal(number=number, signal=which):
            return f"{signal_name(which)} to {names[number]}"
        case do.KillLeftovers(number=number):
            return f"kill what {names[number]} has left"
        case do.OpenGate():
            return "start the ranks"
        case do.ReportReady(number=number):
            return f"{names[number]} is ready"
        case do.ReportFailure(code=code, reason=reason):
            return f"fail with {code}: {reason}"
        case do.ReportMainDone(number=number):
            return f"{names[number]} is done"
        case do.ReportMainEnded(number=number):
            return f"{names[number]} has ended"
        case do.ShowNote(text=text):
            return f"note: {text}"
        case do.ShowFooter(text=text):
            return f"footer: {text}"
        case do.SweepGuard(life=life, grace_s=grace_s):
            return f"sweep {life.value} in {grace_s:g} s"
        case do.StartGuard(life=life) | do.CloseGuard(life=life) | do.KillGuard(life=life):
            return f"{type(command).__name__} {life.value}"
        case do.KillRemaining():
            return "kill the rest"


class Story:
    """``at`` lets one event happen, and checks all commands that follow from it."""

    def __init__(self, *specs, after=None):
        self.names = [spec.name for spec in specs]
        services = [spec.name for spec in specs if spec.kind == "service"] if after is None else after
        self.machine = ProgramsMachine(specs, Gate(services, "train.py"))

    def at(self, seconds, event, *expected):
        commands = self.machine.on(event, Now(seconds, seconds))
        assert [describe(each, self.names) for each in commands] == list(expected)


JOB, ATTEMPT = Life.JOB, Life.ATTEMPT
BEGIN = ev.AttemptBegins(0)


def started(*specs, **how):
    """A story in which the guard is ready, with the first program starting."""
    story = Story(*specs, **how)
    story.machine.on(BEGIN, Now(0, 0))
    story.machine.on(ev.GuardStarted(ATTEMPT), Now(0, 0))
    return story


def running(*specs, **how):
    """A story in which all programs are ready."""
    story = started(*specs, **how)
    for number, _ in enumerate(specs):
        for event in (ev.ProgramSpawned(number), ev.ConditionMet(number)):
            story.machine.on(event, Now(1, 1))
    assert all(each.state is ProgramState.READY for each in story.machine.programs)
    return story


def test_one_after_the_other_then_the_ranks_and_back():
    story = Story(program("vllm"), program("env", after=("vllm",)))
    story.at(0, BEGIN, "StartGuard attempt")
    story.at(0, ev.GuardStarted(ATTEMPT), "spawn vllm")
    story.at(0, ev.ProgramSpawned(0), "probe vllm", "footer: waiting for vllm (tcp)")
    story.at(70, ev.ConditionMet(0), "vllm is ready", "footer: ", "spawn env")
    story.at(70, ev.ProgramSpawned(1), "probe env", "footer: waiting for env (tcp)")
    story.at(71, ev.ConditionMet(1), "env is ready", "footer: ", "start the ranks")
    story.at(90, ev.JobFinished(signal.SIGTERM), "SIGTERM to env")
    story.at(91, ev.ProgramExited(1, 0), "SIGTERM to vllm")
    story.at(92, ev.ProgramExited(0, -15), "sweep attempt in 29 s")
    story.at(93, ev.GuardSwept(ATTEMPT), "CloseGuard attempt")
    assert story.machine.is_over
    assert story.machine.wake_at() is None


def test_a_server_that_loses_sigterm_while_it_loads_gets_it_again():
    story = started(program("vllm"))
    story.at(0, ev.ProgramSpawned(0), "probe vllm", "footer: waiting for vllm (tcp)")
    story.at(5, ev.JobFinished(signal.SIGTERM), "footer: ", "SIGTERM to vllm")
    story.at(20, ev.ConditionMet(0), "SIGTERM to vllm")
    story.at(21, ev.ProgramExited(0, 0), "sweep attempt in 14 s")


@pytest.mark.parametrize(("code", "exit_code", "how"), [(3, 3, "exited with code 3"), (0, 1, "exited with code 0")])
def test_a_service_that_ends_before_it_is_ready(code, exit_code, how):
    story = started(program("vllm"))
    story.at(0, ev.ProgramSpawned(0), "probe vllm", "footer: waiting for vllm (tcp)")
    story.at(1, ev.ProgramExited(0, code), "footer: ", f"fail with {exit_code}: vllm {how} before it was ready")


def test_a_service_that_is_not_ready_in_time():
    story = started(program("vllm"))
    story.at(0, ev.ProgramSpawned(0), "probe vllm", "footer: waiting for vllm (tcp)")
    assert story.machine.wake_at() == 60
    story.at(60, ev.DeadlineDue(), "footer: ", "fail with 124: vllm was not ready within 1m00s (tcp)")
    story.at(61, ev.ProgramExited(0, 1))


def test_of_two_failures_the_first_is_reported():
    story = running(program("vllm"), program("env"))
    killed = "was ended by SIGKILL (killed from outside) before train.py was done"
    story.at(5, ev.ProgramExited(0, -9), f"fail with 137: vllm {killed}")
    story.at(5, ev.ProgramExited(1, 1))


def test_mains():
    story = running(program("one", "main", ready=""), program("two", "main", ready=""))
    story.at(5, ev.ProgramExited(0, 0), "one is done")
    story.at(6, ev.ProgramExited(1, 0), "two is done")
    other = running(program("one", "main", ready=""), program("two", "main", ready=""))
    other.at(5, ev.ProgramExited(0, 9), "fail with 9: one exited with code 9", "one has ended")
    other.at(6, ev.ProgramExited(1, 0), "two is done")


def test_a_program_starts_again_alone_after_longer_and_longer_waits():
    story = running(program("vllm"), program("env", restarts=2))
    for number, (seconds, delay) in enumerate(((100, 10), (200, 20)), 1):
        note = f"note: env exited with code 3: starting it again in {delay} s (restart {number} of 2)"
        story.at(seconds, ev.ProgramExited(1, 3), "kill what env has left", note)
        assert story.machine.wake_at() == seconds + delay
        story.at(seconds + delay, ev.DeadlineDue(), "spawn env")
        story.at(seconds + delay, ev.ProgramSpawned(1), "probe env")
        story.at(seconds + delay + 1, ev.ConditionMet(1), "env is ready")
    failed = "fail with 3: env exited with code 3 before train.py was done, after 2 restarts"
    story.at(300, ev.ProgramExited(1, 3), failed)


def test_a_main_that_has_returned_0_does_not_start_again_and_no_program_after_a_failure():
    story = running(program("orch", "main", ready="", restarts=2), program("env", restarts=1), program("vllm"))
    story.at(5, ev.ProgramExited(0, 0), "orch is done")
    killed = "was ended by SIGKILL (killed from outside) before train.py was done"
    story.at(5, ev.ProgramExited(2, -9), f"fail with 137: vllm {killed}")
    story.at(5, ev.ProgramExited(1, 1))


def test_the_job_ends_while_a_program_waits_to_start_again():
    story = running(program("env", restarts=1))
    note = "note: env exited with code 1: starting it again in 10 s (restart 1 of 1)"
    story.at(5, ev.ProgramExited(0, 1), "kill what env has left", note)
    story.at(6, ev.JobFinished(signal.SIGTERM), "sweep attempt in 0 s")
    story.at(7, ev.GuardSwept(ATTEMPT), "CloseGuard attempt")
    assert story.machine.wake_at() is None


def test_the_footer_names_programs_of_other_nodes():
    story = Story(program("vllm"))
    story.machine = ProgramsMachine([program("vllm")], Gate(["vllm", "far"], "train.py", ["far"]))
    story.at(0, BEGIN, "StartGuard attempt", "footer: waiting for far")
    story.at(0, ev.GuardStarted(ATTEMPT), "spawn vllm")
    story.at(0, ev.ProgramSpawned(0), "probe vllm", "footer: waiting for vllm (tcp), far")
    story.at(5, ev.ConditionMet(0), "vllm is ready", "footer: waiting for far")
    story.at(6, ev.ReadyElsewhere(("far", "vllm")), "footer: ", "start the ranks")


def test_ctrl_c_reaches_mains_with_the_ranks_and_services_when_mains_are_gone():
    story = running(program("vllm"), program("orch", "main", after=("vllm",), ready=""))
    story.at(5, ev.RanksStopped(signal.SIGINT), "SIGINT to orch")
    story.at(6, ev.JobFinished(signal.SIGINT))
    story.at(35, ev.DeadlineDue(), "SIGKILL to orch", "note: orch did not end within 30 s of SIGINT, and was killed")
    story.at(35, ev.ProgramExited(1, -9), "SIGTERM to vllm")
    story.at(36, ev.ProgramExited(0, 0), "sweep attempt in 29 s")


def test_a_program_that_gets_its_process_during_the_stop():
    story = started(program("vllm"))
    story.at(1, ev.JobFinished(signal.SIGTERM))
    story.at(1, ev.ProgramSpawned(0), "SIGTERM to vllm")


def test_a_sidecar_that_ends_and_one_that_does_not_start():
    story = Story(program("tb", "sidecar", ready=""), program("watch", "sidecar", ready=""))
    story.at(0, BEGIN, "StartGuard job", "start the ranks")
    story.at(0, ev.GuardStarted(JOB), "spawn tb", "spawn watch")
    story.at(0, ev.ProgramStartFailed(1, "no memory"), "note: watch cannot be started: no memory")
    story.at(0, ev.ProgramSpawned(0), "tb is ready")
    story.at(5, ev.ProgramExited(0, 4, "no events"), "note: tb exited with code 4, the job continues: no events")
    story.at(9, ev.JobFinished(signal.SIGTERM), "sweep job in 0 s")


def test_a_restart_ends_all_but_sidecars_and_starts_them_again():
    story = running(program("vllm"))
    story.machine = ProgramsMachine([program("vllm"), program("tb", "sidecar", ready="")], Gate(["vllm"], "train.py"))
    story.names = ["vllm", "tb"]
    story.at(0, BEGIN, "StartGuard attempt", "StartGuard job")
    for life, number in ((ATTEMPT, 0), (JOB, 1)):
        story.machine.on(ev.GuardStarted(life), Now(0, 0))
        story.machine.on(ev.ProgramSpawned(number), Now(0, 0))
    story.at(1, ev.ConditionMet(0), "vllm is ready", "footer: ", "start the ranks")
    story.at(9, ev.AttemptBegins(1), "SIGTERM to vllm")
    story.at(10, ev.ProgramExited(0, 0), "sweep attempt in 29 s")
    story.at(10, ev.ReadyElsewhere(("infer",)))
    story.at(11, ev.GuardSwept(ATTEMPT), "spawn vllm")
    assert story.machine.programs[1].state is ProgramState.READY


def test_a_guard_that_is_killed():
    story = running(program("vllm"), program("env"))
    text = "vllm, env ended because their guard process was killed"
    story.at(5, ev.GuardLost(ATTEMPT), "CloseGuard attempt", f"fail with 137: {text}")
    story.at(6, ev.JobFinished(signal.SIGTERM), "kill the rest")


def test_a_guard_that_does_not_answer_is_killed():
    """The end of the job does not depend on end of file: a blocked fork of the guard may keep its socket open."""
    story = running(program("vllm", grace_s=2.0))
    story.at(5, ev.JobFinished(signal.SIGTERM), "SIGTERM to vllm")
    killed = ("SIGKILL to vllm", "note: vllm did not end within 2 s of SIGTERM, and was killed")
    story.at(7, ev.DeadlineDue(), *killed)
    story.at(12, ev.DeadlineDue(), "sweep attempt in 0 s")
    assert story.machine.wake_at() == 18
    story.at(18, ev.DeadlineDue(), "KillGuard attempt", "CloseGuard attempt", "kill the rest")
    assert story.machine.is_over


def test_a_second_signal_kills_what_is_left():
    story = running(program("vllm"))
    story.at(5, ev.JobFinished(signal.SIGINT), "SIGTERM to vllm")
    story.at(6, ev.KillRequested(), "sweep attempt in 0 s")
    story.at(6, ev.GuardSwept(ATTEMPT), "CloseGuard attempt")
    assert story.machine.is_over


# ------------------------------------------------------------------------------------------------- random histories


class World:
    """Processes and guards that do at random what they may do; it checks the machine's commands."""

    def __init__(self, seed):
        self.random = random = Random(seed)
        self.now, self.log = 0.0, []
        self.specs = []
        for number in range(random.randint(0, 4)):
            kind = random.choice(("main", "service", "service", "sidecar"))
            after = [each.name for each in self.specs if random.random() < 0.4] + ["far"] * (random.random() < 0.1)
            ready, grace_s = random.choice(("", "tcp")), random.choice((0.0, 5.0))
            self.specs.append(program(f"p{number}", kind, tuple(after), ready, grace_s, random.choice((0, 0, 2))))
        random.shuffle(self.specs)
        self.gate = [each.name for each in self.specs if each.kind == "service" and random.random() < 0.8]
        self.machine = ProgramsMachine(self.specs, Gate(self.gate, "train.py"))
        self.guards, self.inbox = dict.fromkeys(Life, "none"), []
        self.alive, self.ready, self.watched = set(), set(), set()
        self.attempt, self.failures, self.gates, self.finished = -1, 0, 0, False

    def life(self, number):
        return JOB if self.specs[number].kind == "sidecar" else ATTEMPT

    def do(self, event):
        self.log.append(event)
        for command in self.machine.on(event, Now(self.now, self.now)):
            self.log.append(command)
            self.execute(command)

    def execute(self, command):
        match command:
            case do.StartGuard(life=life):
                assert self.guards[life] == "none"
                self.guards[life] = "starting"
            case do.Spawn(number=number):
                assert not self.finished
                assert self.guards[self.life(number)] == "ready"
                assert self.ready.issuperset(self.specs[number].after), "before those that it comes after"
                assert number not in self.alive
                self.inbox.append(("spawn", number))
            case do.Probe(number=number):
                self.watched.add(number)
            case do.SendSignal(number=number, signal=which):
                assert number in self.alive or which == signal.SIGKILL
                name, kind = self.specs[number].name, self.specs[number].kind
                others = [self.specs[n] for n in self.alive if n != number and self.must_end_first(n)]
                if which == signal.SIGTERM and kind != "main":
                    assert not any(each.kind == "main" or name in each.after for each in others), "too early"
                self.inbox.append(("signal", number, which))
            case do.OpenGate():
                assert self.ready.issuperset(self.gate)
                self.gates += 1
                assert self.gates == 1
            case do.ReportFailure():
                self.failures += 1
                assert self.failures == 1
            case do.SweepGuard(life=life):
                assert self.guards[life] in ("ready", "sweeping")
                self.guards[life] = "sweeping"
            case do.CloseGuard(life=life):
                self.end_guard(life)
            case do.KillGuard(life=life):
                self.alive -= {n for n in self.alive if self.life(n) is life}

    def must_end_first(self, number):
        """Whether the machine waits for the end of this one: unless it is stuck, or not asked to end."""
        state = self.machine.programs[number].state
        return state in ALIVE and (self.finished or self.life(number) is ATTEMPT)

    def end_guard(self, life):
        self.guards[life] = "none"
        self.alive -= {n for n in self.alive if self.life(n) is life}
        self.inbox = [each for each in self.inbox if self.life(each[1]) is not life]

    def end(self, number, code):
        self.alive.discard(number)
        self.watched.discard(number)
        live = self.machine.programs[number]
        is_asked = live.kill_at is not None or self.machine._is_stopped(live)
        starts_again = self.machine._may_restart(live, code) and not is_asked
        if self.specs[number].kind == "sidecar" or (self.specs[number].kind == "main" and not code):
            self.ready |= set() if starts_again else {self.specs[number].name}
        self.do(ev.ProgramExited(number, code))

    def deliver(self):
        what, number, *more = self.inbox.pop(0)
        if what == "spawn" and self.random.random() < 0.05:
            if self.specs[number].kind == "sidecar":
                self.ready.add(self.specs[number].name)
            self.do(ev.ProgramStartFailed(number, "no memory"))
        elif what == "spawn":
            self.alive.add(number)
            if not self.specs[number].ready:
                self.ready.add(self.specs[number].name)
            self.do(ev.ProgramSpawned(number))
        elif number in self.alive and (more[0] == signal.SIGKILL or self.random.random() < 0.7):
            self.end(number, -more[0])

    def step(self):
        random = self.random
        chances = [(0.3, lambda: self.wait(random.choice((0, 1, 10))))]
        if self.attempt < 0 or (random.random() < 0.05 and not self.finished):
            chances.append((1, self.begin))
        for life, state in self.guards.items():
            if state == "starting":
                chances.append((1, lambda life=life: self.start_guard(life)))
            elif state == "sweeping":
                chances.append((1, lambda life=life: self.sweep(life)))
            if state != "none":
                chances.append((0.01, lambda life=life: self.lose(life)))
        if self.inbox:
            chances.append((2, self.deliver))
        for number in self.alive:
            chances.append((0.05, lambda n=number: self.end(n, random.choice((0, 1, -9)))))
        for number in self.watched & self.alive:
            chances.append((0.3, lambda n=number: self.meet(n)))
        chances.append((0.05, lambda: (self.ready.add("far"), self.do(ev.ReadyElsewhere(("far",))))))
        chances.append((0.03, lambda: self.do(ev.RanksStopped(signal.SIGINT))))
        chances.append((0.02, lambda: self.do(ev.StopExpected())))
        if not self.finished:
            chances.append((0.04, self.finish))
        else:
            chances.append((0.05, lambda: self.do(ev.KillRequested())))
        weights, actions = zip(*chances, strict=True)
        random.choices(actions, weights)[0]()

    def begin(self):
        self.attempt += 1
        self.failures = self.gates = 0
        self.ready -= {spec.name for spec in self.specs if spec.kind != "sidecar"} | {"far"}
        self.do(ev.AttemptBegins(self.attempt))

    def start_guard(self, life):
        self.guards[life] = "ready"
        self.do(ev.GuardStarted(life))

    def sweep(self, life):
        self.alive -= {n for n in self.alive if self.life(n) is life}
        self.inbox = [each for each in self.inbox if self.life(each[1]) is not life]
        self.guards[life] = "ready"
        self.do(ev.GuardSwept(life))

    def lose(self, life):
        if life is JOB:
            self.ready |= {spec.name for spec in self.specs if spec.kind == "sidecar"}
        self.end_guard(life)
        self.do(ev.GuardLost(life))

    def meet(self, number):
        self.watched.discard(number)
        self.ready.add(self.specs[number].name)
        self.do(ev.ConditionMet(number))

    def finish(self):
        self.finished = True
        self.do(ev.JobFinished(self.random.choice((signal.SIGTERM, signal.SIGINT))))

    def wait(self, seconds):
        end = self.now + seconds
        while (at := self.machine.wake_at()) is not None and at <= end:
            self.now = max(self.now, at)
            self.note_late_sidecars()
            self.do(ev.DeadlineDue())
        self.now = end

    def note_late_sidecars(self):
        """A sidecar that is not ready in time counts as ready."""
        for number, spec in enumerate(self.specs):
            deadline = self.machine._deadlines._at.get(("ready", number))
            if spec.kind == "sidecar" and deadline is not None and deadline <= self.now:
                self.ready.add(spec.name)

    def run(self):
        for _ in range(self.random.randint(1, 80)):
            self.step()
        if not self.finished:
            self.finish()
        for _ in range(300):
            if self.machine.is_over:
                break
            self.step()
        assert self.machine.is_over, "it has not ended"
        assert not self.alive, "a program is left"
        assert set(self.guards.values()) == {"none"}
        assert self.machine.wake_at() is None


def check(seed):
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        story = "\n".join(f"{'' if isinstance(each, ev.Event) else '    '}{each}" for each in world.log)
        raise AssertionError(f"seed {seed}: {error}\n{world.specs}\n{story}") from error


def test_random_histories_start_nothing_too_early_fail_once_and_leave_nothing():
    began, first = time.process_time(), int(time.time()) % 1_000_000
    for seed in range(first, first + HISTORIES):
        check(seed)
    print(f"{HISTORIES} histories: {time.process_time() - began:.1f} s of CPU time")
