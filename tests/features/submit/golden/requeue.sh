#!/bin/bash
# Written by ddplaunch submit. To submit it again: sbatch THIS_FILE
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --output=slurm-%j.out
#SBATCH --chdir=/data/wine
# One task a node: ddplaunch, which starts the ranks of its node.
#SBATCH --ntasks-per-node=1
# A job that Slurm starts again (preempted, or its node was lost) goes on in the same log.
#SBATCH --open-mode=append
# The signal comes before a preemption or the time limit: 90 s for a checkpoint, then
# 30 s for ranks to stop. Slurm may send it up to a minute early.
#SBATCH --signal=USR2@120
#SBATCH --requeue

# Slurm signals this shell too; so it first waits for srun. A signal for the ranks does not end it.
trap ended=1 TERM
trap : USR1 USR2
# scancel --batch signals only this shell.
trap 'kill -USR2 "$srun" 2>/dev/null' USR2

# Node 0 writes the job's exit code here. srun returns that of a killed task, even if the job survived it.
exit_file="$PWD/.ddplaunch-exit-$SLURM_JOB_ID"
rm -f "$exit_file"
# All three counts, so that no variable changes them: one launcher on each node. They end together;
# srun must not kill one because another has ended.
DDPLAUNCH_EXIT_FILE="$exit_file" srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=0 \
  /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster slurm train.py &
srun=$!
# A signal interrupts wait; after the end it gives the exit code again.
wait "$srun"
while kill -0 "$srun" 2>/dev/null; do wait "$srun"; done
wait "$srun"
code=$?
[ -s "$exit_file" ] && read -r code <"$exit_file"
rm -f "$exit_file"
preempted() {  # without a signal, as on sites that have not set preempt_send_user_signal
  [ $code -ne 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"
}
if [ -z "$ended" ] && { [ $code -eq 75 ] || preempted; }; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
    echo "ddplaunch: requeueing, $((${SLURM_RESTART_COUNT:-0} + 1)) of 3"
    scontrol requeue "$SLURM_JOB_ID" && exit
  else
    echo "ddplaunch: not requeued again: --requeue 3"
  fi
fi
exit $code
