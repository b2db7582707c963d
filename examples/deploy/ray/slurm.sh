#!/bin/bash
#SBATCH --job-name=sensorium
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@180
# A Ray cluster within a Slurm job: `sbatch slurm.sh serve.yaml` serves until the job ends, `sbatch slurm.sh job.py` runs a script of Ray.
# For nodes without GPUs, leave out the line with --gpus-per-node.
set -euo pipefail

target=${1:?give a serve.yaml, or a Python script}
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS="$address:$port"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_ON_NODE}

start() { srun --overlap --nodes="$1" --ntasks="$1" "${@:2}" --block & }
on_head() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" "$@"; }
stop() {
    on_head serve shutdown --yes || true # lets requests in progress finish
    srun --overlap --ntasks="$SLURM_NNODES" ray stop || true
}
trap stop EXIT
trap 'exit 143' TERM

start 1 --nodelist="$head" ray start --head --node-ip-address="$address" --port="$port" --num-gpus="${SLURM_GPUS_ON_NODE:-0}"
until on_head ray status >/dev/null 2>&1; do sleep 2; done
if ((SLURM_NNODES > 1)); then
    start $((SLURM_NNODES - 1)) --exclude="$head" ray start --address="$RAY_ADDRESS" --num-gpus="${SLURM_GPUS_ON_NODE:-0}"
fi

case $target in
    *.yaml)
        echo "http://$address:8000"
        on_head serve run --address "$RAY_ADDRESS" "$target" &
        ;;
    *) on_head python "$target" & ;;
esac
wait $! # unlike a command in the foreground, this ends at a signal
