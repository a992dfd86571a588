"""Tests of reading faulthandler's stacks, of this Python and of other versions."""

import random
import subprocess
import sys
import textwrap

import pytest

from ddplaunch.base.stack_frames import MAX_FRAMES, Frame, parse_traceback
from ddplaunch.observe.diagnosis.inspection import Thread
from ddplaunch.observe.diagnosis.stack_parser import MAX_THREADS, find_stage_outside_program, parse_dump
from tests.conftest import write_program


def dump(text, folder="/job"):
    return parse_dump(textwrap.dedent(text).encode(), folder, "/ddplaunch")


def run(folder, *words):
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=True).stdout


def test_a_real_dump_with_non_ascii_names(tmp_path):
    folder = tmp_path / 'a folder with "é" and 日'
    write_program(
        folder,
        "größe.py",
        """
        import faulthandler, sys, threading

        def wait():
            ready.set()
            end.wait()

        def löse(depth):
            if depth:
                return löse(depth - 1)
            faulthandler.dump_traceback(sys.stdout, all_threads=True)

        ready, end = threading.Event(), threading.Event()
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        ready.wait()
        löse(2)
        """,
    )
    main, other = parse_dump(run(folder, str(folder / "größe.py")), str(folder))
    assert [(frame.function, frame.file, frame.line, frame.own) for frame in main.frames] == [
        ("löse", "größe.py", 10, True),
        ("löse", "größe.py", 9, True),
        ("löse", "größe.py", 9, True),
        ("<module>", "größe.py", 16, True),
    ]
    assert [frame.function for frame in other.frames if frame.own] == ["wait"]
    assert {frame.file.rpartition("/")[2] for frame in other.frames if not frame.own} == {"threading.py"}


def test_the_running_task_comes_before_the_loop():
    first, feed = dump(
        """
        Thread 0x00007f0000000001 (most recent call first):
          File "/ddplaunch/core/rank/inspection_endpoint.py", line 1 in _serve
        Current thread 0x00007f0000000002 (most recent call first):
          File "/ddplaunch/core/rank/inspection_endpoint.py", line 2 in _write_stacks
          File "/usr/lib/python3.11/selectors.py", line 3 in select
          File "/job/train.py", line 4 in <module>
        Main task [Task-1] (most recent call first):
          File "/job/train.py", line 5 in main
        Task [f\\xfctter] (most recent call first):
          File "/job/train.py", line 6 in feed
        Task [empty] (most recent call first):
        """
    )
    assert [frame.function for frame in first.frames] == ["main", "select", "<module>"]
    assert (feed.name, [frame.line for frame in feed.frames]) == ("task fütter", [6])


def test_outer_frames_of_a_deep_stack_keep_the_programs_line():
    """The program's frames that faulthandler omits are kept, in a section of the dump or from the rank's reply."""
    inner = "".join(f'  File "/lib/python3/site-packages/deep.py", line {n} in call\n' for n in range(100))
    head = "Current thread 0x1 (most recent call first):\n"
    outer = "Outer frames (most recent call first):\n"
    outer += '  File "/lib/python3/site-packages/deep.py", line 7 in call\n  File "/job/train.py", line 9 in main\n'
    for found in (
        dump(head + inner + "  ...\n" + outer),
        parse_dump((head + inner).encode(), "/job", outer=outer.encode()),
    ):
        assert len(found[0].frames) == MAX_FRAMES + 1
        assert found[0].frames[-1] == Frame("main", "train.py", 9, True)
    assert len(dump(head + outer)[0].frames) == 0, "a stack that is not deep has no outer frames"


def test_threads_have_names_since_python_3_14():
    found = dump(
        """\
        Thread 0x00007f4e1b7fe6c0 [feeder [1]] (most recent call first):
          File "/job/data.py", line 3 in fetch

        Current thread 0x00007f4e3c2b7b80 [python] (most recent call first):
          File "/job/train.py", line 9 in <module>
        """
    )
    assert found == (
        Thread((Frame("<module>", "train.py", 9, True),), "python"),
        Thread((Frame("fetch", "data.py", 3, True),), "feeder [1]"),
    )


def test_unknown_lines_are_skipped():
    found = dump(
        """\
        Timeout (0:00:04)!
        Thread 0x00007f4e1b7fe6c0 (most recent call first):
          <no Python frame>

        Current thread 0x00007f4e3c2b7b80 (most recent call first):
          Garbage-collecting
          File ???, line ??? in ???
          File "/job/train.py", line 9 in <module>
          ...

        Current thread's C stack trace (most recent call first):
          Binary file "/usr/bin/python", at _Py_DumpStack+0x42 [0x5e5d1b]
        """
    )
    assert found[0].frames == (Frame("???", "???", 0, False), Frame("<module>", "train.py", 9, True))
    assert found[1:] == ()


def test_the_current_thread_is_the_main_one_of_many():
    one = 'Thread 0x{:016x} (most recent call first):\n  File "/job/pool.py", line 1 in work\n\n'
    text = one.format(1) + one.format(2).replace("Thread", "Current thread").replace("work", "main")
    text += "".join(one.format(number) for number in range(3, 101)) + "...\n"
    found = parse_dump(text.encode(), "/job")
    assert found[0].frames[0].function == "main"
    assert len(found) == MAX_THREADS


def test_frames_of_ddplaunch_are_left_out():
    found = dump(
        """\
        Thread 0x00007f4e1b7fe6c0 (most recent call first):
          File "/ddplaunch/rank/asked.py", line 3 in answer

        Thread 0x00007f4e1b7fe6c1 (most recent call first):
          File "/usr/lib/python3.12/socket.py", line 3 in recv
          File "/ddplaunch/rank/asked.py", line 3 in answer

        Current thread 0x00007f4e3c2b7b80 (most recent call first):
          File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 7 in init_process_group
          File "/ddplaunch/rank/asked.py", line 8 in first_call
          File "/job/train.py", line 9 in <module>
          File "<frozen runpy>", line 88 in _run_code
          File "<frozen runpy>", line 198 in _run_module_as_main
          File "/ddplaunch/core/rank/rank_runner.py", line 407 in <module>
        """
    )
    assert [[frame.function for frame in thread.frames] for thread in found] == [["init_process_group", "<module>"]]
    returned = dump(
        """\
        Thread 0x00007f4e3c2b7b80 (most recent call first):
          File "/ddplaunch/core/rank/rank_exit.py", line 177 in stay
          File "/ddplaunch/core/rank/zygote.py", line 386 in <module>
        """
    )
    assert returned == (Thread(()),)


RUNNER = """
    Thread 0x00007f1 (most recent call first):
      File "/ddplaunch/features/python/rank/call_loop.py", line 119 in run_calls
      File "/ddplaunch/core/rank/rank_runner.py", line 217 in {}
      File "/ddplaunch/core/rank/zygote.py", line 9 in exit
    """


@pytest.mark.parametrize(
    ("function", "frame", "stage"),
    [
        ("run_program", "", "between two calls"),
        ("exit", "", ""),
        ("setup", "", "about to begin"),
        ("run_program", '  File "/job/train.py", line 1 in <module>\n', ""),
    ],
)
def test_what_a_rank_does_outside_of_its_program(function, frame, stage):
    text = textwrap.dedent(RUNNER).format(function).replace(":\n", f":\n{frame}", 1).encode()
    assert find_stage_outside_program(text, parse_dump(text, "/job", "/ddplaunch"), "/ddplaunch") == stage


@pytest.mark.parametrize(
    ("file", "shown", "own"),
    [
        ("/job/train.py", "train.py", True),
        ("/job/src/data.py", "src/data.py", True),
        ("/jobs/data.py", "/jobs/data.py", True),
        ("/home/me/library/model.py", "/home/me/library/model.py", True),
        ("/job/.venv/lib/python3.12/site-packages/x.py", ".venv/lib/python3.12/site-packages/x.py", False),
        ("/usr/lib/python3/dist-packages/yaml.py", "/usr/lib/python3/dist-packages/yaml.py", False),
        ("/opt/conda/lib/python3.14t/queue.py", "/opt/conda/lib/python3.14t/queue.py", False),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>", False),
        ("<string>", "<string>", False),
        ("/ddplaunch/runtime.py", "/ddplaunch/runtime.py", False),
    ],
)
def test_files_of_the_user_and_of_libraries(file, shown, own):
    head = "Thread 0x01 (most recent call first):\n"
    frame = dump(f'{head}  File "{file}", line 1 in f\n  File "/job/a", line 1 in g\n')[0].frames[0]
    assert (frame.file, frame.own) == (shown, own)


def test_control_characters_in_a_dump_are_escaped():
    found = dump('Thread 0x01 (most recent call first):\n  File "/job/\\x1b[2J\\u202e.py", line 1 in \\x9b31m\n')
    assert found[0].frames[0] == Frame("\\x9b31m", "\\x1b[2J\\u202e.py", 1, True)


def test_random_bytes_are_parsed_without_an_error():
    random_numbers = random.Random(14)
    real = b'Current thread 0x01 [a] (most recent call first):\n  File "/job/\\U0010ffff\\xe9.py", line 1 in f\n  ...\n'
    for _ in range(1000):
        text = bytearray(real * random_numbers.randrange(1, 4))
        for _ in range(random_numbers.randrange(12)):
            text[random_numbers.randrange(len(text))] = random_numbers.randrange(256)
        parse_dump(bytes(text), "/job")
        parse_dump(random_numbers.randbytes(200), "")


def test_a_huge_dump_is_bounded():
    text = b"Thread 0x01 (most recent call first):\n" + b'  File "/job/' + b"x" * 10_000 + b'", line 1 in f\n' * 500
    (main,) = parse_dump(text * 2, "/job")[:1]
    assert len(main.frames) <= MAX_FRAMES
    assert all(len(frame.file) <= 600 for frame in main.frames)


def test_a_printed_traceback_is_parsed(tmp_path):
    write_program(
        tmp_path,
        "train.py",
        """
        import json

        def load():
            try:
                json.loads("{")
            except ValueError as error:
                raise RuntimeError("bad") from error

        load()
        """,
    )
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    frames = parse_traceback(done.stderr, str(tmp_path))
    assert [(frame.function, frame.line) for frame in frames] == [("load", 7), ("<module>", 9)]
