// Validation on several sets, --keep-best and --patience, in runs of train_gpt.
#include <doctest/doctest.h>

#include <cmath>

#include "gpt/base/text.h"
#include "gpt/options.h"
#include "test/put_trainer.h"
#include "test/skip.h"
#include "test/workplace.h"

namespace {


// The losses on text fall, those on noise rise, as the model grows sure of text.
struct EvaluationWorkplace : Workplace {
  EvaluationWorkplace() {
    std::string noise;
    for (size_t i = 0; i < 3000; ++i) noise += char(33 + (i * i * 7 + i * 31) % 90);
    put(*this / "noise", noise);
    put(*this / "other", "A" + some_text(4000));
  }

  Json trainer(const std::string& folder) const { return Json::parse(content(folder + "/trainer.json")); }

  // What trainer.json says of the best validation is what the metrics say.
  void check_best(const std::string& out, const std::string& newest) const {
    double best = INFINITY;
    size_t step = 0, since = 0;
    for (const Json& line : metrics(out)) {
      if (!line.contains("val_loss")) continue;
      const bool is_better = line["val_loss"].is_number() && line["val_loss"] < best;
      if (is_better) best = line["val_loss"], step = line["step"];
      since = is_better ? 0 : since + 1;
    }
    const Json stored = trainer(out + "/" + newest)["best"];
    CHECK(stored["step"] == step);
    CHECK(stored["since"] == since);
    CHECK(std::abs(stored["val_loss"].get<double>() / best - 1) < 1e-8);  // metrics have 9 digits
  }
};

const std::string train = "$TEXT --lr 3e-2 --val-batches 2 --val-every 5 ";

}  // namespace

TEST_CASE("--val: sets by name, and words that go on with the one before") {
  const auto sets = [](Texts words) {
    words.insert(words.begin(), {"train_gpt", "--train", "text", "--val"});
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    return parse_options(int(pointers.size()), pointers.data())->val;
  };
  using Sets = decltype(Options::val);
  CHECK(sets({"a", "b*"}) == Sets{{"val_loss", {"a", "b*"}}});
  CHECK(sets({"web=a"}) == Sets{{"val_loss", {"a"}}});
  CHECK(sets({"web=a", "b", "c_0=d=e", "f"}) == Sets{{"val_loss", {"a", "b"}}, {"val_loss_c_0", {"d=e", "f"}}});
  CHECK(sets({"a", "b", "z=c"}) == Sets{{"val_loss", {"a", "b"}}, {"val_loss_z", {"c"}}});
  CHECK(sets({"z=a", "--val", "b", "y=c"}) == Sets{{"val_loss", {"a", "b"}}, {"val_loss_y", {"c"}}});
  // These name no set.
  for (const char* word : {"./a=b", "=b", "a-b=c", "a b=c", "caf\xe9=b"}) CHECK(sets({word}) == Sets{{"val_loss", {word}}});
  CHECK(sets({"w=[a,b]"}) == Sets{{"val_loss", {"[a,b]"}}});

  Workplace shell;
  put(shell / "a=b", some_text(3000));
  const auto refuses = [&](const std::string& arguments, int code, const Texts& parts) {
    shell.refuses("$TEXT --out run " + arguments, code, parts);
    CHECK(!shell.exists("run/metrics.jsonl"));
  };
  refuses("--val w=text w=a=b", 2, {"--val 'w=a=b' names a set again", "one NAME="});
  refuses("--val w= text", 2, {"--val 'w=' names no file"});
  refuses("--val a=b", 2, {"--val 'a=b' is a file: write ./ before its name"});
  refuses("--val text v=nowhere", 1, {"'nowhere' matches no regular file"});
  refuses("--val m=text my-set=text", 1, {"'my-set=text' matches no regular file", "in --val NAME=FILES a name has letters, digits and _"});
  refuses("--val text v=text --val-batches 900", 1, {"--val (val_loss)", "1800 are needed"});
  put(shell / "little", some_text(300));
  refuses("--val text v=little --val-batches 10", 1, {"--val (val_loss_v)", "18 samples of 16, and 20 are needed"});
  put(shell / "good.bin", shard(std::vector<uint16_t>(1000, 7), 1000));
  refuses("--val text v=good.bin", 2, {"--val (val_loss_v)", "one kind"});
  put(shell / "high", std::string(1000, '\xff'));
  refuses("--vocab 200 --val text v=high --val-batches 1", 1, {"high: token 0", "255"});
  shell.output("$TEXT --val ./a=b --val-batches 2 --out '' ");

  refuses("--keep-best", 2, {"--keep-best needs --val FILES"});
  shell.refuses("$TEXT --out '' --val text --keep-best", 2, {"--keep-best needs a run folder"});
  refuses("--patience 3", 2, {"--patience 3 needs --val FILES and --val-every N"});
  refuses("--patience 3 --val text", 2, {"--patience 3 needs --val FILES and --val-every N"});
  refuses("--patience -1 --val text --val-every 1", 2, {"--patience: '-1'"});
}

TEST_CASE("several sets: the losses that each has alone, in one line, and the training of none") {
  EvaluationWorkplace shell;
  const std::string steps = "$TEXT --steps 6 --val-every 2 --val-batches 3 --checkpoint-every 4 --out ";
  const std::string out = shell.output(steps + "all --val x=noise y=text other z=other");
  CHECK(contains(out, "; validation on 6 of each set\n"));
  shell.output(steps + "x --val noise && " + steps + "y --val text other && " + steps + "z --val other");
  std::vector<Json> wanted = shell.metrics("x");
  const std::vector<Json> y = shell.metrics("y"), z = shell.metrics("z");
  REQUIRE(wanted.size() == 9);
  for (size_t i = 0; i < wanted.size(); ++i)
    if (wanted[i].contains("val_loss")) wanted[i]["val_loss_y"] = y[i]["val_loss"], wanted[i]["val_loss_z"] = z[i]["val_loss"];
  CHECK(shell.metrics("all") == wanted);
  CHECK(wanted.back()["val_loss"] != wanted.back()["val_loss_y"]);
  CHECK(contains(out, formatted("step     6/6 | val_loss %.4f | val_loss_y %.4f | val_loss_z %.4f\n", double(wanted.back()["val_loss"]),
                                double(y.back()["val_loss"]), double(z.back()["val_loss"]))));
  // A run between two validations resumes with the same bits.
  shell.output("cp -r all part && rm -r part/step_00000006 && " + steps + "part --resume --val x=noise y=text other z=other");
  CHECK(shell.same_metrics("part", "all"));
  shell.output("diff -r part/step_00000006 all/step_00000006");
}

TEST_CASE("--resume with other sets goes on, and says which val_loss is another") {
  EvaluationWorkplace shell;
  const std::string run = train + "--steps 15 --out run ", longer = train + "--resume --keep-best --out run --steps ";
  shell.output(run + "--val a=noise b=text");
  CHECK(shell.trainer("run/step_00000015")["best"]["step"] == 5);
  const std::string added = shell.output(longer + "20 --val noise c=other b=text");
  CHECK(!contains(added, "other data"));
  CHECK(shell.trainer("run/step_00000020")["best"]["step"] == 5);
  CHECK(shell.trainer("run/step_00000020")["best"]["since"] == 3);
  const std::string second = shell.output(longer + "25 --val noise c=text");
  CHECK(contains(second, "--val holds other data than the run in run/step_00000020"));
  CHECK(contains(second, "what follows is another val_loss_c\n"));
  CHECK(!contains(second, "another val_loss\n"));
  CHECK(shell.trainer("run/step_00000025")["best"]["step"] == 5);
  CHECK(contains(shell.output(longer + "30 --val other c=text"), "what follows is another val_loss\n"));
  CHECK(shell.trainer("run/step_00000030")["best"]["step"] == 30);  // of other data, which 30 is the first step of
  CHECK(contains(shell.output(longer + "35 --val-batches 3 --val other"), "what follows is another val_loss\n"));
  CHECK(shell.trainer("run/step_00000035")["best"]["step"] == 35);

  // A checkpoint of an earlier version
  Json old = shell.trainer("run/step_00000035");
  const std::string samples = old["val_data"]["val_loss"], text = samples.substr(0, samples.rfind(", 3 batches"));
  old.erase("best");
  for (const auto& [val_data, differs] : {std::pair(text, false), {"none", false}, {text + "0", true}}) {
    CAPTURE(val_data);
    old["val_data"] = val_data;
    shell.output("rm -rf old && mkdir old && cp -r run/step_00000035 run/metrics.jsonl old");
    put_trainer(shell / "old/step_00000035", old.dump());
    const std::string resumed = shell.output(train + "--resume --keep-best --out old --steps 40 --val-batches 3 --val other");
    CHECK(contains(resumed, "\nsteps     36 to 40"));
    CHECK(contains(resumed, "other data") == differs);
    CHECK(shell.trainer("old/step_00000040")["best"]["step"] == 40);
  }
}

TEST_CASE("--keep-best: each better validation is saved, OUT/best names the best one, and --keep spares it") {
  EvaluationWorkplace shell;
  const auto best = [&](const std::string& out) { return shell.output("readlink " + out + "/best"); };
  const std::string files = "best\nmetrics.jsonl\nmonitor.jsonl\nplan.json\n";
  const std::string out = shell.output(train + "--steps 23 --keep 1 --keep-best --val noise --out worse");
  CHECK(contains(out, "\nbest      each better validation saves a checkpoint of 89.8 KiB beside --keep 1; training waits 5e-06 s for its copy"));
  CHECK(best("worse") == "step_00000005\n");  // the later ones are worse
  CHECK(shell.output("ls worse") == files + "step_00000005\nstep_00000023\n");
  shell.check_best("worse", "step_00000023");
  // It is the state after that step, the validation included.
  shell.output("$TEXT --lr 3e-2 --steps 23 --checkpoint-every 5 --keep 9 --val-batches 2 --val-every 5 --val noise --out plain");
  CHECK(shell.same_metrics("worse", "plain"));
  shell.output("diff -r worse/best/ plain/step_00000005 && test ! -e plain/best");
  CHECK(contains(shell.output(train + "--lr 3e-3 --steps 20 --keep 1 --keep-best --val text --out better"), "\nto sample "));
  CHECK(best("better") == "step_00000020\n");  // each is better than those before
  CHECK(shell.output("ls better") == files + "step_00000020\n");
  shell.check_best("better", "step_00000020");

  // It outlives starts with and without the option, as long as there is none better.
  const std::string longer = train + "--resume --keep 1 --val noise --out worse --steps ";
  shell.output(longer + "26 && " + longer + "29 --keep-best");
  CHECK(shell.output("ls worse") == files + "step_00000005\nstep_00000029\n");
  // A crash between a checkpoint and its link leaves the old link; the next checkpoint puts it right.
  shell.output("cp -r worse crashed && cp -r crashed/step_00000029 crashed/step_00000002 && ln -sfn step_00000002 crashed/best");
  shell.output(train + "--resume --keep 9 --keep-best --val noise --out crashed --steps 32");
  CHECK(best("crashed") == "step_00000005\n");

  // From the best: later checkpoints are set aside; a best one among them has no link any more.
  CHECK(shell.output("$GPT --generate --resume worse/best --sample-len 9") == shell.output("$GPT --generate --resume worse/step_00000005 --sample-len 9"));
  shell.output(train + "--keep 9 --keep-best --val noise --out worse --resume worse/best --steps 23");
  CHECK(shell.same_metrics("worse", "plain"));
  CHECK(shell.output("ls worse") == files + "step_00000005\nstep_00000023\nstep_00000029.abandoned\n");
  shell.output("ln -s step_00000020 plain/best; " + train + "--keep 9 --val noise --out plain --resume plain/step_00000010 --steps 14");
  CHECK(!std::filesystem::is_symlink(shell / "plain/best"));

  shell.refuses(train + "--val text --out better --overwrite --init better/best", 1, {"--overwrite would delete it"});
  shell.output(train + "--val text --out better --overwrite --steps 2");
  CHECK(shell.output("ls better") == "metrics.jsonl\nmonitor.jsonl\nplan.json\nstep_00000002\n");
}

TEST_CASE("--keep-best where no link can be made: said once, and the checkpoint is kept all the same") {
  EvaluationWorkplace shell;
  put(shell / "run/best/notes", "mine");
  const Result result = shell(train + "--steps 20 --keep 1 --keep-best --val text --out run");
  CHECK(result.code == 0);
  CHECK(result.error == "train_gpt: training goes on without a link to the best checkpoint, which is kept: run/best: is no link: move it away\n");
  const Result worse = shell(train + "--steps 25 --keep 1 --keep-best --val noise --out run --overwrite");
  CHECK(worse.code == 0);
  CHECK(shell.output("ls run") == "best\nmetrics.jsonl\nmonitor.jsonl\nplan.json\nstep_00000005\nstep_00000025\n");
  CHECK(shell.content("run/best/notes") == "mine");
}

TEST_CASE("--keep-best: the best checkpoint is uploaded, too, however many come after it; GPT_UPLOADED is 1 if both are there") {
  EvaluationWorkplace shell;
  const std::string run = train + "--checkpoint-every 1 --keep 1 --keep-best --val noise --on-end 'echo $GPT_REASON $GPT_STEP $GPT_UPLOADED >ends' ";
  const std::string note = "--after-checkpoint 'test -f $GPT_CHECKPOINT/trainer.json && echo $GPT_STEP >>uploads";
  shell.output(run + "--steps 23 --out a " + note + "'");
  CHECK(contains("\n" + shell.content("uploads"), "\n5\n"));
  CHECK(contains("\n" + shell.content("uploads"), "\n23\n"));
  CHECK(shell.content("ends") == "done 23 1\n");
  // A start that has no step to do owes both. That of the newest comes first: the time that is left may be short.
  shell.output("rm uploads; " + run + "--steps 23 --out a --resume " + note + "'");
  CHECK(shell.content("uploads") == "23\n5\n");
  CHECK(shell.content("ends") == "done 23 1\n");
  const Result failed = shell("rm uploads; " + run + "--steps 23 --out a --resume --hook-timeout 3 " + note + "; [ $GPT_STEP != 5 ]'");
  CHECK(contains(failed.error, "--after-checkpoint has not succeeded for step 5 within 3 s (--hook-timeout): upload "));
  CHECK(contains(failed.error, "/a/step_00000005 yourself\n"));
  CHECK(shell.content("uploads").starts_with("23\n5\n"));
  CHECK(shell.content("ends") == "done 23 0\n");
  // While it trains the best comes first, and stays until then. A link to a checkpoint that is not there is no best one.
  shell("rm uploads; " + run + "--steps 999999999 --schedule constant --val-every 5 --out b " + note + "; until [ -f go ]; do sleep 0.05; done' >out & \n"
        "until grep -qs '\"step\": *9[0-9],' b/metrics.jsonl; do sleep 0.05; done; touch go; until [ $(cat uploads | wc -l) -gt 2 ]; do sleep 0.05; done; "
        "kill -TERM $!; wait $!");
  CAPTURE(shell.content("uploads"));
  CHECK(contains("\n" + shell.content("uploads").substr(0, 5), "\n5\n"));
  CHECK(shell.content("ends").starts_with("stopped "));
  CHECK(shell.content("ends").ends_with(" 1\n"));
  const std::string one = "rm -r uploads a/step_00000005; " + run + "--steps 23 --out a --resume " + note + "'";
  shell.output(one);
  CHECK(shell.content("uploads") == "23\n");
  CHECK(shell.content("ends") == "done 23 1\n");
}

TEST_CASE("--patience: the run is done after N validations without a better one, and a larger N goes on with the same bits") {
  EvaluationWorkplace shell;
  const std::string run = train + "--steps 60 --val noise t=text --checkpoint-every 7 --out ";
  const std::string out = shell.output(run + "a --patience 2 --on-end 'echo $GPT_REASON $GPT_EXIT_CODE $GPT_STEP >end'");
  CAPTURE(out);
  CHECK(contains(out, "--patience: done after step 15, as the last 2 validations were not below the best, val_loss "));
  CHECK(contains(out, " after step 5; a larger --patience goes on\n"));
  CHECK(contains(out, " --resume --patience 4\n"));
  CHECK(shell.content("end") == "done 0 15\n");
  CHECK(shell.metrics("a").size() == 18);
  shell.check_best("a", "step_00000015");
  CHECK(shell.output("readlink a/best") == "step_00000005\n");
  const std::string again = shell.output(run + "a --patience 2 --resume");
  CHECK(contains(again, "finished: the last 2 validations were not below the best, val_loss "));
  CHECK(!contains(again, "\nsteps "));
  CHECK(contains(shell.output(run + "a --patience 1 --resume --steps 70"), "finished: the last 2 validations"));
  CHECK(shell.metrics("a").size() == 18);

  // As from the start, and from a checkpoint in the middle, with a count of one
  shell.output(run + "b --patience 4 && cp -r b c && rm -r c/step_00000025 c/step_00000021 && " + run + "a --patience 4 --resume && " +
               run + "c --patience 4 --resume");
  CHECK(shell.metrics("b").size() == 30);
  for (const char* other : {"a", "c"}) {
    CHECK(shell.same_metrics("b", other));
    shell.output("diff -r b/step_00000025 " + std::string(other) + "/step_00000025");
  }
  // Where only the newest checkpoint comes back, start and end say that the best one is not there, until it is.
  shell.output("mkdir f && cp -r b/step_00000025 f");
  const std::string without = shell.output(run + "f --patience 5 --resume"), misses = "best      so far val_loss ";
  CHECK(contains(without, misses));
  CHECK(contains(without, " after step 5, whose checkpoint is not in f: bring step_00000005 there, too; else OUT/best waits for a lower one\n"));
  CHECK(contains(without, " after step 5, which is not in f; a larger --patience goes on\n"));
  CHECK(contains(shell.output(run + "f --patience 5 --resume"), " after step 5, which is not in f; "));
  const std::string with = shell.output("cp -r b/step_00000005 f; " + run + "f --patience 6 --resume");
  CHECK(!contains(with, misses));
  CHECK(contains(with, " after step 5; a larger --patience goes on\n"));
  CHECK(shell.output("readlink f/best") == "step_00000005\n");
  CHECK(contains(shell.output(run + "g --patience 5 --resume b/step_00000025"), misses));
  // A run that is told to stop in the step whose validation is the last is done.
  shell.output("cp -r b/step_00000005 stopped && " + train + "--steps 60 --val noise --val-every 1 --patience 1 --max-hours 1e-9 --resume stopped --out e");
  CHECK(contains(shell.output("ls e"), "step_00000006\n"));
  // Without the option the run goes on to its end. Without --out it ends, too.
  shell.output(train + "--steps 30 --val noise --out d && " + run + "b --resume --steps 60");
  CHECK(shell.metrics("b").back()["step"] == 60);
  CHECK(contains(shell.output(run + "'' --checkpoint-every 0 --patience 2"), "--patience: done after step 15"));
}

TEST_CASE("after a rollback the best validation and the count are the checkpoint's") {
  EvaluationWorkplace shell;
  std::string text;
  for (int i = 0; i < 100; ++i) text += "abcdefghijklmno\n";
  const size_t spike = text.size() / 32 + 1;  // the step that sees noise
  text += shell.content("noise").substr(0, 64);
  for (int i = 0; i < 100; ++i) text += "abcdefghijklmno\n";
  put(shell / "data", text);
  // Validations between the checkpoint that it goes back to and the spike are undone.
  const std::string out = shell.output("$TINY --train data --lr 1e-2 --steps 60 --checkpoint-every 20 --spike-window 16 --spike-z 30 --on-spike "
                                       "rollback --val-batches 2 --val-every 3 --val noise --keep-best --out run");
  CAPTURE(out);
  CHECK(contains(out, formatted("rolled back from step %zu to step 40,", spike)));
  shell.check_best("run", "step_00000060");
  CHECK(shell.trainer("run/step_00000060")["best"]["since"] >= 5);
}

TEST_CASE("several ranks agree on the best validation and on the end" * doctest::skip(!mpirun_found || is_gpu_build())) {
  EvaluationWorkplace shell;
  const std::string job = "OMP_NUM_THREADS=1 " + mpirun() + " 2 " + train +
                          "--steps 60 --global-batch 4 --layers 2 --heads 2 --channels 32 --val noise t=text --patience 2 --keep 1 --out ";
  for (std::string mesh : {"--pp 2", "--tp 2", "--zero 3"}) {
    CAPTURE(mesh);
    const std::string out = shell.output("rm -rf run; " + job + "run " + mesh);
    CHECK(contains(out, "--patience: done after step 15, as the last 2 validations were not below the best"));
    CHECK(shell.output("ls run") == "best\nmetrics.jsonl\nmonitor.jsonl\nplan.json\nstep_00000005\nstep_00000015\n");
    shell.check_best("run", "step_00000015");
    CHECK(contains(shell.output(job + "run --resume " + mesh), "finished: the last 2 validations"));
  }
}
