#!/bin/bash
# Written by ddplaunch submit. To submit it again: qsub THIS_FILE
#$ -S /bin/bash
#$ -N wine
#$ -pe mpi 8
#$ -l h_rt=14400
#$ -q gpu.q
#$ -l gpu=8
#$ -P "my project"
# Both streams go into one log; the job has the variables of the shell that submits it.
#$ -j y
#$ -o logs/$JOB_ID.out
#$ -wd "/data/my wine"
#$ -V

# On the first node; qrsh -V passes the variables to all. A failed set-up ends the job.
source '/data/my wine/env.sh' || exit
module load cuda/12 || exit

# Its hosts, in the scheduler's order; this script runs on the first.
hosts=($(awk '!seen[$1]++ { print $1 }' "$PE_HOSTFILE"))
if [ ${#hosts[@]} -ne 2 ]; then
  echo "ddplaunch: --nodes 2 needs 2 hosts, but $PE gave $NSLOTS slots on: ${hosts[*]}" >&2
  echo "  qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N" >&2
  exit 2
fi

# One launcher on each host. qrsh does not keep quotation marks, so bash reads the command from its input.
read -r -d '' launch <<'END-OF-LAUNCH'
{
export DDPLAUNCH_NODE_RANK=$1 DDPLAUNCH_HOSTS=$2
cd '/data/my wine' || exit
exec /opt/venv/bin/python -c 'import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); from ddplaunch.cli import main; main()' \
  run --cluster sge --max-restarts 2 train.py -- --lr 0.1 --name 'it'"'"'s a "test"' '$HOME' </dev/null
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
