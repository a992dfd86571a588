#!/bin/bash
# Written by ddplaunch submit. To submit it again: qsub THIS_FILE
#PBS -S /bin/bash
#PBS -N train.py
#PBS -l select=1:ncpus=1:mpiprocs=1
#PBS -l place=scatter
# Both streams go into one log as they come; the job has the variables of the shell that submits it.
#PBS -j oe
#PBS -k doe
#PBS -V

# Its hosts, in the scheduler's order; this script runs on the first.
hosts=($(awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE"))
if [ ${#hosts[@]} -ne 1 ]; then
  echo "ddplaunch: --nodes 1 needs 1 hosts, but the job has: ${hosts[*]}" >&2
  echo "  qstat -f $PBS_JOBID shows what the job was given (exec_host)" >&2
  exit 2
fi

# One launcher on each host. pbsdsh starts it in the home folder, with the variables of qsub alone.
read -r -d '' launch <<'END-OF-LAUNCH'
export DDPLAUNCH_NODE_RANK=$1 DDPLAUNCH_HOSTS=$2 PBS_JOBID=$3
cd /data/wine || exit
unset OMP_NUM_THREADS  # PBS has set it to the CPUs of the whole node
# python -c … is ddplaunch; no file of the current folder can take the place of a module of Python's.
exec /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster pbs train.py </dev/null
END-OF-LAUNCH
# At the time limit and for qdel PBS sends SIGTERM. It is for the launchers: this script waits for them.
trap : TERM
all=$(IFS=,; echo "${hosts[*]}")
# The scheduler may send its warning to each process here: these signals are for the launchers.
trap : USR1 USR2
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
  (trap "" USR1 USR2; exec pbsdsh -n "$rank" -- /bin/bash -c "$launch" node "$rank" "$all" "$PBS_JOBID") &
done
/bin/bash -c "$launch" node 0 "$all" "$PBS_JOBID"
# They end together with one exit code, which becomes the job's.
code=$?
until wait; do :; done
exit $code
