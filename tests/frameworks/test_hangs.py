"""Tests that ``ddplaunch stacks`` names the culprit in programs of each framework."""

import json

import pytest

from tests.conftest import wait_until, write_program
from tests.frameworks.launchers import requires

pytestmark = [pytest.mark.ci, pytest.mark.slow]

LOOP = """
    import time, torch, torch.distributed as dist

    def load_batch(step):
        if step == 3 and dist.get_rank() == 1:
            time.sleep(600)
        return torch.ones(4, 8)
"""

FSDP = f"""{LOOP}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (3,))
    model = torch.nn.Linear(8, 6)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(9):
        model(load_batch(step)).sum().backward()
        optimizer.step()
"""

ACCELERATE = f"""{LOOP}
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(9):
        accelerator.backward(model(load_batch(step)).sum())
        optimizer.step()
"""

LIGHTNING = """
    import os, time, torch, lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, index):
            if index == 3 and self.global_rank == 1:
                self.load_batch()
            return self.layer(batch).sum()

        def load_batch(self):
            time.sleep(600)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.ones(96, 8), batch_size=2)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=3, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Model(), data)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(FSDP, id="fsdp2"),
        pytest.param(LIGHTNING, id="lightning", marks=requires("lightning")),
        pytest.param(ACCELERATE, id="accelerate", marks=requires("accelerate")),
    ],
)
def test_the_rank_that_others_wait_for(start_ddplaunch, run_in_fork, tmp_path, program):
    script = write_program(tmp_path, "train.py", program)
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "sleep(600)" in text)
    job = start_ddplaunch("run", "--nproc", "3", script)
    sentences: list[str] = []

    def is_reported() -> bool:
        done = run_in_fork("stacks", str(job.process.pid), "--json")
        sentences[:] = json.loads(done.stdout)["sentences"] if done.returncode == 0 else [done.stderr]
        first = sentences[0]
        return first.startswith("ranks 0, 2 wait in ") and first.endswith(
            f"; rank 1 has not entered it: load_batch at train.py:{line}"
        )

    try:
        wait_until(lambda: is_reported() or job.process.poll() is not None, "the sentence", 60)
    finally:
        print(*sentences, sep="\n")
    assert job.process.poll() is None, job.stderr()
    job.process.kill()
    job.wait()
