#!/bin/bash
# Runs `fusedrec train` or `fusedrec run` on the hosts of a Slurm job, one rank for each task:
#   sbatch examples/deploy/slurm.sh train grm_4g
# The submitting shell has fusedrec on its PATH. The hosts share the folder and admit the user by ssh among themselves.
# NETWORK names the network card that connects them.
#SBATCH --job-name=fusedrec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
set -euo pipefail

ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$SLURM_NTASKS_PER_NODE/" | paste -sd, -)
# TensorFlow would take a thread for every core of the host in every rank.
export TF_NUM_INTRAOP_THREADS=$SLURM_CPUS_PER_TASK
exec fusedrec "$1" -n "$ranks" -H "$hosts" --network-interface "${NETWORK:-eth0}" "${@:2}"
