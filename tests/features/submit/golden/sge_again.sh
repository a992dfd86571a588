#!/bin/bash
# Written by ddplaunch submit. To submit it again: qsub THIS_FILE
#$ -S /bin/bash
#$ -N train.py
#$ -pe mpi 3
#$ -t 1-9:2
#$ -tc 2
#$ -l h_rt=14400
# Both streams go into one log; the job has the variables of the shell that submits it.
#$ -j y
#$ -o sge-$JOB_ID.$TASK_ID.out
#$ -wd /data/wine
#$ -V
#$ -r y

# Its hosts, in the scheduler's order; this script runs on the first.
hosts=($(awk '!seen[$1]++ { print $1 }' "$PE_HOSTFILE"))
if [ ${#hosts[@]} -ne 3 ]; then
  echo "ddplaunch: --nodes 2 --spares 1 needs 3 hosts, but $PE gave $NSLOTS slots on: ${hosts[*]}" >&2
  echo "  qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N" >&2
  exit 2
fi

# ddplaunch creates this file when the job is preempted; the other one counts the requeues.
export DDPLAUNCH_REQUEUE_FILE="$PWD/.ddplaunch-requeue-$JOB_ID.$SGE_TASK_ID"
requeued="$PWD/.ddplaunch-requeued-$JOB_ID.$SGE_TASK_ID"
rm -f "$DDPLAUNCH_REQUEUE_FILE"
# One launcher on each host. qrsh does not keep quotation marks, so bash reads the command from its input.
read -r -d '' launch <<'END-OF-LAUNCH'
{
export DDPLAUNCH_NODE_RANK=$1 DDPLAUNCH_HOSTS=$2
cd /data/wine || exit
exec /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster sge train.py </dev/null
}
END-OF-LAUNCH
# The warning before the time limit: 90 s for a checkpoint, then 30 s for ranks to stop. (At s_rt Grid Engine ends the other hosts.)
all=$(IFS=,; echo "${hosts[*]}")
# The scheduler may send its warning to each process here: these signals are for the launchers.
trap : USR1 USR2
others=()
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
  (trap "" USR1 USR2; exec qrsh -inherit -V "${hosts[rank]}" /bin/bash -s "$rank" "$all" <<<"$launch") &
  others+=($!)
done
timeout --foreground --preserve-status -s USR1 14280 bash -s 0 "$all" <<<"$launch"
# They end together with one exit code, which becomes the job's.
code=$?
# A launcher that waits for a lost host would never end.
for ((left = 30; left > 0; left--)); do
  kill -0 "${others[@]}" 2>/dev/null || break
  sleep 1
done
kill "${others[@]}" 2>/dev/null
if [ $code -eq 99 ] || [ $code -eq 100 ]; then
  echo "ddplaunch: the job ends with 1: Grid Engine would start it again after $code"
  code=1
fi
if [ -e "$DDPLAUNCH_REQUEUE_FILE" ]; then
  rm -f "$DDPLAUNCH_REQUEUE_FILE"
  times=$(cat "$requeued" 2>/dev/null || echo 0)
  if [ "$times" -lt 3 ]; then
    echo $((times + 1)) >"$requeued"
    echo "ddplaunch: requeueing, $((times + 1)) of 3"
    exit 99
  fi
  echo "ddplaunch: not requeued again: --requeue 3"
fi
rm -f "$requeued"
exit $code
