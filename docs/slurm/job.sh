#!/bin/sh
# A plan as an array job: each task measures its share of the cells, on a node of its own.
#
#   sbatch job.sh                   three tasks
#   sbatch --array=1-6 job.sh       six: a cell each, if the plan has six in a repeat
#   slat merge results/ -o merged/  when they are done
#
# A task that was killed goes on where it was, once it is submitted again.
#SBATCH --job-name=slat
#SBATCH --array=1-3
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@60
#SBATCH --output=slat-%A-%a.log
set -eu

slat=${SLAT:-slat}
plan=${PLAN:-plan.toml}
results=${RESULTS:-results}

# Without a scheduler this is one share of one: all of it.
exec "$slat" plan "$plan" \
	--cell "${SLURM_ARRAY_TASK_ID:-1}/${SLURM_ARRAY_TASK_COUNT:-1}" \
	--output "$results"
