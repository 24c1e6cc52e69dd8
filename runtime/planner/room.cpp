#include "gpt/room_options.h"
#include "runtime/checkpoints/options.h"
#include "runtime/planner/options.h"
#include "runtime/reports/options.h"

Room planner_room = {
    .name = "planner",
    .add_options = [](CLI::App& app, Options& o) {
      PlanOptions& plan = o.of<PlanOptions>();
      app.add_flag("--plan", o.plan, "print the memory and time of training with these options, and stop; needs no --train");
      add(app, "--mesh", plan.mesh, one_of({"auto"}), "auto: try all --tp, --cp, --pp, schedules, --zero, "
          "--micro-batch, --recompute; train with the fastest, or with --plan list ten");
      app.add_option("--cluster", plan.cluster, "cluster to plan for, or to forecast the time of training on: a file, or a name in "
                     "runtime/planner/clusters (default: this device); --plan takes two, with a comma: a mix of both")->type_name("FILE");
      app.add_option("--calibrate", plan.calibrate, "measure this device, its links and steps of this model and data, write a file "
                     "for --cluster, and stop: two minutes")->type_name("FILE");
      add(app, "--ranks", plan.ranks, in_range(1, 1 << 14),
          "ranks to plan for (default: the cluster's devices, else the ranks that were started)")->default_str("");
      app.add_flag("--json", plan.json, "print the plan as one JSON object, with every rank");
      add(app, "--days", plan.days, in_range(1e-3, 1e5),
          "with --plan: the largest model (or the given one) that trains in this number of days, and the cheapest devices")->default_str("");
      add(app, "--budget", plan.budget, in_range(1e-3, 1e12), "with --plan: the same for this number of dollars")->default_str("");
      add(app, "--checkpoint-seconds", plan.checkpoint_seconds, in_range(1e-6, 1e6),
          "seconds that training waits for a checkpoint, as a run measured them (default: by its bytes)")->default_str("");
      add(app, "--recipe", plan.recipe, one_of({"slurm", "kubernetes", "skypilot"}),
          "with --plan: write the file that starts the planned run (slurm, kubernetes or skypilot) to stdout, the plan to stderr");
      add(app, "--row", plan.row, in_range(size_t(1), size_t(1000)), "row of the plan's table that --recipe starts");
    },
    .decide = [](Options& o, const Refusals& words) {
      const PlanOptions& plan = o.of<PlanOptions>();
      o.chooses_mesh = !plan.mesh.empty() || plan.has_goal();
      if (words.given("--dtype") || !o.plan || (!plan.has_goal() && plan.cluster.empty())) return;
      o.dtype = "bf16", o.is_dtype_chosen = true;  // for GPUs, whose products are many times faster in it
      o.words.insert(o.words.end(), {"--dtype", o.dtype});
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(!o.plan, {"--ranks", "--json", "--days", "--budget", "--checkpoint-seconds", "--recipe"},
             "is for --plan: add that, or leave it out");
      refuse(o.plan, {"--generate", "--resume"}, "beside --plan: a plan is for training from the start; leave one of them out");
      const PlanOptions& plan = o.of<PlanOptions>();
      refuse(!plan.calibrate.empty(), {"--plan", "--generate", "--resume", "--trace", "--trace-tensors", "--after-checkpoint",
                                    "--stop-when", "--on-end"},
             "beside --calibrate, which measures a few steps from the start: leave one of them out");
      refuse(o.generate, {"--cluster"}, "beside --generate: a forecast is for training; leave one of them out");
      const std::string search = !plan.mesh.empty() ? "--mesh auto" : plan.days > 0 ? "--days" : "--budget";
      refuse(o.chooses_mesh, {"--generate"}, "beside " + search + ": a mesh is chosen for training; leave one of them out");
      refuse(plan.recipe.empty(), {"--row"}, "is the row that --recipe starts: add that, or leave it out");
      refuse(!o.chooses_mesh, {"--row"}, "needs --mesh auto, --days or --budget: without them a plan has no table");
      refuse(o.chooses_mesh, {"--tp", "--tp-pieces", "--cp", "--cp-method", "--pp", "--pp-schedule", "--pp-chunks", "--zero",
                        "--shares", "--islands", "--local-steps", "--micro-batch", "--recompute"}, "beside " + search + ": the search chooses that; leave one of them out");
      refuse(plan.has_goal(), {"--mesh", "--ranks", "--ceilings", "--train-minutes"},
             "beside --days or --budget: a goal is planned for all ways to rent a cluster; leave one of them out");
    },
    .complete = [](Options& o) {
      if (o.of<PlanOptions>().calibrate.empty()) return;
      // a short run that leaves nothing else behind
      o.schedule = {.kind = "constant", .steps = 22}, o.train_minutes = 0;
      o.out.clear(), o.val.clear(), o.of<ReportOptions>().profile = true;
      o.checkpoint_every = o.val_every = o.sample_every = 0, o.sample_seconds = 0;
      o.of<CheckpointFiles>() = {};
    },
    .refuse_on_ranks = [](const Options& o) {
      const std::string& ceilings = o.of<ReportOptions>().ceilings;
      if (!ceilings.empty() && !o.of<PlanOptions>().cluster.empty())
        usage_error("--ceilings ", excerpt(ceilings), " has rates of this device, and --cluster of others: leave one of "
                    "them out");
    },
};
