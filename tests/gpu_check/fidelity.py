"""Checks of what a program computes: the same on cuda:0 as in plain python."""

import sys

from tests.conftest import free_port, run_command
from tests.frameworks.launchers import PROGRAMS, reports
from tests.gpu_check.harness import Machine, check

ON_GPU = {
    "accelerated.py": (),
    "transformers_trainer.py": (("use_cpu=True", 'use_cpu=False, ddp_backend="gloo"'),),
    "lightning_trainer.py": (('accelerator="cpu"', 'accelerator="gpu"'),),
    "compiled.py": (("def train():\n", 'def train():\n    torch.set_default_device("cuda:0")\n'),),
}
"""Programs of tests/frameworks, and how each uses the GPU."""

ARGUMENTS = {"transformers_trainer.py": ("out",), "lightning_trainer.py": ("1",)}

UNTOUCHED = """
import sys
assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
import torch
assert not torch.cuda.is_initialized()
print("untouched", flush=True)
"""


def compare(machine: Machine, name: str) -> str:
    text = (PROGRAMS / name).read_text()
    for before, after in ON_GPU[name] if not machine.is_simulated else ():
        assert before in text, f"{name} has changed: {before}"
        text = text.replace(before, after)
    program = machine.folder / name
    program.write_text(text)
    arguments = ARGUMENTS.get(name, ())
    given = [each.replace("out", "ours") for each in arguments]
    ours = reports(machine.run("run", "--nproc", "1", program, *given, timeout=120))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables = machine.variables({**alone, "MASTER_PORT": str(free_port())})
    plain = reports(run_command((sys.executable, program, *arguments), machine.folder, variables, timeout=120))
    ignored = ("environment", "children")
    equal = [[{k: v for k, v in each.items() if k not in ignored} for each in one] for one in (ours, plain)]
    assert equal[0] == equal[1], equal
    result = {key: value for key, value in ours[0].items() if key in ("losses", "loss", "weight", "weights")}
    text = f"equal to the last digit: {result}"
    machine.begin_cuda(f"on cuda:0; on the CPU {text}")
    return text


def add_check(name: str) -> None:
    def run(machine: Machine) -> str:
        return compare(machine, name)

    run.__doc__ = f"tests/frameworks/programs/{name}, against plain python."
    check("fidelity", 1, name)(run)


for _name in ON_GPU:
    add_check(_name)


@check("fidelity", 2)
def untouched(machine: Machine) -> None:
    """CUDA is never initialized before the program, in forked, executed and warm ranks."""
    program = machine.program("untouched.py", UNTOUCHED)
    try:
        for words in (("--start", "zygote"), ("--start", "exec"), ("--warm",)):
            assert machine.succeed("run", *words, "--nproc", "2", program).count("untouched") == 2, words
    finally:
        machine.run("warm", "--stop")
    machine.begin_cuda("with a torch for CUDA")


@check("fidelity", 2)
def readme(machine: Machine) -> str:
    """The commands of the README."""
    machine.begin_cuda("all of them, with the GPU hidden as in every test")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "tests/test_readme.py", "-k", "README"]
    done = run_command(command, timeout=150)
    assert done.returncode == 0, done.stdout[-1500:]
    return done.stdout.splitlines()[-1]
