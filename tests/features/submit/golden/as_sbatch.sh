#!/bin/bash
# Written by ddplaunch submit. To submit it again: sbatch THIS_FILE
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --gpus-per-task=h100:8
#SBATCH --gres=gpu:h100:8,nvme:1
#SBATCH --mem-per-gpu=50G
#SBATCH --exclude=gpu[07-08]
#SBATCH --exclusive
#SBATCH --reservation="week 3"
#SBATCH --dependency="afterok:4711?afterany:4712_3"
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --comment="wine # 2"
#SBATCH --output=slurm-%j.out
#SBATCH --error=logs/%j.err
#SBATCH --chdir=/data/wine
# One task a node: ddplaunch, which starts the ranks of its node.
#SBATCH --ntasks-per-node=1
# A job that Slurm starts again (preempted, or its node was lost) goes on in the same log.
#SBATCH --open-mode=append

# Slurm signals this shell too; so it first waits for srun. A signal for the ranks does not end it.
trap : TERM
trap : USR1 USR2

# At the end, on the first node, whatever the exit code, which stays the job's.
teardown() {
  (rm -rf "$SCRATCH")
  (source '/data/my wine/done.sh')
}
trap teardown EXIT

# On the first node; srun passes the variables to all. A failed set-up ends the job.
export SCRATCH=/scratch/$SLURM_JOB_ID; mkdir $SCRATCH || exit

# Node 0 writes the job's exit code here. srun returns that of a killed task, even if the job survived it.
exit_file="$PWD/.ddplaunch-exit-$SLURM_JOB_ID"
rm -f "$exit_file"
# All three counts, so that no variable changes them: one launcher on each node. They end together;
# srun must not kill one because another has ended.
DDPLAUNCH_EXIT_FILE="$exit_file" srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=0 \
  --cpu-bind=none --export 'A=1 2' \
  /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster slurm train.py
code=$?
[ -s "$exit_file" ] && read -r code <"$exit_file"
rm -f "$exit_file"
exit $code
