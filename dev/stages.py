"""A step of a pipeline, from a trace: when each stage did each action, by the clock and by its dependencies.

By dependencies, an action (the forward of a micro-batch, its backward, or a half of it) lasts as long as its kernels, and
begins when the action before it on its stage has ended and the message that it needs is there; messages take no time.
Actions keep the order that they have in the trace. A kernel counts with its fastest run in all micro-batches and steps:
where ranks share cores, the clock goes on while a kernel waits for its core.

dev/timeline.py --stages calls this; dev/schedule.py draws it.
"""
import itertools
import math
import statistics

import schedule

LANES = {"to_next": "forward", "to_previous": "backward"}  # the work that a message in this direction belongs to


def actions_of(ranges):
  """The actions of a step by stage, in the order in which each stage did them."""
  stages = [[] for _ in range(1 + max(r["stage"] for r in ranges))]
  for r in sorted(ranges, key=lambda r: r["start"]):
    if r["stream"] != "compute" or r["work"] is None:
      continue
    actions, what = stages[r["stage"]], {key: r[key] for key in ("work", "micro_batch", "chunk")}
    if not actions or any(actions[-1][key] != value for key, value in what.items()):
      actions.append({**what, "begin": r["start"], "kernels": []})
    actions[-1]["kernels"].append(r["end"] - r["start"])
    actions[-1]["end"] = r["end"]
  return stages


def kind_of(stage, action):
  return stage, action["work"], action["chunk"], len(action["kernels"])


def costs_of(steps):
  """How long each kind of action lasts: the sum over its kernels, each in its fastest run."""
  fastest = {}
  for stages in steps:
    for stage, action in ((stage, action) for stage, actions in enumerate(stages) for action in actions):
      kernels = fastest.setdefault(kind_of(stage, action), action["kernels"])
      fastest[kind_of(stage, action)] = [min(pair) for pair in zip(kernels, action["kernels"])]
  return {kind: sum(kernels) for kind, kernels in fastest.items()}


def replay(stages, costs):
  """The same actions, as their dependencies let them begin."""
  chunks = 1 + max(action["chunk"] for actions in stages for action in actions)
  ends, played = {}, [[] for _ in stages]
  left = sum(map(len, stages))
  while left > 0:
    before = left
    for stage, actions in enumerate(stages):
      for action in actions[len(played[stage]):]:
        work, micro_batch = action["work"], action["micro_batch"]
        place = action["chunk"] * len(stages) + stage  # of this chunk in the model
        source = place + (-1 if work == "forward" else 1)
        needed = (work, micro_batch, source) if work != "weight" and 0 <= source < chunks * len(stages) else None
        if needed and needed not in ends:
          break
        begin = max(played[stage][-1]["end"] if played[stage] else 0, ends.get(needed, 0))
        end = ends[work, micro_batch, place] = begin + costs[kind_of(stage, action)]
        played[stage].append({**action, "begin": begin, "end": end})
        left -= 1
    if left == before:
      schedule.fail("a message in the trace comes from nowhere: give the complete trace of a run with --pp")
  return played


def slots_of(actions):
  """How many micro-batches in a chunk are between forward and backward at the same time, at most."""
  return max(itertools.accumulate({"forward": 1, "input": 0}.get(action["work"], -1) for action in actions))


def picture(title, stages):
  """A step as dev/schedule.py draws it."""
  begin = min(actions[0]["begin"] for actions in stages)
  end = max(actions[-1]["end"] for actions in stages) - begin
  def moved(box):
    return {**box, "begin": box["begin"] - begin, "end": box["end"] - begin}
  return {"schedule": title, "chunks": 1 + max(a["chunk"] for a in stages[0]), "begin": begin, "end": end, "stages": [
      {"actions": [moved(a) for a in actions], "slots": slots_of(actions),
       "idle": end - sum(a["end"] - a["begin"] for a in actions)} for actions in stages]}


def mean_costs(stages, costs):
  """F, I and W of a whole stage, the mean over the stages. Where backward has no halves, all of it is I."""
  chunks = 1 + max(a["chunk"] for a in stages[0])
  def mean(*works):
    lasts = [costs[kind_of(stage, a)] for stage, actions in enumerate(stages) for a in actions if a["work"] in works]
    return chunks * statistics.mean(lasts) if lasts else 0
  return mean("forward"), mean("backward", "input"), mean("weight")


def pictures(title, steps, shown):
  """Step number `shown` of a trace, by the clock and by dependencies. steps: the ranges of each."""
  actions = {number: actions_of(ranges) for number, ranges in steps.items()}
  costs = costs_of(actions.values())
  played = picture(title, replay(actions[shown], costs))
  clock = picture(title, actions[shown])
  clock["words"] = f"by the clock: step {shown}"
  for stage, of_stage in enumerate(clock["stages"]):
    of_stage["messages"] = [{"work": LANES[r["stream"]], "begin": r["start"] - clock["begin"], "end": r["end"] - clock["begin"]}
                            for r in steps[shown] if r["stage"] == stage and r["stream"] in LANES]
  bubble, step = min(stage["idle"] for stage in played["stages"]), played["end"]
  words = f"a step of {step:.1f} ms, bubble {bubble:.1f} ms ({100 * bubble / step:.1f} %)"
  if title in schedule.FORMULAS:
    formula, compute = schedule.FORMULAS[title]
    micro_batches = len({a["micro_batch"] for a in played["stages"][0]["actions"]})
    value = compute(len(played["stages"]), played["chunks"], micro_batches, *mean_costs(actions[shown], costs))
    words += f"; {formula} = {value:.1f} ms"
  played["words"] = "by dependencies: " + words
  print(f"{title}: {words}")
  return [clock, played]
