#!/bin/bash
# Written by ddplaunch submit. To submit it again: bsub < THIS_FILE
#BSUB -J "train.py[1,5]%2"
#BSUB -n 3
#BSUB -R "span[ptile=1]"
#BSUB -W 4:00
#BSUB -app ours
# The warning comes before the time limit: 90 s for a checkpoint, then 30 s for ranks to stop.
#BSUB -wa USR1
#BSUB -wt 2
#BSUB -Q 99
#BSUB -r
#BSUB -o /dev/null

# The log, as it grows: LSF would write it at the end of the job, with a report.
exec >>/data/wine/lsf-"$LSB_JOBID"_"$LSB_JOBINDEX".out 2>&1

# Its hosts, in the scheduler's order; this script runs on the first.
hosts=($(awk '!seen[$1]++ { print $1 }' "$LSB_DJOB_HOSTFILE"))
if [ ${#hosts[@]} -ne 3 ]; then
  echo "ddplaunch: --nodes 2 --spares 1 needs 3 hosts, but the job has: ${hosts[*]}" >&2
  echo "  bjobs -l $LSB_JOBID shows what the job was given" >&2
  exit 2
fi

# ddplaunch creates this file when the job is preempted; the other one counts the requeues.
export DDPLAUNCH_REQUEUE_FILE="$PWD/.ddplaunch-requeue-$LSB_JOBID.$LSB_JOBINDEX"
requeued="$PWD/.ddplaunch-requeued-$LSB_JOBID.$LSB_JOBINDEX"
rm -f "$DDPLAUNCH_REQUEUE_FILE"
# One launcher on each host. blaunch keeps no quotation marks, so bash reads the command from its input.
read -r -d '' launch <<'END-OF-LAUNCH'
{
export DDPLAUNCH_NODE_RANK=$1 DDPLAUNCH_HOSTS=$2 LSB_JOBID=$3 LSB_JOBINDEX=$4
cd /data/wine || exit
exec /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster lsf train.py </dev/null
}
END-OF-LAUNCH
# bkill sends SIGINT and SIGTERM. They are for the launchers: this script waits for them.
trap : INT TERM USR2
# The warning comes to all processes of this script. It is for the launcher alone, which handles it.
trap '' USR1
all=$(IFS=,; echo "${hosts[*]}")
# The scheduler may send its warning to each process here: these signals are for the launchers.
trap : USR1 USR2
others=()
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
  (trap "" USR1 USR2; exec blaunch -z "${hosts[rank]}" /bin/bash -s "$rank" "$all" "$LSB_JOBID" "$LSB_JOBINDEX" <<<"$launch") &
  others+=($!)
done
/bin/bash -s 0 "$all" "$LSB_JOBID" "$LSB_JOBINDEX" <<<"$launch"
# They end together with one exit code, which becomes the job's.
code=$?
# A launcher that waits for a lost host would never end.
for ((left = 30; left > 0; left--)); do
  kill -0 "${others[@]}" 2>/dev/null || break
  sleep 1
done
kill "${others[@]}" 2>/dev/null
[ $code -eq 99 ] && code=1  # after 99 LSF would start it again
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
