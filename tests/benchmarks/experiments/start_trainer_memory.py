"""The memory of a job of idle ranks that have imported transformers."""

from tests.benchmarks.runner import OURS, TORCHRUN, Experiment, Row, Size
from tests.benchmarks.turns import compare, held

REQUIRES = ("transformers",)


def experiment(size: Size) -> Experiment:
    what = f"{size.many} idle ranks of Hugging Face's Trainer: PSS of the whole job"
    turns = compare(lambda launcher: held(launcher(size.many, "hf_trainer.py"), size.many), OURS, TORCHRUN)
    return Experiment(turns, (Row(what, "memory", "MB", TORCHRUN),), rounds=2)
