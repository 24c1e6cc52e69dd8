#!/usr/bin/env bash
# What --plan --recipe prints is what Slurm, Kubernetes and SkyPilot take: Slurm's file is submitted as it is, trains, is
# queued again after it was stopped, and goes on; the other two are checked by packages that hold the published schemas.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh
# shellcheck source=test/cluster/slurm_on_one_node.sh
. test/cluster/slurm_on_one_node.sh

plan=(--plan --cluster 4x4090 --ranks 2 "${job[@]}" --dtype fp32)
recipe() { "$GPT_PROGRAM" "${plan[@]}" --recipe "$@" 2> "$work/plan.log" || fail "there is no recipe of $1"; }

train_alone
recipe slurm --zero 1 --out "$work/recipe" > "$work/job.sbatch"
sbatch --wait --output="$work/recipe.log" "$work/job.sbatch" > /dev/null || fail "the recipe does not train"
same_losses_as_alone recipe
sed -n 's/^#SBATCH \(--gres.*\)/  \1/p' "$work/job.sbatch"

# The hook is in the job's environment, and sees each checkpoint. The job is stopped as by the end of its time.
export GPT_AFTER_CHECKPOINT="echo \$GPT_STEP >> $work/uploads"
recipe slurm --out "$work/again" --steps 600 --checkpoint-every 100 --after-checkpoint x > "$work/again.sbatch"
number=$(sbatch --parsable --output="$work/again.log" "$work/again.sbatch") || fail "sbatch refuses the recipe"
job_lives() { scontrol show job "$number" | grep -qE 'JobState=(PENDING|RUNNING|COMPLETING)'; }
wait_for_step again 150
scancel --signal=USR1 "$number"
await 60 "a second start of the job" sh -c "scontrol show job $number | tr ' ' '\n' | grep -qx Restarts=1"
await 90 "the end of the job" sh -c "scontrol show job $number | tr ' ' '\n' | grep -qx JobState=COMPLETED"
grep -hE "queueing again|^steps +[1-9][0-9]+ to" "$work/again.log" | head -2 | sed 's/^/  /'
grep -qE '^steps +[1-9][0-9]{2,} to 600' "$work/again.log" || fail "the job has not gone on"
[ "$(values again loss | wc -l)" -eq 600 ] || fail "there are $(values again loss | wc -l) steps, not 600"
grep -qx 600 "$work/uploads" || fail "the hook has not seen the last checkpoint"
