"""Tests that arguments are checked by the source before the start as by the function in a rank."""

from __future__ import annotations

import ast
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.argument_parser import check_arguments
from ddplaunch.system.target.arguments import bind_arguments
from ddplaunch.system.target.signature import from_source
from tests.conftest import write_program

FACTS = {
    "rank": 9,
    "local_rank": 1,
    "world_size": 16,
    "local_world_size": 8,
    "node_rank": 1,
    "nnodes": 2,
    "device": "cpu",
}


def make_device(name):
    import torch

    return torch.device(name)


PRELUDE = """
import enum, functools, os, pathlib, typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, List, Literal, Optional, Tuple, Union

class Mode(str, enum.Enum):
    FAST = "fast"
    SLOW = "slow"

class Config:
    pass
"""


def live(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(PRELUDE + textwrap.dedent(source), names)
    return names["main"]


def read(source: str, words: str) -> None:
    """Check as the launcher does."""
    module = ast.parse(PRELUDE + textwrap.dedent(source))
    function = module.body[-1]
    assert isinstance(function, ast.FunctionDef)
    check_arguments(from_source("f.py:main", function, module), shlex.split(words))


def call(source: str, words: str = "") -> Any:
    """Check as the launcher does, bind as a rank does, and call: ``main`` returns what it was given."""
    read(source, words)
    function = live(source)
    positional, named = bind_arguments("f.py:main", function, shlex.split(words), FACTS, make_device)
    return function(*positional, **named)


def run_file(folder: Path, source: str) -> dict[str, Any]:
    """Write a program, run it, and return its globals."""
    path = write_program(folder, "spawns.py", source)
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("parameters", "words", "value"),
    [
        ("x: int", "--x 3", 3),
        ("x: int", "--x=-3", -3),
        ("x: int", "--x -3", -3),
        ("x: float", "--x 1e-3", 0.001),
        ("x: float", "--x -0.5", -0.5),
        ("x: str", "--x 3", "3"),
        ("x: str", "--x ''", ""),
        ("x: str", "--x --y", "--y"),
        ("x: bool", "--x", True),
        ("x: bool", "--no-x", False),
        ("x=True", "--no-x", False),
        ("x=False", "--x", True),
        ("x=False", "", False),
        ("x: Path", "--x a/b", "PosixPath('a/b')"),
        ("x: pathlib.Path", "--x a/b", "PosixPath('a/b')"),
        ("x=Path('a')", "--x b", "PosixPath('b')"),
        ("x: os.PathLike[str]", "--x a", "PosixPath('a')"),
        ("x: Mode", "--x FAST", "<Mode.FAST: 'fast'>"),
        ("x=Mode.FAST", "--x SLOW", "<Mode.SLOW: 'slow'>"),
        ("x: Literal['a', 'b']", "--x b", "b"),
        ("x: Literal[1, 2]", "--x 2", 2),
        ("x: Optional[int]", "--x 3", 3),
        ("x: Optional[int] = None", "", None),
        ("x: 'int | None' = None", "--x 3", 3),
        ("x: Optional[bool] = None", "--no-x", False),
        ("x: Annotated[float, 'doc']", "--x 1", 1.0),
        ("x: Union[int, str]", "--x 3", 3),
        ("x: Union[str, int]", "--x a", "a"),
        ("x: Union[float, None, Literal['auto']]", "--x auto", "auto"),
        ("x: Union[float, None, Literal['auto']]", "--x 2", 2.0),
        ("x: list[int]", "--x 1 --x 2", [1, 2]),
        ("x: List[str]", "--x 1 --x 2", ["1", "2"]),
        ("x: Sequence[float] = ()", "--x 1", [1.0]),
        ("x: Optional[list[int]] = None", "--x 1", [1]),
        ("x: tuple[int, ...]", "--x 1 --x 2", (1, 2)),
        ("x: Tuple[int, int]", "--x 1 --x 2", (1, 2)),
        ("x: set[str]", "--x b", {"b"}),
        ("x: list", "--x 1 --x a", [1, "a"]),
        ("x=[1]", "--x 2 --x a", [2, "a"]),
        ("x=(1, 2)", "--x 3", (3,)),
        ("x=(1, 2)", "", (1, 2)),
        ("x: Any", "--x 3", 3),
        ("x", "--x 3", 3),
        ("x", "--x 3.5", 3.5),
        ("x", "--x 1e3", 1000.0),
        ("x", "--x a", "a"),
        ("x", "--x nan", "nan"),
        ("x", "--x 1_000", "1_000"),
        pytest.param("x", f"--x {'9' * 5000}", "9" * 5000, id="more digits than Python reads"),
        ("x=None", "--x 3", 3),
        ("x=1", "--x 3", 3),
        ("x=-1.5", "--x 3", 3.0),
        ("x='a'", "--x 3", "3"),
        ("x: 'int'", "--x 3", 3),
        ("x: 'Missing' = None", "", None),
        ("*, x: int", "--x 3", 3),
        ("x: int, /", "--x 3", 3),
        ("X: int", "--X 3", 3),
        ("x: int = 7", "", 7),
    ],
)
def test_arguments_are_converted_to_parameter_types(parameters, words, value):
    found = call(f"def main({parameters}):\n    return {'X' if 'X' in parameters else 'x'}", words)
    assert found == value or repr(found) == value
    assert type(found) is type(value) or repr(found) == value


@pytest.mark.parametrize("spelling", ["--save-every", "--save_every"])
def test_both_spellings(spelling):
    assert call("def main(save_every: int): return save_every", f"{spelling} 3") == 3
    assert (
        call("def main(use_amp=True): return use_amp", f"--no-{'use-amp' if '-e' in spelling else 'use_amp'}") is False
    )


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("rank, world_size", (9, 16)),
        ("global_rank, local_rank", (9, 1)),
        ("gpu, gpu_id", (1, 1)),
        ("local_world_size, world_size_per_node", (8, 8)),
        ("node_rank, nnodes", (1, 2)),
        ("rank: int, /, *, world_size: int = 1", (9, 16)),
    ],
)
def test_well_known_names_are_filled_in(parameters, expected):
    names = ", ".join(part.split(":")[0].strip() for part in parameters.split(",") if part.strip() not in ("/", "*"))
    assert call(f"def main({parameters}): return {names}") == expected


@pytest.mark.ci
def test_device():
    import torch

    assert call("def main(device): return device") == torch.device("cpu")
    assert call("def main(device: str): return device") == "cpu"
    assert call("def main(device='cuda'): return device") == "cpu"
    assert call("def main(device: int): return device") == 1


TUTORIALS = {
    "def main(rank: int, world_size: int, save_every: int, total_epochs: int, batch_size: int): return locals()": (
        "--save-every 2 --total_epochs 3 --batch-size 32",
        {"rank": 9, "world_size": 16, "save_every": 2, "total_epochs": 3, "batch_size": 32},
    ),
    "def main(rank, world_size, save_every, total_epochs, batch_size=32): return locals()": (
        "--save_every 2 --total-epochs 3",
        {"rank": 9, "world_size": 16, "save_every": 2, "total_epochs": 3, "batch_size": 32},
    ),
    "def main(local_rank: int, world_size_per_node: int, save_every: int, total_epochs: int, batch_size: int, "
    "node_rank: int): return locals()": (
        "--save_every 2 --total-epochs 3 --batch_size 8",
        {
            "local_rank": 1,
            "world_size_per_node": 8,
            "save_every": 2,
            "total_epochs": 3,
            "batch_size": 8,
            "node_rank": 1,
        },
    ),
    "def main(gpu): return locals()": ("", {"gpu": 1}),
    "def main(): return locals()": ("any --words=1 -x", {}),
    "def main(rank, *rest): return locals()": ("a 3", {"rank": 9, "rest": ("a", 3)}),
    "def main(rank, lr=1.0, *Rest: int): return locals()": ("5 6 --lr 2", {"rank": 9, "lr": 2.0, "Rest": (5, 6)}),
    "def main(rank, lr=1.0, *rest): return locals()": ("5", {"rank": 9, "lr": 1.0, "rest": (5,)}),
    "def main(rank, lr=1.0, **more): return locals()": (
        "--momentum 0.9 --lr 2 --name=a-b --weight-decay 0",
        {"rank": 9, "lr": 2.0, "more": {"momentum": 0.9, "name": "a-b", "weight_decay": 0}},
    ),
    "def main(rank, **more: int): return locals()": ("", {"rank": 9, "more": {}}),
    "def main(*args, **kwargs): return locals()": ("--reads argv itself", {"args": (), "kwargs": {}}),
    "def main(cuda=True, no_cuda=False): return locals()": ("--no-cuda", {"cuda": True, "no_cuda": True}),
    "def main(no_cuda=False, cuda=True): return locals()": ("--no-cuda", {"cuda": True, "no_cuda": True}),
    "def main(config=Config, hook=print): return sorted(locals())": ("", ["config", "hook"]),
}


@pytest.mark.parametrize("source", TUTORIALS)
def test_functions_as_users_write_them(source):
    words, expected = TUTORIALS[source]
    assert call(source, words) == expected


@pytest.mark.parametrize(
    ("parameters", "words", "message"),
    [
        ("rank, x: int", "", "f.py:main needs --x"),
        ("x, y, z", "--y 1", "f.py:main needs --x and --z"),
        ("x, y, z", "", "f.py:main needs --x, --y and --z"),
        ("x: bool", "", "f.py:main needs --x"),
        ("x: list[int]", "", "f.py:main needs --x"),
        ("x: int", "--x a", "f.py:main cannot take --x: 'a' is not a valid integer"),
        ("x=1", "--x 1.5", "f.py:main cannot take --x: '1.5' is not a valid integer"),
        ("x: float", "--x a", "f.py:main cannot take --x: 'a' is not a valid float"),
        ("x: list[int]", "--x 1 --x a", "f.py:main cannot take --x: 'a' is not a valid integer"),
        ("x: Mode", "--x fast", "f.py:main cannot take --x: 'fast' is not one of 'FAST', 'SLOW'"),
        ("x: Literal['a', 1]", "--x 2", "f.py:main cannot take --x: '2' is not one of 'a', '1'"),
        ("x: Union[int, float]", "--x a", "f.py:main cannot take --x: 'a' is not one of int, float"),
        ("x: int = 1", "--y 1", "f.py:main: no such option"),
        ("lr: float = 1", "--rl 1", "f.py:main: no such option"),
        ("rank: int", "--rank 1", "f.py:main: rank comes from ddplaunch, leave --rank out"),
        ("world_size_per_node", "--world-size-per-node 1", "f.py:main: world_size_per_node comes from ddplaunch"),
        ("rank", "10", "f.py:main: got unexpected extra argument (10)"),
        ("x=False", "--x true", "f.py:main: got unexpected extra argument (true)"),
        ("x=1", "--x", "f.py:main: option '--x' requires an argument"),
        ("x=False", "--x=1", "f.py:main: option '--x' does not take a value"),
        ("*x: int", "1 a", "f.py:main cannot take --x: 'a' is not a valid integer"),
        ("rank, **x: int", "--a b", "f.py:main cannot take --a: 'b' is not a valid integer"),
    ],
)
def test_wrong_arguments_are_one_error_with_the_signature(parameters, words, message):
    source = f"def main({parameters}): pass"
    for found in (
        lambda: read(source, words),
        lambda: bind_arguments("f.py:main", live(source), shlex.split(words), FACTS, make_device),
    ):
        with pytest.raises(UsageError) as refusal:
            found()
        assert refusal.value.message.startswith(message)
        assert refusal.value.hint.startswith("its signature: main(")
        assert "\n" not in refusal.value.message + refusal.value.hint


@pytest.mark.parametrize("parameters", ["x: Config", "x: dict[str, int]", "x: Union[int, Config]", "x=Config()"])
def test_what_only_a_rank_can_find_is_refused_there(parameters):
    """In the source an unknown name may be an alias of any type; the function object has the type itself."""
    source = f"def main({parameters}): pass"
    read(source, "--x 1")
    with pytest.raises(UsageError, match="cannot be written on a command line"):
        bind_arguments("f.py:main", live(source), ["--x", "1"], FACTS, make_device)


def test_annotations_that_do_not_evaluate_are_read_as_they_are_spelled():
    source = "def main(x: 'int', y: 'Missing' = None, z: 'Optional[float]' = None): return x, y, z"
    assert call(source, "--x 3 --z 1") == (3, None, 1.0)


def test_decorators_are_seen_through():
    function = live(
        """
        def decorate(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return "decorated", function(*args, **kwargs)
            return wrapper

        @decorate
        def main(rank: int, lr: float): return rank, lr
        """
    )
    positional, named = bind_arguments("f.py:main", function, ["--lr", "2"], FACTS, make_device)
    assert function(*positional, **named) == ("decorated", (9, 2.0))


def test_a_decorator_that_finds_the_arguments_elsewhere_is_called_with_nothing():
    """hydra.main and its like read sys.argv. A decorator that names its arguments does not count among them."""
    source = """
        def decorate(function):
            @functools.wraps(function)
            def wrapper({own}):
                return function({own_names})
            return wrapper

        @decorate
        def main(configuration): return configuration
        """
    elsewhere = live(source.format(own="handed=None", own_names="handed"))
    assert bind_arguments("f.py:main", elsewhere, ["lr=2", "--help"], FACTS, make_device) == ((), {})
    spelled_out = live(source.format(own="configuration=None", own_names="configuration"))
    with pytest.raises(UsageError, match="unexpected extra argument"):
        bind_arguments("f.py:main", spelled_out, ["lr=2"], FACTS, make_device)


def test_an_option_whose_default_is_not_known_in_a_rank_must_be_given(tmp_path):
    """Tutorials have the parser in a block that is not run here; the launcher leaves it to the rank."""
    source = """
        def make_parser(parser, folder):
            parser.add_argument("--epochs", type=int, default=3)
            parser.add_argument("--data", default=folder)

        def main(rank, args):
            return rank, args.epochs, args.data
        """
    read(source, "")
    names = run_file(tmp_path, source)
    with pytest.raises(UsageError, match="the following arguments are required: --data"):
        bind_arguments("spawns.py:main", names["main"], ["--epochs", "1"], FACTS, make_device)
    positional, named = bind_arguments("spawns.py:main", names["main"], ["--data", "here"], FACTS, make_device)
    assert names["main"](*positional, **named) == (9, 3, "here")


def test_options_that_the_source_does_not_name_are_left_to_the_rank(tmp_path):
    source = """
        NAMES = ("lr", "momentum")

        def make_parser(parser):
            for name in NAMES:
                parser.add_argument("--" + name, type=float)
            parser.add_argument("--" + NAMES[0], "-l", type=float)

        def main(rank, args):
            return rank, args.lr
        """
    read(source, "--lr 1 --momentum 2")
    names = run_file(tmp_path, source)
    positional, named = bind_arguments("spawns.py:main", names["main"], ["--lr", "1"], FACTS, make_device)
    assert names["main"](*positional, **named) == (9, 1.0)
    with pytest.raises(UsageError, match="unrecognized arguments: --momentum 2") as refused:
        bind_arguments("spawns.py:main", names["main"], ["--momentum", "2"], FACTS, make_device)
    assert refused.value.hint == "its options: --lr"


@pytest.mark.parametrize(
    ("setting", "words", "value"),
    [
        ("action=argparse.BooleanOptionalAction", "--no-x", False),
        ("nargs=argparse.REMAINDER", "--x 1 2", ["1", "2"]),
        ("nargs=len('ab')", "--x 1 2", ["1", "2"]),
    ],
)
def test_how_many_values_an_option_takes_may_be_known_in_a_rank_only(tmp_path, setting, words, value):
    source = f"""
        import argparse

        def make_parser(parser):
            parser.add_argument("--x", {setting})

        def main(args):
            return args.x
        """
    read(source, words)
    names = run_file(tmp_path, source)
    positional, named = bind_arguments("spawns.py:main", names["main"], words.split(), FACTS, make_device)
    assert names["main"](*positional, **named) == value


def test_a_module_that_cannot_be_parsed_any_more_has_no_options(tmp_path):
    """Its file may change while the job waits for other nodes."""
    names = run_file(tmp_path, "def main(args): return args")
    (tmp_path / "spawns.py").write_text(f"{'-' * 100_000}1")  # which takes all of the parser's stack
    assert bind_arguments("spawns.py:main", names["main"], ["--args", "3"], FACTS, make_device) == ((3,), {})


def test_a_function_without_a_signature_gets_nothing():
    assert bind_arguments("builtins:min", min, ["--x"], FACTS, make_device) == ((), {})


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            "def main(rank: int, lr: float = 0.1, *a, k='x', **m): pass",
            "main(rank: int, lr: float = 0.1, *a, k='x', **m)",
        ),
        ("def main(x: Optional[int] = None, y=Mode.FAST): pass", "main(x: Optional[int] = None, y=Mode.FAST)"),
    ],
)
def test_the_signature_is_shown_as_it_was_written(source, shown):
    module = ast.parse(source)
    assert str(from_source("f.py:main", module.body[0], module)) == shown
