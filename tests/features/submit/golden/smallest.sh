#!/bin/bash
# Written by ddplaunch submit. To submit it again: sbatch THIS_FILE
#SBATCH --job-name=train.py
#SBATCH --nodes=1
#SBATCH --output=slurm-%j.out
#SBATCH --chdir=/data/wine
# One task a node: ddplaunch, which starts the ranks of its node.
#SBATCH --ntasks-per-node=1
# A job that Slurm starts again (preempted, or its node was lost) goes on in the same log.
#SBATCH --open-mode=append

# Slurm signals this shell too; so it first waits for srun. A signal for the ranks does not end it.
trap : TERM
trap : USR1 USR2

# Node 0 writes the job's exit code here. srun returns that of a killed task, even if the job survived it.
exit_file="$PWD/.ddplaunch-exit-$SLURM_JOB_ID"
rm -f "$exit_file"
# All three counts, so that no variable changes them: one launcher on each node. They end together;
# srun must not kill one because another has ended.
# python -c … is ddplaunch; no file of the current folder can take the place of a module of Python's.
DDPLAUNCH_EXIT_FILE="$exit_file" srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=0 \
  /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster slurm train.py
code=$?
[ -s "$exit_file" ] && read -r code <"$exit_file"
rm -f "$exit_file"
exit $code
