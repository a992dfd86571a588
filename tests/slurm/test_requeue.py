"""Tests of frameworks that save on a scheduler's signal and are requeued, with a task a node and a task a rank.

Nothing of Lightning, transformers and submitit is changed for it. Each program waits at its third step for the signal,
in its first run.
"""

from __future__ import annotations

import shlex

import pytest

from tests.conftest import ddplaunch_command, write_program
from tests.frameworks.launchers import requires
from tests.scaled_timeouts import scaled_timeout
from tests.slurm.test_submit import number_of, submit  # noqa: F401 - a fixture
from tests.slurm.test_submitit import drive, errors, outputs

pytestmark = [pytest.mark.ci, requires("lightning", "transformers", "submitit"), pytest.mark.timeout(300)]

LIGHTNING = """
    import os, time

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment


    class Requeue(TorchElasticEnvironment, SLURMEnvironment):
        pass


    class Line(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            while index == 3 and "SLURM_RESTART_COUNT" not in os.environ:
                if not getattr(self, "has_printed", False):
                    print("waits", flush=True)
                self.has_printed = True
                time.sleep(0.05)
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)


    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=1, max_epochs=1, plugins=[Requeue()],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(12, 4)))
    print("ended at", trainer.global_step, flush=True)
    """

TRANSFORMERS = """
    import os, time

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint


    class Ones(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return {"x": torch.ones(4)}


    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            return {"loss": self.layer(x).sum()}


    class Waits(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 3 and "SLURM_RESTART_COUNT" not in os.environ:
                print("waits", flush=True)
                saves = next(each for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))
                while not saves.jit_manager.is_checkpoint_requested:
                    time.sleep(0.05)


    arguments = TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, enable_jit_checkpoint=True,
    )
    trainer = Trainer(Line(), arguments, train_dataset=Ones(), callbacks=[Waits()])
    last = get_last_checkpoint("out") if os.path.isdir("out") else None
    trainer.train(resume_from_checkpoint=last)
    print("from", last and os.path.basename(last), "ended at", trainer.state.global_step, flush=True)
    """

SUBMITIT = """
    import os, time

    from ddplaunch import runtime

    first = "SLURM_RESTART_COUNT" not in os.environ
    print("waits" if first else "goes on", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    while first and not runtime.preempted():
        time.sleep(0.05)
    """

TASKS = {"a task a node": (1, ("--nproc", "2")), "a task a rank": (2, ())}


def test_scripts_that_save_and_requeue(submit, tmp_path):  # noqa: F811
    cluster, start = submit()
    folders = {}
    for name, text in (("lightning", LIGHTNING), ("transformers", TRANSFORMERS), ("submitit", SUBMITIT)):
        for way in TASKS:
            folders[name, way] = write_program(tmp_path / f"{name}-{way.split()[-1]}", "train.py", text).parent

    def sbatch(name: str, way: str, sign: str, after: str = "") -> int:
        tasks, words = TASKS[way]
        step = f"srun --ntasks-per-node={tasks} {shlex.join(ddplaunch_command('run', *words, 'train.py'))}"
        options = (f"--ntasks-per-node={tasks}", f"--signal={sign}@90", "--requeue", "--open-mode=append")
        return cluster.sbatch(*options, "-N1", f"--chdir={folders[name, way]}", "--output=log", script=f"{step}{after}")

    saves = folders["transformers", "a task a node"]
    options = ("--requeue", "1", "--preempt-forward", "TERM", "--output", "log", "--cpus-per-task", "2", "--nproc", "2")
    following = start(*options, "--follow", "train.py", cwd=saves)
    again = "\n[ $SLURM_RESTART_COUNT ] || scontrol requeue $SLURM_JOB_ID"
    jobs = {
        number_of(following): "USR2",
        sbatch("transformers", "a task a rank", "TERM", again): "TERM",
        **{sbatch("lightning", way, "USR1"): "USR1" for way in TASKS},
    }
    driver = drive(cluster, folders["submitit", "a task a rank"], "1x2", "train.py")
    assert driver.stdout is not None
    task = int(driver.stdout.readline().split()[1])

    for job, sign in jobs.items():
        cluster.wait_for(job, "waits", 2, timeout=100)
        cluster.cancel(job, f"--signal={sign}")
    cluster.wait_until(lambda: outputs(folders["submitit", "a task a rank"]).count("waits") == 2, "submitit's", 100)
    cluster.cancel(task, "--signal=USR2")

    for job in jobs:
        assert cluster.wait(job, timeout=100) == "COMPLETED", cluster.output(job)
        assert cluster.restarts(job) == 1, cluster.output(job)
        assert cluster.output(job).count("ended at 6") == 2, cluster.output(job)
    assert following.wait(scaled_timeout(30)) == 0
    for way in TASKS:
        assert "Restored all states from the checkpoint" in (folders["lightning", way] / "log").read_text()
        assert (folders["transformers", way] / "log").read_text().count("from checkpoint-3 ended at 6") == 2
    out, err = driver.communicate(timeout=scaled_timeout(100))
    printed = outputs(folders["submitit", "a task a rank"])
    assert "results [None, None]" in out, err + errors(folders["submitit", "a task a rank"])
    assert printed.count("goes on") == 2
    assert cluster.restarts(task) == 1
