"""Made-up records of runs for the HTML report, in the form of ``observe/history/run_record.py``."""

from ddplaunch.base.stack_frames import Frame
from ddplaunch.core.failures import FailureReport, RankFailure
from ddplaunch.observe.diagnosis import inspection as hangs
from ddplaunch.observe.history.run_record import AttemptRecord, RankRecord, RunRecord, RunState

BEGAN = 1_795_362_600.0
GIB = 1 << 30

_TORCH = Frame("all_reduce", "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", 2938, False)
_LOOP = (Frame("train", "train.py", 88, True), Frame("<module>", "train.py", 120, True))


def verdict(rank: int, ranks: int, message: str, attempt: int) -> FailureReport:
    """Return the failure report of a rank that raised ``ValueError(message)``."""
    expected = f"ValueError: {message}"
    traceback = (
        f'Traceback (most recent call last):\n  File "train.py", line 88, in train\n    check(batch)\n{expected}'
    )
    first = RankFailure(rank, rank, "n0", 4000 + rank, attempt, 1, None, expected, traceback, BEGAN + 60, None)
    return FailureReport(first, (), (), ranks - 1, ranks)


def inspection(ranks: int, absent: int, moment: float, where: str = "data.py") -> hangs.Inspection:
    """Return an inspection in which all ranks but one wait in a collective."""

    def one(rank: int) -> hangs.RankInspection:
        entered = 4120 if rank == absent else 4121
        last = hangs.Collective("0", entered, "all_reduce", "float32[6]", 600.0, moment - 9, rank == absent, True)
        frames = (Frame("load_batch", where, 31, True), *_LOOP) if rank == absent else (_TORCH, *_LOOP)
        return hangs.RankInspection(
            rank,
            f"n{rank // 8}",
            4000 + rank,
            hangs.ProcessCondition.ALIVE,
            threads=(hangs.Thread(frames),),
            answers=True,
            groups=(hangs.GroupState("0", entered, 4120),),
            last=(last,),
            known=(hangs.Group("0", "default_pg", tuple(range(ranks))),),
        )

    return hangs.Inspection(moment, tuple(map(one, range(ranks))), ranks)


def record(
    ranks: int, attempts: int = 1, *, target: str = "train.py --lr 0.1", message: str = "no labels"
) -> RunRecord:
    """Return the record of a run whose attempts last a minute, 2 s apart; rank 2 fails in each."""
    tries = []
    for number in range(attempts):
        began = BEGAN + 62 * number
        rows = tuple(
            RankRecord(
                rank,
                f"n{rank // 8}",
                4000 + rank,
                began + 0.5 + rank * 0.001,
                began + (58 if rank == 2 else 60),
                1 if rank == 2 else -15,
                peak_memory=GIB + (rank * 7919) % 97 * (GIB >> 7),
                cpu=50.0 + (rank * 104_729) % 31,
            )
            for rank in range(ranks)
        )
        found = verdict(2, ranks, message, number)
        tries.append(AttemptRecord(number, began, began + 60, rows, found.first.headline, found))
    ended = BEGAN + 62 * attempts - 2
    return RunRecord(
        run="20261122-155025-f409",
        run_id="20261122-155025-f409",
        target=target,
        argv=("ddplaunch", "run", "--nproc", str(ranks), *target.split()),
        host="n0",
        cwd="/home/ada/nets",
        pid=3999,
        began=BEGAN,
        nnodes=1 + (ranks - 1) // 8,
        world_size=ranks,
        ended=ended,
        code=1,
        fate=RunState.FAILED,
        attempts=tuple(tries),
        verdict=tries[-1].verdict if tries else None,
        inspections=(inspection(ranks, 2, ended - 1),),
        notes=("no restarts left (--max-restarts 2)",),
    )
