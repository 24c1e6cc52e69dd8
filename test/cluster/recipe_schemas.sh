#!/usr/bin/env bash
# The recipes for Kubernetes and SkyPilot, checked by packages that hold the published schemas: kubernetes-validate and
# skypilot, in build/recipes. No machine is rented, no cluster is asked.
# shellcheck source=test/cluster/common.sh
. test/cluster/common.sh

python=build/recipes/bin/python
if ! "$python" -c 'import kubernetes_validate, sky' 2> /dev/null; then
  echo "  installing kubernetes-validate and skypilot"
  { python3 -m venv build/recipes && "$python" -m pip install -q kubernetes-validate skypilot; } > "$work/pip.log" 2>&1 ||
    { echo "  skipped: kubernetes-validate and skypilot can't be installed here"; exit 0; }
fi
export HOME=$work  # skypilot writes there

# A check must also refuse what is wrong: refuses WHAT COMMAND...
refuses() { ! "${@:2}" > /dev/null 2>&1 || fail "$1 is not noticed"; }
kubernetes() { "$python" -m kubernetes_validate --strict "$@"; }
skypilot() {
  "$python" - "$1" <<'END'
import sys, yaml, sky
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(config, env_overrides=[("GPT_BUCKET", "s3://bucket")],
                                 secrets_overrides=[(name, "x") for name in config.get("secrets", {})])
resources = list(task.resources)[0]
print(" ", task.num_nodes, "x", resources.accelerators, "spot" if resources.use_spot else "on demand", resources.image_id)
END
}
for options in "--cluster 8xh100" "--cluster 16x8xa100-80 --ranks 32 --on-end x" "--cluster 4x4090 --ranks 1" "--ranks 2"; do
  for recipe in kubernetes skypilot; do
    # shellcheck disable=SC2086
    "$GPT_PROGRAM" --plan --model gpt2 --train 'data/*.bin' --prompt $'two\nlines: "x" #' $options --recipe $recipe > "$work/$recipe.yaml" 2> "$work/plan.log" ||
      fail "there is no recipe for $recipe with $options"
    $recipe "$work/$recipe.yaml" > "$work/$recipe.log" 2>&1 || fail "$recipe refuses the recipe of $options"
  done
  tail -1 "$work/skypilot.log"
  sed -n 's/^INFO.* passed for resource \([^ ]*\) against/  \1: Kubernetes/p' "$work/kubernetes.log" | paste -sd ""
done
sed 's/completions:/completion:/' "$work/kubernetes.yaml" > "$work/wrong.yaml"
refuses "a wrong key for Kubernetes" kubernetes "$work/wrong.yaml"
sed 's/num_nodes:/num_node:/' "$work/skypilot.yaml" > "$work/wrong.yaml"
refuses "a wrong key for SkyPilot" skypilot "$work/wrong.yaml"
