// The commands that a run calls (runtime/hooks/hooks.h): --after-checkpoint, --stop-when, --on-end.
#include <doctest/doctest.h>

#include <sstream>

#include "test/skip.h"
#include "test/workplace.h"

namespace {


std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

const std::string end = "--on-end 'echo $GPT_REASON $GPT_EXIT_CODE $GPT_STEP $GPT_UPLOADED >>ends' ";
const std::string endless = "$TEXT --schedule constant --steps 999999999 --out run ";
const std::string until_named = "until [ -s error ]; do sleep 0.01; done; ";
const std::string until_begun = "until [ -s run/metrics.jsonl ]; do sleep 0.01; done; ";

}  // namespace

TEST_CASE("checkpoints are uploaded, the last one before the end, and then --on-end is called") {
  Workplace shell;
  const std::string upload = "--after-checkpoint 'test -f $GPT_CHECKPOINT/trainer.json && cp -r $GPT_CHECKPOINT there && echo $GPT_STEP "
                             "$GPT_OUT $GPT_CHECKPOINT >>uploads' ";
  shell.output("mkdir there; $TEXT --steps 4 --checkpoint-every 2 --out run " + upload + end);
  const auto uploads = lines_of(shell.content("uploads"));
  REQUIRE(!uploads.empty());
  const std::string here = std::filesystem::canonical(shell / "."), run = here + "/run";
  CHECK(uploads.back() == "4 " + run + " " + run + "/step_00000004");
  CHECK(shell.exists("there/step_00000004/trainer.json"));
  CHECK(shell.content("ends") == "done 0 4 1\n");
  CHECK(!contains(shell.output("cat run/plan.json run/metrics.jsonl; find run -name '*.json' | xargs cat"), "GPT_CHECKPOINT"));
  // The words of a run that goes on may have other hooks. Nobody knows what has been uploaded before.
  CHECK(contains(shell.output("$TEXT --steps 4 --checkpoint-every 2 --out run/ --resume " + end), "finished: "));
  shell("$TEXT --steps 4 --out run/ --resume --after-checkpoint 'exit 1' --hook-timeout 1 " + end);
  shell("$TEXT --steps 4 --out run/ --resume --after-checkpoint 'echo $GPT_STEP >again' --train nowhere " + end);
  shell("$TEXT --steps 4 --out other --after-checkpoint true --train nowhere " + end);
  CHECK(shell.content("again") == "4\n");
  CHECK(shell.content("ends") == "done 0 4 1\ndone 0 4 0\ndone 0 4 0\nerror 1 4 1\nerror 1 0 0\n");
}

TEST_CASE("an upload that fails is tried again; its failures are named once and counted") {
  Workplace shell;
  const auto result = shell("$TEXT --steps 2 --out run --after-checkpoint 'echo try >>tries; if [ $(wc -l <tries) -lt 3 ]; then echo no disk "
                            ">&2; exit 3; fi' " + end);
  CHECK(result.code == 0);
  CHECK(result.error == "train_gpt: --after-checkpoint ended with exit code 3 ('no disk'): it is tried again\n");
  CHECK(shell.content("tries") == "try\ntry\ntry\n");
  shell(endless + "--checkpoint-every 100 --overwrite --after-checkpoint 'exit 1' --hook-timeout 1 >out 2>error & \n" + until_named +
        "kill -TERM $!; wait $!");
  CHECK(contains(shell.content("out"), " failed hooks"));
  CHECK(shell.content("ends") == "done 0 2 1\n");
}

TEST_CASE("one upload at a time, the newest checkpoint next; a checkpoint that is being uploaded is kept") {
  Workplace shell;
  const std::string slow = "--after-checkpoint 'echo begin $GPT_STEP >>uploads; until [ -f go ]; do sleep 0.05; done; "
                           "test -f $GPT_CHECKPOINT/trainer.json || exit 1; echo end $GPT_STEP >>uploads' ";
  shell("$TEXT --steps 20 --checkpoint-every 1 --keep 1 --out run " + slow + end + " >out 2>error & \nuntil grep -sqx 'begin 20' uploads; do sleep "
        "0.05; done; ls run >listed; touch go; wait $!; echo $? >code");
  CHECK(shell.content("code") == "0\n");
  CHECK(shell.content("error") == "");
  const auto uploads = lines_of(shell.content("uploads"));
  CAPTURE(shell.content("uploads"));
  CAPTURE(shell.content("listed"));
  REQUIRE(uploads.size() == 3);  // at the end nobody waits for the first
  CHECK(uploads[1] == "begin 20");
  CHECK(uploads[2] == "end 20");
  const std::string first = uploads[0].substr(6), name = "step_" + std::string(8 - first.size(), '0') + first;
  CHECK(contains(shell.content("listed"), name + "\n"));
  CHECK(shell.content("ends") == "done 0 20 1\n");
}

TEST_CASE("--stop-when saves and stops the run; a command that cannot be run is named, and stops nothing") {
  Workplace shell;
  const auto stopped = shell(endless + "--stop-when 'test -s run/metrics.jsonl' " + end);
  CHECK(stopped.code == 75);
  CHECK(stopped.error == "");
  CHECK(contains(stopped.out, "--stop-when: stopped after step "));
  CHECK(contains(shell.output("ls run"), "step_0"));
  CHECK(shell.content("ends").starts_with("stopped 75 "));
  shell("rm ends; " + endless + "--overwrite --stop-when no_such_command " + end + ">out 2>error & \n" + until_named + "sleep 0.5; kill -TERM $!; wait $!");
  CHECK(std::ranges::count(shell.content("error"), '\n') == 1);
  CHECK(contains(shell.content("error"), "train_gpt: --stop-when ended with exit code 127 ("));
  CHECK(contains(shell.content("out"), "SIGTERM: stopped after step "));
  CHECK(shell.content("ends").starts_with("stopped 75 "));
}

TEST_CASE("--on-end is called after a signal, an error, a limit of time, and after SIGKILL") {
  Workplace shell;
  shell("rm -rf run ends; " + endless + end + " >out 2>error & \n" + until_begun + "kill -TERM $!; wait $!; echo $? >code");
  CHECK(shell.content("code") == "75\n");
  CHECK(shell.content("ends").starts_with("stopped 75 "));
  shell("rm -rf run ends; " + endless + end + "--max-hours 1e-4");
  CHECK(shell.content("ends").starts_with("time 75 "));
  shell("rm -rf run ends; " + endless + end + " >out 2>error & \n" + until_begun + "echo x >text; wait $!");
  CHECK(shell.content("ends") == "error 1 0 0\n");
  put(shell / "text", some_text(5000));
  shell("rm -rf run ends; " + endless + end + " >out 2>error & \n" + until_begun + "kill -KILL $!; until [ -s ends ]; do sleep 0.05; done");
  CHECK(shell.content("ends") == "killed 137 0 0\n");
  shell("rm -rf run ends; $TEXT --train nowhere --out run " + end);
  CHECK(shell.content("ends") == "error 1 0 0\n");
  // Before the first step: while it waits for another rank, and while it waits for a folder, where the machine is not its own.
  shell("rm -rf run ends; RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29873 $TEXT --out run " + end + "& \n" + until_it_heeds_signals + "kill -USR1 $!; "
        "wait $!; echo $? >code");
  CHECK(shell.content("code") == "75\n");
  CHECK(shell.content("ends") == "stopped 75 0 0\n");
  shell("rm -rf run ends; mkdir run; flock -o run sleep 20 & \n$TEXT --out run " + end + ">out 2>error & \nuntil grep -sq '^waiting' out; do sleep 0.01; "
        "done; kill -TERM $!; wait $!; echo $? >code; pkill -P $$ flock");
  CHECK(shell.content("code") == "75\n");
  CHECK(contains(shell.content("error"), "another run writes to "));
  CHECK(!shell.exists("ends"));
  shell("rm -rf run ends; $GPT --train text --layers 8 --channels 512 --heads 8 --seq-len 64 --micro-batch 1 --out run " + end + "& \n"
        "until [ -d run ]; do sleep 0.01; done; kill -TERM $!; wait $!");
  CHECK(shell.content("ends") == "stopped 75 0 0\n");
  shell("rm -rf run ends; $TEXT --lr x --out run " + end);  // a mistake in the command line ends no machine
  shell("$TEXT --out run");
  shell.refuses("$TEXT --out run " + end, 2, {"holds a run"});
  CHECK(!shell.exists("ends"));
}

TEST_CASE("hooks that hang are ended with what they have started, and named; the exit code stays") {
  Workplace shell;
  const auto hangs = shell("$TEXT --steps 2 --out run --hook-timeout 1 --after-checkpoint 'sleep 54321 & sleep 54321' "
                           "--on-end 'echo $GPT_UPLOADED >uploaded; sh -c \"trap \\\"sleep 0.2; touch tidy; exit\\\" TERM; while :; do sleep "
                           "0.05; done\"; sleep 54321'");
  CHECK(hangs.code == 0);
  CHECK(contains(hangs.error, "train_gpt: --after-checkpoint has not succeeded for step 2 within 1 s (--hook-timeout): upload "));
  CHECK(contains(hangs.error, "train_gpt: --on-end takes more than 1 s (--hook-timeout), and was ended: "));
  CHECK(std::ranges::count(hangs.error, '\n') == 2);
  CHECK(shell.content("uploaded") == "0\n");
  CHECK(shell.exists("tidy"));  // what a hook has started gets time to end by itself
  CHECK(shell("pgrep -f 'sleep 54321'").code == 1);
}

TEST_CASE("after SIGKILL the next run waits for the hooks; if it runs already, they are left to it") {
  Workplace shell;
  const std::string killed = "rm -rf run order; " + endless + "--on-end 'sleep 1; echo end >>order' 2>error & \n" + until_begun;
  shell.output(killed + "kill -KILL $!; $TEXT --steps 2 --out run --overwrite --on-end 'echo next >>order' >next");
  CHECK(shell.content("order") == "end\nnext\n");
  CHECK(shell.content("next").starts_with("waiting for the run that still writes to run\n"));
  // The hooks of a run that has finished keep its folder, too.
  shell("rm -rf run order; $TEXT --out run --on-end 'echo begin >>order; sleep 1; echo end >>order' >out & \nuntil [ -s order ]; do sleep 0.01; "
        "done; $TEXT --out run --overwrite --on-end 'echo next >>order'; wait");
  CHECK(shell.content("order") == "begin\nend\nnext\n");
  shell("rm next; " + killed + "helper=$(pgrep -P $!); kill -STOP $helper; kill -KILL $!; " + endless + "--overwrite >next & \nuntil grep -sq '^step ' next; do "
        "sleep 0.05; done; kill -CONT $helper; until [ -s error ]; do sleep 0.05; done; kill -TERM $!; wait $!");
  CHECK(contains(shell.content("error"), "train_gpt: hooks: another run writes to "));
  CHECK(!shell.exists("order"));
}

TEST_CASE("a signal does not cut the hooks of the end short") {
  Workplace shell;
  shell("$TEXT --out run --on-end 'touch ending; sleep 1; echo $GPT_REASON >ends' >out & \nuntil [ -f ending ]; do sleep 0.02; done; "
        "kill -TERM $!; kill -HUP $!; wait $!; echo $? >code");
  CHECK(shell.content("code") == "0\n");
  CHECK(shell.content("ends") == "done\n");
}

TEST_CASE("training goes on if the process that runs the hooks is killed") {
  Workplace shell;
  const auto lost = shell("$TEXT --steps 400 --out run " + end + "& \n" + until_begun + "kill -KILL $(pgrep -P $!); wait $!");
  CHECK(lost.code == 0);
  CHECK(lost.error == "train_gpt: hooks: their process has ended, training goes on without them\n");
  CHECK(contains(lost.out, "1 failed hook"));
  const auto end_lost = shell("$TEXT --out other --on-end 'kill -KILL $PPID'");
  CHECK(end_lost.code == 0);
  CHECK(end_lost.error == "train_gpt: hooks: their process was killed: see whether --on-end has run\n");
}

TEST_CASE("a start that waits for the run before does not take its --stop-when away; a mistake leaves no hook behind") {
  Workplace shell;
  const auto waiting = shell("mkdir run; flock run sh -c 'sleep 1; touch free' & \nsleep 0.2; touch stop; $TEXT --steps 400 --out run "
                             "--stop-when 'if [ -e free ]; then rm stop; else echo early >>asked; fi'");
  CHECK(!shell.exists("asked"));
  CHECK(contains(waiting.out, "waiting for the run"));
  shell("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29871 GPT_JOIN_TIMEOUT=1 $TEXT --out alone " + end);
  CHECK(shell.content("ends") == "error 1 0 0\n");  // a host that never came
}

TEST_CASE("a hook may write as much as it likes") {
  Workplace shell;
  shell.output("$TEXT --steps 2 --out run --after-checkpoint 'seq 1000000; seq 100000 >&2' " + end);
  CHECK(shell.content("ends") == "done 0 2 1\n");
}

TEST_CASE("hooks that make no sense are refused, and help is printed once") {
  Workplace shell;
  const std::string help = shell.output("$GPT --help --on-end true");
  CHECK(help.find("Trains a GPT") == help.rfind("Trains a GPT"));
  shell.refuses("$TEXT --out '' --on-end true", 2, {"--on-end needs a run folder, and --out '' names none"});
  shell.refuses("$TEXT --out run --on-end ''", 2, {"--on-end '' names nothing: leave the option out"});
  shell.refuses("$TEXT --out run --hook-timeout 5", 2, {"--hook-timeout needs --after-checkpoint or --on-end"});
  shell.refuses("$GPT --generate --resume run --stop-when true", 2, {"--stop-when beside --generate"});
}

TEST_CASE("several ranks: rank 0 calls the hooks, and waits for them before any rank ends" * doctest::skip(is_gpu_build() || !mpirun_found)) {
  Workplace shell;
  const std::string ranks = "OMP_NUM_THREADS=1 " + mpirun() + " 2 ";
  shell.output(ranks + "$TEXT --steps 4 --checkpoint-every 2 --out run --after-checkpoint 'sleep 1; echo $GPT_STEP >>uploads' " + end);
  CHECK(lines_of(shell.content("uploads")).back() == "4");
  CHECK(shell.content("ends") == "done 0 4 1\n");
  // Exit code 75 of one rank would make mpirun end the others.
  const auto stopped = shell("rm -rf run ends; " + ranks + endless + "--stop-when 'test -s run/metrics.jsonl' --after-checkpoint 'sleep 1; echo "
                             "$GPT_STEP >last' " + end);
  CHECK(stopped.code == 75);
  CHECK(shell.content("ends") == "stopped 75 " + shell.content("last").substr(0, shell.content("last").size() - 1) + " 1\n");
  // After an error no rank ends before the hooks: two ranks, and the process that runs the hooks.
  shell("rm -rf run ends; " + ranks + endless + "--seed 54322 --on-end 'sleep 2; pgrep -fc \"^[^ ]*train_gpt .*--seed 54322\" >alive' >out "
        "2>error & \n" + until_begun + "echo x >text; wait $!");
  CHECK(shell.content("alive") == "3\n");
  put(shell / "text", some_text(5000));
  // The other rank is killed: its environment tells which one that is.
  shell("rm -rf run ends; " + ranks + endless + end + ">out 2>error & \n" + until_begun +
        "for p in $(pgrep -f 'steps 999999999'); do tr '\\0' '\\n' </proc/$p/environ | grep -qx OMPI_COMM_WORLD_RANK=1 && "
        "kill -KILL $p; done; until [ -s ends ]; do sleep 0.05; done; wait");
  CHECK(shell.content("ends").starts_with("error 1 "));
}
