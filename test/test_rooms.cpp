// The floors of the house: a file includes only files of its own floor or of a lower one, never in a circle. The core stands
// below the rooms that plug into it, its kernels below its model. What rises all the same is counted: test/core.txt.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "test/house.h"
#include "test/temporary_folder.h"

namespace {

// From the top down; folders in one line don't know each other. The rooms are one floor, and their kernels another one.
const std::vector<std::vector<std::string>> floors = {{"train_gpt.cu"},
                                                      {"rooms"},
                                                      {"gpt"},
                                                      {"kernels of rooms"},
                                                      {"kernels"},
                                                      {"kernels/attention", "kernels/gemm"},
                                                      {"kernels/device", "gpt/base"},
                                                      {"cpu"}};

std::string place_of(const std::string& file) {
  if (!room_of(file).empty()) return file.find("/kernels/") == file.npos ? "rooms" : "kernels of rooms";
  const size_t first = file.find('/'), second = file.find('/', first + 1);
  const bool is_nested = second != file.npos && (file.starts_with("gpt/") || file.starts_with("kernels/"));
  return file.substr(0, is_nested ? second : first);
}

// Floor 0 is the top. Returns the number of floors for what is no part of the house.
size_t floor_of(const std::string& file) {
  const std::string place = place_of(file);
  const auto has_place = [&](const auto& places) { return std::find(places.begin(), places.end(), place) != places.end(); };
  return size_t(std::find_if(floors.begin(), floors.end(), has_place) - floors.begin());
}

// known: arrows from the core to a room that there still are (test/core.txt)
std::vector<std::string> arrows_that_do_not_point_down(const Includes& includes, const std::set<std::string>& known = {}) {
  std::vector<std::string> arrows;
  for (const auto& [file, others] : includes)
    for (const std::string& other : others) {
      const std::string arrow = file + " -> " + other;
      if (place_of(file) != place_of(other) && (floor_of(other) <= floor_of(file) || floor_of(other) == floors.size()) && !known.contains(arrow))
        arrows.push_back(arrow);
    }
  return arrows;
}

// A file whose includes lead back to it; empty: there is none.
std::string circle(const Includes& includes) {
  std::map<std::string, int> seen;  // 1: its includes are being followed, 2: there is no circle
  std::string found;
  const auto follow = [&](const auto& self, const std::string& file) -> void {
    if (seen[file] == 1) found = file;
    if (std::exchange(seen[file], std::max(seen[file], 1)) != 0) return;
    if (const auto others = includes.find(file); others != includes.end())
      for (const std::string& other : others->second) self(self, other);
    seen[file] = 2;
  };
  for (const auto& [file, others] : includes) follow(follow, file);
  return found;
}

}  // namespace

TEST_CASE("what a file includes lies in its room or below, and there is no circle") {
  const Includes includes = includes_of(sources_of_the_house());
  CHECK(includes.size() > 80);
  CHECK(includes.contains("train_gpt.cu"));
  const std::vector<std::string> known = lines_of("test/core.txt");
  for (const std::string& arrow : arrows_that_do_not_point_down(includes, {known.begin(), known.end()})) FAIL_CHECK(arrow);
  CHECK(circle(includes) == "");
}

TEST_CASE("arrows that point up, sideways or out of the house, and circles, are found") {
  const auto arrows = [](const std::string& file, const std::string& other) {
    return arrows_that_do_not_point_down({{file, {other}}}).size();
  };
  CHECK(arrows("train_gpt.cu", "gpt/job.cuh") == 0);
  CHECK(arrows("gpt/options.h", "gpt/tensors.h") == 0);
  CHECK(arrows("gpt/zero.cuh", "kernels/norm.cuh") == 0);
  CHECK(arrows("gpt/zero.cuh", "gpt/base/error.h") == 0);
  CHECK(arrows("kernels/gelu.cuh", "kernels/device/common.cuh") == 0);
  CHECK(arrows("extensions/fp8/fp8.cuh", "gpt/tensors.h") == 0);
  CHECK(arrows("extensions/fp8/fp8.cuh", "extensions/fp8/kernels/fp8.cuh") == 0);
  CHECK(arrows("extensions/fp8/kernels/fp8.cuh", "kernels/device/common.cuh") == 0);
  CHECK(arrows("extensions/fp8/kernels/fp8.cuh", "extensions/fp8/fp8.cuh") == 1);
  CHECK(arrows("extensions/fp8/kernels/fp8.cuh", "gpt/tensors.h") == 1);
  CHECK(arrows("gpt/zero.cuh", "extensions/fp8/kernels/fp8.cuh") == 0);  // below, but core.txt has to know it
  CHECK(arrows("gpt/zero.cuh", "extensions/fp8/fp8.cuh") == 1);
  CHECK(arrows("gpt/base/error.h", "gpt/options.h") == 1);
  CHECK(arrows("gpt/base/error.h", "kernels/device/common.cuh") == 1);
  CHECK(arrows("kernels/attention/attention.cuh", "kernels/gelu.cuh") == 1);
  CHECK(arrows("kernels/device/profile.cuh", "runtime/checks/kernels/statistics.cuh") == 1);
  CHECK(arrows("kernels/gelu.cuh", "test/bounds.h") == 1);
  CHECK(arrows("gpt/job.cuh", "train_gpt.cu") == 1);
  CHECK(circle({{"a", {"b"}}, {"b", {"c"}}, {"d", {"b", "c"}}}) == "");
  CHECK(circle({{"a", {"b"}}, {"b", {"c"}}, {"c", {"b"}}}) == "b");
  CHECK(circle({{"a", {"a"}}}) == "a");
}

// A kernel in a header that is neither a template nor static is defined in each object that includes it, and nvcc does not
// link them. (To g++ a launch is a call of a template, so the CPU device does.)
TEST_CASE("each kernel of a header is a template, or static") {
  int kernels = 0;
  for (const char* folder : {"kernels", "gpt", "extensions", "runtime", "dev", "test"})
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      if (entry.path().extension() != ".cuh") continue;
      std::ifstream text(entry.path());
      std::string before;
      for (std::string line; std::getline(text, line); before = line) {
        if (line.find("__global__ ") == line.npos || line.starts_with("//")) continue;
        CAPTURE(entry.path().string());
        CAPTURE(line);
        const std::string both = before + line;
        CHECK((both.find("template <") != both.npos || both.find("static") != both.npos));
        ++kernels;
      }
    }
  CHECK(kernels > 50);
}

// One reads gpt.cuh to learn the model, and model.cuh to use it.
TEST_CASE("gpt.cuh says what is computed, and not how it is shared; it and model.cuh are short") {
  for (const auto& [file, most] : {std::pair("gpt/gpt.cuh", 250), {"gpt/model.cuh", 110}}) {
    CAPTURE(file);
    std::ifstream text(file);
    int lines = 0;
    const std::regex shared("\\b(ranks?|groups?|mesh|communicators?|collectives?|links?|caches?|schedules?|librar(y|ies)|bubble|pipelines?|"
                            "tp|cp|dp|pp|gather|scatter|offsets?)\\b", std::regex::icase);
    for (std::string line; std::getline(text, line); ++lines) {
      CAPTURE(line);
      CHECK((file == std::string("gpt/model.cuh") || !std::regex_search(line, shared)));
    }
    CHECK(lines > 50);
    CHECK(lines <= most);
  }
}

namespace {

// The files in backticks of a page's text, in order: names with a dot and without spaces.
std::vector<std::string> files_named_in(const std::string& text) {
  std::vector<std::string> files;
  const std::regex quoted("`([A-Za-z_0-9/]+\\.(cuh?|h|cpp|md))`");
  for (std::sregex_iterator match(text.begin(), text.end(), quoted), end; match != end; ++match) files.push_back((*match)[1]);
  return files;
}

// What lies between two texts in a file.
std::string part_of(const char* file, const std::string& from, const std::string& to) {
  const std::string text = content_of(file);
  const size_t begin = text.find(from), end = text.find(to, begin + from.size());
  REQUIRE(begin != text.npos);
  REQUIRE(end != text.npos);
  return text.substr(begin, end - begin);
}

}  // namespace

TEST_CASE("three walks through the house: their files exist, the first is README's too, and none has more than twelve") {
  const struct {
    const char *heading, *next;
  } walks[] = {{"### A step\n", "\n### "}, {"### A micro-batch through a pipeline\n", "\n### "}, {"### A checkpoint\n", "\n**Then"}};
  std::vector<std::vector<std::string>> steps;  // of each walk: the first file of each numbered line
  for (const auto& walk : walks) {
    CAPTURE(walk.heading);
    const std::string text = part_of("docs/teach.md", walk.heading, walk.next);
    std::istringstream lines(text);
    steps.emplace_back();
    for (std::string line; std::getline(lines, line);)
      if (const std::vector<std::string> files = files_named_in(line); !files.empty() && std::isdigit(line[0])) steps.back().push_back(files[0]);
    CHECK(steps.back().size() >= 10);
    CHECK(steps.back().size() <= 12);
    for (const std::string& file : files_named_in(text)) {
      CAPTURE(file);
      CHECK(std::filesystem::exists(file));
    }
  }
  CHECK(steps[0] == files_named_in(part_of("README.md", "**Read in this order:**", "[What to look for")));
}

namespace {

// To these folders, whatever repository they lie in, if any
bool applies(const std::string& patch) {
  return std::system(("GIT_CEILING_DIRECTORIES=\"$(dirname \"$PWD\")\" git apply --check " + patch).c_str()) == 0;
}

}  // namespace

// test/mistakes/run.sh plants them, which takes half an hour: what has moved since shows here.
TEST_CASE("the mistakes that --check-mesh and tests have to find fit the sources" *
          doctest::skip(std::system("git --version >/dev/null 2>&1") != 0)) {
  size_t patches = 0;
  const std::string page = content_of("test/README.md");  // has a row for each
  for (const auto& entry : std::filesystem::directory_iterator("test/mistakes")) {
    if (entry.path().extension() != ".patch") continue;
    CAPTURE(entry.path().string());
    CHECK(applies(entry.path().string()));
    std::ifstream file(entry.path());
    int ranks = 0;
    std::string option;
    file >> ranks >> option;
    std::string rest, what;
    std::getline(file, rest);
    std::getline(file, what);
    REQUIRE(what.ends_with("."));
    CHECK(page.find("| `" + entry.path().stem().string() + "` | " + what.substr(0, what.size() - 1) + " | ") != page.npos);
    const bool is_test = option.starts_with("test_");
    CHECK(ranks >= (is_test ? 1 : 2));
    CHECK((is_test || option.starts_with("--")));
    ++patches;
  }
  CHECK(patches > 20);
  CHECK(applies("dev/gpu_check/each_lane_arrives.patch"));
}

// docs/solutions/check.sh builds and runs them.
TEST_CASE("the solutions of exercises fit the sources, and the course names each of them" *
          doctest::skip(std::system("git --version >/dev/null 2>&1") != 0)) {
  const std::string course = content_of("docs/teach.md");
  size_t patches = 0;
  for (const auto& entry : std::filesystem::directory_iterator("docs/solutions")) {
    if (entry.path().extension() != ".patch") continue;
    CAPTURE(entry.path().string());
    CHECK(applies(entry.path().string()));
    CHECK(lines_of(entry.path().string())[0].starts_with("build/"));  // what shows that it is right
    CHECK(course.find("Solution: `" + entry.path().filename().string() + "`") != course.npos);
    ++patches;
  }
  CHECK(patches >= 3);
}

// Both scripts end with an error at a line, a file or a test that they do not know. They run whole by hand, in parts in CI.
TEST_CASE("the barriers and events that are left out in turn are known, and so are their tests, which make can build") {
  for (const std::string kind : {"barriers", "events"}) {
    const std::string log = "build/" + kind + ".names";
    const int status = std::system(("mkdir -p build && test/remove_" + kind + ".sh --names >" + log + " 2>&1").c_str());
    INFO(content_of(log));
    CHECK(status == 0);
    CHECK(content_of(log).starts_with(kind + ": "));
  }
}

TEST_CASE("the table of tolerances has a row for each comparison; a share that is larger than the table's is named") {
  const std::string log = "build/shares.log";
  const auto shares = [&](const std::string& lines) {
    std::ofstream("build/shares.made_up") << lines;
    return std::system(("python3 test/shares.py --check build/shares.made_up >" + log + " 2>&1").c_str());
  };
  std::filesystem::create_directory("build");
  const std::string gelu = "test_gelu\tgelu forward and backward<float>: out.numbers()\t";
  CHECK(shares(gelu + "0.01\n") == 0);
  CHECK(shares(gelu + "0.99\n") != 0);
  CHECK(content_of(log).find("larger than the table's: test_gelu, out, gradient in fp32: 0.99") != std::string::npos);
  CHECK(shares("test_gelu\tgelu<float>: out\t0.1\ntest_nothing\tx: y\t0.1\n") != 0);
  CHECK(content_of(log).find("in no row: test_nothing, x: y") != std::string::npos);
}

namespace {

// The numbers that a pattern's groups match in a text; commas are left out.
std::vector<int> numbers_in(const std::string& text, const std::string& pattern) {
  std::smatch match;
  CAPTURE(pattern);
  REQUIRE(std::regex_search(text, match, std::regex(pattern)));
  std::vector<int> numbers;
  for (size_t i = 1; i < match.size(); ++i) numbers.push_back(std::stoi(std::regex_replace(match[i].str(), std::regex(","), "")));
  return numbers;
}

// "Some 800" is said of 780 to 820, so that not each new line changes a page.
bool is_about(int said, int counted) { return std::abs(said - counted) <= counted / 40; }

struct Counts {
  int lines = 0, lines_of_cpu = 0, cases = 0, programs = 0;
};

Counts counts_of_the_house() {
  Counts counts;
  for (const std::string& file : sources_of_the_house()) {
    const int lines = int(lines_of(file).size());
    counts.lines += lines;
    if (file.starts_with("cpu/")) counts.lines_of_cpu += lines;
  }
  for (const std::string& file : sources_of({"test"})) {
    const std::filesystem::path path(file);
    if (!path.filename().string().starts_with("test_") || (path.extension() != ".cu" && path.extension() != ".cpp")) continue;
    ++counts.programs;
    for (const std::string& line : lines_of(file)) counts.cases += line.starts_with("TEST_CASE");
  }
  return counts;
}

}  // namespace

TEST_CASE("counts in pages are those of the sources, or of the results that the page names") {
  const std::string readme = content_of("README.md"), tests = content_of("test/README.md");
  const Counts counts = counts_of_the_house();
  CAPTURE(counts.lines);
  CAPTURE(counts.lines_of_cpu);
  CAPTURE(counts.cases);
  CAPTURE(counts.programs);
  const std::vector<int> lines = numbers_in(readme, "\\| some ([0-9,]+), of which the CPU device has ([0-9,]+) \\|");
  CHECK(is_about(lines[0], counts.lines));
  CHECK(is_about(lines[1], counts.lines_of_cpu));
  CHECK(is_about(numbers_in(readme, "runs some ([0-9,]+) test cases")[0], counts.cases));
  const std::vector<int> programs = numbers_in(tests, "some ([0-9,]+) test cases in some ([0-9]+) programs");
  CHECK(is_about(programs[0], counts.cases));
  CHECK(is_about(programs[1], counts.programs));

  const std::string runs = content_of("dev/published/runs.csv");  // a line of names, then a row each
  CHECK(numbers_in(content_of("docs/rent.md"), "All \\[([0-9]+) published rows\\]")[0] == int(std::count(runs.begin(), runs.end(), '\n')) - 1);

  std::istringstream block(part_of("test/ranks/test_second_block.cu", "template <class Float>\nclass SecondBlock", "\n};") + "\n};");
  int code = 0;
  for (std::string line; std::getline(block, line);) code += !line.empty();
  CHECK(numbers_in(content_of("CONTRIBUTING.md"), "has one in ([0-9]+) lines")[0] == code);

  // The launch that cpu/README.md follows, and the kernel at which it stops in gdb
  const std::string cpu = content_of("cpu/README.md"), gelu = content_of("kernels/gelu.cuh");
  std::smatch launch;
  REQUIRE(std::regex_search(cpu, launch, std::regex("\n(gelu_forward_kernel<.*;) +// kernels/gelu.cuh")));
  CHECK(gelu.find(launch[1].str()) != gelu.npos);
  CHECK(cpu.find("break gelu_forward_kernel<float, 16, Unseen> if ") != cpu.npos);
  CHECK(gelu.find("template <class Float, int N, class Seen>\n__global__ void gelu_forward_kernel(") != gelu.npos);

  // "barriers removed: 35 of 35, found missing: 35": the last lines of the scripts
  std::smatch link;
  const std::string proof = part_of("README.md", "- **Races and missing events", "\n- ");
  REQUIRE(std::regex_search(proof, link, std::regex("\\]\\((dev/results/[^)]+)\\)")));
  const std::string results = content_of(link[1].str());
  for (const std::string kind : {"barriers", "events"}) {
    CAPTURE(kind);
    const std::vector<int> ran = numbers_in(results, kind + " removed: ([0-9]+) of ([0-9]+), found missing: ([0-9]+)");
    const std::vector<int> said = numbers_in(proof, "([0-9]+) of ([0-9]+) " + std::string(kind == "events" ? "lines that order" : kind));
    CHECK(said == std::vector<int>{ran[2], ran[1]});
  }
}

namespace {

const std::vector<std::string> folders_of_pages = {"cpu", "data", "dev", "docs", "extensions", "gpt", "kernels", "runtime", "test"};

std::vector<std::string> pages_of_the_house() {
  std::vector<std::string> pages = {"CONTRIBUTING.md", "README.md"};
  for (const std::string& folder : folders_of_pages)
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
      if (entry.path().extension() == ".md") pages.push_back(entry.path().string());
  return pages;
}

// A page's lines without blocks of code.
std::vector<std::string> prose_of(const std::string& page) {
  std::vector<std::string> prose;
  bool is_code = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) is_code = !is_code;
    else if (!is_code) prose.push_back(line);
  }
  return prose;
}

// What a link may name after #: "## How it is *confirmed*" is how-it-is-confirmed, as GitHub writes it, and <a id="x"> is x.
std::set<std::string> anchors_of(const std::string& page) {
  std::set<std::string> anchors;
  std::smatch match;
  for (const std::string& line : prose_of(page)) {
    if (std::regex_search(line, match, std::regex("<a id=\"([^\"]+)\""))) anchors.insert(match[1]);
    if (!std::regex_match(line, match, std::regex("#+ (.*)"))) continue;
    std::string anchor;
    for (const unsigned char c : std::regex_replace(match[1].str(), std::regex("\\[([^\\]]*)\\]\\([^)]*\\)"), "$1"))
      if (c == ' ') anchor += '-';
      else if (c >= 128 || std::isalnum(c) || c == '-' || c == '_') anchor += char(std::tolower(c));
    anchors.insert(anchor);
  }
  return anchors;
}

}  // namespace

TEST_CASE("links and pictures of all pages lead to files that are there, and to headings in them") {
  int links = 0;
  for (const std::string& page : pages_of_the_house()) {
    CAPTURE(page);
    for (const std::string& line : prose_of(page)) {
      const std::regex link("\\]\\(([^)# ]*)(#([^) ]+))?\\)");
      for (std::sregex_iterator match(line.begin(), line.end(), link), end; match != end; ++match, ++links) {
        const std::string file = (*match)[1], anchor = (*match)[3];
        if (file.find("://") != file.npos) continue;
        CAPTURE(line);
        std::filesystem::path target = page;
        if (!file.empty()) target = (target.parent_path() / file).lexically_normal();
        CHECK(std::filesystem::exists(target));
        if (!anchor.empty()) CHECK(anchors_of(target.string()).contains(anchor));
      }
    }
  }
  CHECK(links > 300);
}

// The first page: what one reads on a phone.
TEST_CASE("README has at most 1,800 words, code of 80 columns, the block of gpt.cuh, every room, and the figures of its results") {
  const std::string readme = content_of("README.md");
  std::istringstream text(readme);
  CHECK(std::distance(std::istream_iterator<std::string>(text), {}) <= 1800);
  bool is_code = false;
  for (const std::string& line : lines_of("README.md")) {
    const size_t begin = line.find_first_not_of(' ');
    if (begin != line.npos && line.compare(begin, 3, "```") == 0) is_code = !is_code;
    CAPTURE(line);
    CHECK((!is_code || line.size() <= 80));
  }

  const std::string model = content_of("gpt/gpt.cuh");
  int statements = 0;
  std::istringstream block(part_of("README.md", "\nnorm1.forward(", "```"));
  for (std::string line; std::getline(block, line);) {
    if (line.empty()) continue;
    CAPTURE(line);
    CHECK(model.find("    " + line) != model.npos);
    ++statements;
  }
  CHECK(statements == 14);

  const std::string table = part_of("README.md", "\n## Rooms\n", "\n## ");
  for (const char* floor : {"extensions", "runtime"})
    for (const auto& entry : std::filesystem::directory_iterator(floor))
      if (entry.is_directory()) {
        const std::string page = entry.path().string() + "/README.md";
        CHECK_MESSAGE(table.find("](" + page + ")") != table.npos, page);
      }

  const std::string measured = part_of("README.md", "\n## Measured on one H200\n", "![");
  std::string results;
  const std::regex link("\\]\\((dev/results/[^)]+)\\)");
  for (std::sregex_iterator match(measured.begin(), measured.end(), link), end; match != end; ++match) results += content_of((*match)[1].str());
  const std::regex number("[0-9]+,[0-9]{3}");
  int figures = 0;
  for (std::sregex_iterator match(measured.begin(), measured.end(), number), end; match != end; ++match, ++figures)
    CHECK_MESSAGE(results.find(match->str()) != results.npos, match->str());
  CHECK(figures > 5);
}

TEST_CASE("the commands of the front pages name programs, scripts and options that there are") {
  std::string options;
  for (const std::string& file : sources_of({"gpt", "extensions", "runtime"}))
    if (file.ends_with("option_list.cpp") || file.ends_with("room.cpp")) options += content_of(file);
  std::set<std::string> programs;
  for (const char* folder : {"test", "dev"})
    for (const std::string& file : sources_of({folder})) programs.insert(std::filesystem::path(file).stem().string());
  int commands = 0;
  for (const std::string page : {"README.md", "docs/rent.md", "docs/teach.md", "runtime/README.md"})
    for (const std::string& line : lines_of(page)) {
      CAPTURE(page);
      CAPTURE(line);
      const auto for_each = [&](const char* pattern, const auto& check) {
        const std::regex found(pattern);
        for (std::sregex_iterator match(line.begin(), line.end(), found), end; match != end; ++match, ++commands) {
          INFO(match->str());
          check((*match)[1].str());
        }
      };
      for_each("\\b((dev|test|docs)/[a-z0-9_/]+\\.(py|sh|sbatch|patch|cu))(?![.a-z])", [](const std::string& file) { CHECK(std::filesystem::exists(file)); });
      for_each("`([a-z0-9_]+\\.patch)`", [](const std::string& file) {
        CHECK((std::filesystem::exists("test/mistakes/" + file) || std::filesystem::exists("docs/solutions/" + file)));
      });
      for_each("build/(?:cpu|host|gpu)/([a-z0-9_]+)", [&](const std::string& program) {
        const std::string name = program.starts_with("ladder_") ? program.substr(7) : program;
        CHECK(programs.contains(name));
      });
      if (line.find("train_gpt") == line.npos && line.find("mpirun.sh") == line.npos && line.find("MPI") == line.npos && line.find("TRAIN") == line.npos) continue;
      if (line.find("python3 ") != line.npos || line.find("docker ") != line.npos || line.find("sky ") != line.npos) continue;
      for_each("(--[a-z][a-z0-9-]+)\\b", [&](const std::string& option) {
        CHECK((option == "--help" || option == "--recipe" || options.find('"' + option + '"') != options.npos));
      });
    }
  CHECK(commands > 100);
}

// Who deletes a room reads there what falls with it. (What is no longer needed may still be named.)
TEST_CASE("each room has a page of 150 to 700 words, which names its options, the rooms that need it, and where to go on") {
  std::map<std::string, std::vector<std::string>> needed_by;
  std::smatch arrow;
  for (const std::string& line : lines_of("test/core.txt"))
    if (std::regex_match(line, arrow, std::regex("((?:extensions|runtime)/\\w+) -> (\\S+)"))) needed_by[arrow[2]].push_back(arrow[1]);
  CHECK(needed_by.size() > 5);
  for (const char* floor : {"extensions", "runtime"})
    for (const auto& entry : std::filesystem::directory_iterator(floor)) {
      if (!entry.is_directory()) continue;
      const std::string room = entry.path().string(), page = room + "/README.md";
      CAPTURE(page);
      REQUIRE(std::filesystem::exists(page));
      int words = 0;
      std::istringstream text(content_of(page));
      for (std::string word; text >> word;)
        words += std::any_of(word.begin(), word.end(), [](unsigned char c) { return std::isalnum(c); });
      CHECK(words >= 150);
      CHECK(words <= 700);
      const std::string serves = part_of(page.c_str(), "\n## Serves\n", "\n## Goes with\n");
      for (const std::string& other : needed_by[room]) CHECK_MESSAGE(serves.find('`' + other + '`') != serves.npos, other);
      const std::string options = std::filesystem::exists(room + "/room.cpp") ? content_of(room + "/room.cpp") : "";
      const std::regex added("add(?:_option|_flag)?\\((?:app, )?\"(--[a-z0-9-]+)\"");
      for (std::sregex_iterator option(options.begin(), options.end(), added), end; option != end; ++option)
        CHECK_MESSAGE(content_of(page).find('`' + (*option)[1].str()) != std::string::npos, (*option)[1].str());
      for (const char* part : {"\n## How it is confirmed\n", "\n## Where to read\n"}) CHECK(content_of(page).find(part) != std::string::npos);
    }
}
