#!/bin/bash
# Written by ddplaunch submit. To submit it again: bsub < THIS_FILE
#BSUB -J train.py
#BSUB -n 1
#BSUB -R "span[ptile=1]"
#BSUB -o /dev/null

# The log, as it grows: LSF would write it at the end of the job, with a report.
exec >>/data/wine/lsf-"$LSB_JOBID".out 2>&1

# Its hosts, in the scheduler's order; this script runs on the first.
hosts=($(awk '!seen[$1]++ { print $1 }' "$LSB_DJOB_HOSTFILE"))
if [ ${#hosts[@]} -ne 1 ]; then
  echo "ddplaunch: --nodes 1 needs 1 hosts, but the job has: ${hosts[*]}" >&2
  echo "  bjobs -l $LSB_JOBID shows what the job was given" >&2
  exit 2
fi

# One launcher on each host. blaunch keeps no quotation marks, so bash reads the command from its input.
read -r -d '' launch <<'END-OF-LAUNCH'
{
export DDPLAUNCH_NODE_RANK=$1 DDPLAUNCH_HOSTS=$2 LSB_JOBID=$3
cd /data/wine || exit
# python -c … is ddplaunch; no file of the current folder can take the place of a module of Python's.
exec /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster lsf train.py </dev/null
}
END-OF-LAUNCH
# bkill sends SIGINT and SIGTERM. They are for the launchers: this script waits for them.
trap : INT TERM USR2
all=$(IFS=,; echo "${hosts[*]}")
# The scheduler may send its warning to each process here: these signals are for the launchers.
trap : USR1 USR2
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
  (trap "" USR1 USR2; exec blaunch -z "${hosts[rank]}" /bin/bash -s "$rank" "$all" "$LSB_JOBID" <<<"$launch") &
done
/bin/bash -s 0 "$all" "$LSB_JOBID" <<<"$launch"
# They end together with one exit code, which becomes the job's.
code=$?
until wait; do :; done
exit $code
