#!/bin/bash
# Written by ddplaunch submit. To submit it again: qsub THIS_FILE
#$ -S /bin/bash
#$ -N train.py
#$ -pe mpi 1
# Both streams go into one log; the job has the variables of the shell that submits it.
#$ -j y
#$ -o sge-$JOB_ID.out
#$ -wd /data/wine
#$ -V

# Its hosts, in the scheduler's order; this script runs on the first.
hosts=($(awk '!seen[$1]++ { print $1 }' "$PE_HOSTFILE"))
if [ ${#hosts[@]} -ne 1 ]; then
  echo "ddplaunch: --nodes 1 needs 1 hosts, but $PE gave $NSLOTS slots on: ${hosts[*]}" >&2
  echo "  qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N" >&2
  exit 2
fi

# One launcher on each host. qrsh does not keep quotation marks, so bash reads the command from its input.
read -r -d '' launch <<'END-OF-LAUNCH'
{
export DDPLAUNCH_NODE_RANK=$1 DDPLAUNCH_HOSTS=$2
cd /data/wine || exit
# python -c … is ddplaunch; no file of the current folder can take the place of a module of Python's.
exec /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster sge train.py </dev/null
}
END-OF-LAUNCH
all=$(IFS=,; echo "${hosts[*]}")
# The scheduler may send its warning to each process here: these signals are for the launchers.
trap : USR1 USR2
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
  (trap "" USR1 USR2; exec qrsh -inherit -V "${hosts[rank]}" /bin/bash -s "$rank" "$all" <<<"$launch") &
done
bash -s 0 "$all" <<<"$launch"
# They end together with one exit code, which becomes the job's.
code=$?
until wait; do :; done
if [ $code -eq 99 ] || [ $code -eq 100 ]; then
  echo "ddplaunch: the job ends with 1: Grid Engine would start it again after $code"
  code=1
fi
exit $code
