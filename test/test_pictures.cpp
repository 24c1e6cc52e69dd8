// The pictures that `make bench` and a ladder end with (dev/roofline_plot.py, dev/ladders/picture.cpp), read back by Python,
// and those of the pages, drawn again. Left out where there is no Python.
#include <doctest/doctest.h>

#include <sys/wait.h>

#include "test/build_folder.h"
#include "test/skip.h"
#include "test/temporary_folder.h"

namespace {

const bool python_found = std::system("python3 --version > /dev/null 2>&1") == 0;

// What `command` prints, errors too; $folder is for its files.
struct Shell {
  TemporaryFolder folder;
  int code = 0;

  std::string operator()(const std::string& command) {
    const std::string at = folder.path().string();
    const int status = std::system(("folder='" + at + "'\n{ " + command + "\n} > \"$folder/out\" 2>&1").c_str());
    code = WEXITSTATUS(status);
    return content_of(folder / "out");
  }
};

// Prints a roofline's kernels, hollow ones in brackets; where its axes say that the roof has its corner; the kernel there.
const char* read_roofline = R"py(
import itertools, math, re, sys, xml.etree.ElementTree as tree
parts = [(p.tag.split("}")[1], p.attrib, "".join(p.itertext())) for p in tree.parse(sys.argv[1]).getroot()]
circles = [(a, words.split()[0]) for tag, a, words in parts if tag == "circle" and words]
print("kernels", *(name if a["fill"] != "white" else f"({name})" for a, name in circles))
places = {words: (float(a["x"]), float(a["y"])) for tag, a, words in parts if tag == "text" and "transform" not in a}
left, right = places["10"][0], places["100"][0]
below, above = places["10 TFLOP/s"][1] - 4, places["100 TFLOP/s"][1] - 4
x, y = map(float, re.search(r"L(\S+) (\S+)H", next(a["d"] for _, a, _ in parts if a.get("class") == "roof")).groups())
print(f"corner {10 * 10 ** ((x - left) / (right - left)):.2g} {10 * 10 ** ((y - below) / (above - below)):.2g}")
print("there", *(name for a, name in circles if math.hypot(float(a["cx"]) - x, float(a["cy"]) - y) < 0.2))
boxes = [(float(a["x"]), float(a["y"]), 6.2 * len(words)) for _, a, words in parts if a.get("class") == "label"]
hits = [1 for (x, y, w), (u, v, z) in itertools.combinations(boxes, 2) if abs(y - v) < 11 and x < u + z and u < x + w]
print("labels", len(boxes), "overlaps", len(hits))
print("title", *(words for words in places if "B=" in words))
)py";

// The roof has its corner at 200 FLOPs per byte and 800 TFLOP/s. Many kernels lie in one place.
std::string bench_log() {
  std::string log = R"(ceilings  {"device": "a <GPU>", "copy_bytes_per_s": 4e12, "flops_per_s": {"bf16": 8e14}})"
                    "\n\n<d2>&, bf16, B=64, T=1024: median (smallest to largest) of 20 steps after 5\n"
                    "step      103.00 (102.00 to 104.00) ms\n"
                    "kernel                          calls         ms   share      GB/s    GFLOP/s  of ceiling\n"
                    "matmul_forward                   49.0     40.000   40.0%    4000.0   800000.0      100.0%\n"
                    "attention_backward               12.0     20.000   20.0%     500.0   145200.0       18.2%\n"
                    "split_heads                      12.0      2.000    2.0%    3000.0        0.0       75.0%\n"
                    "clip_factor                       1.0      0.001    0.0%       0.0        0.0        0.0%\n";
  for (const char* near : {"a", "b", "c", "d", "e", "f", "g", "h"})
    log += std::string("layernorm_backward_") + near + " 25.0 6.000 6.0% 2000.0 2000.0 50.0%\n";
  return log + "all                                      110.001                                   50.0%\n";
}

}  // namespace

TEST_CASE("a roofline has every kernel, and its corner where the ceilings meet" * doctest::skip(!python_found)) {
  Shell shell;
  put(shell.folder / "log", bench_log());
  put(shell.folder / "read.py", read_roofline);
  const std::string text = shell("cd dev && python3 roofline_plot.py $folder/log -o $folder/svg && "
                                 "python3 $folder/read.py $folder/svg");
  INFO(text);
  REQUIRE(shell.code == 0);
  CHECK(contains(text, "kernels matmul_forward attention_backward layernorm_backward_a "));
  CHECK(contains(text, " layernorm_backward_h (split_heads)\n"));  // the largest first, the table's small one last
  CHECK(contains(text, "corner 2e+02 8e+02\nthere matmul_forward\n"));
  CHECK(contains(text, "labels 11 overlaps 0\ntitle <d2>&, bf16, B=64, T=1024 on a <GPU>: 103.00 ms a step\n"));
  CHECK(contains(content_of(shell.folder / "svg"), "no bytes of it: clip_factor<"));
  CHECK(shell("python3 dev/roofline_plot.py $folder/log --bars -o $folder/bars").starts_with("wrote "));
  const std::string bars = content_of(shell.folder / "bars");
  CHECK(contains(bars, ">A step of &lt;d2&gt;&amp; on one a &lt;GPU&gt;: 103.0 ms<"));
  CHECK(contains(bars, ">40.0 ms, 100 %<"));  // matmul_forward
  CHECK(!contains(bars, "clip_factor"));      // less than a two-hundredth
}

TEST_CASE("what is no log is refused" * doctest::skip(!python_found)) {
  Shell shell;
  CHECK(shell("python3 dev/roofline_plot.py README.md").starts_with("error: README.md has no ceilings"));
  CHECK(shell.code == 1);
  put(shell.folder / "log", bench_log());
  CHECK(shell("python3 dev/roofline_plot.py $folder/log -o /nowhere/svg").starts_with("error: --output /nowhere/svg: "));
  CHECK(shell.code == 2);
}

TEST_CASE("a ladder ends with a picture of its rungs" * doctest::skip(!python_found)) {
  const std::string ladder = built("ladder_gelu");
  if (!std::filesystem::exists(ladder)) return skip(ladder + " is not built");
  Shell shell;
  put(shell.folder / "read.py", R"(
import sys, xml.etree.ElementTree as tree
parts = [(p.tag.split("}")[1], p.attrib, p.text) for p in tree.parse(sys.argv[1]).getroot()]
print("bars", *(a["height"] for tag, a, _ in parts if tag == "rect" and "x" in a))
print("texts", *(words for tag, _, words in parts if tag == "text"), sep=";")
)");
  const std::string printed = shell(ladder + " --rung packs --rung sigmoid --shape rows=3,columns=64 --plot $folder/svg");
  INFO(printed);
  REQUIRE(shell.code == 0);
  if (!contains(printed, "| rung")) return skip("this build neither counts nor measures");
  CHECK(printed.ends_with("\n\npicture   " + (shell.folder / "svg").string() + "\n"));
  const std::string text = shell("python3 $folder/read.py $folder/svg");
  INFO(text);
  CHECK(contains(text, "bars 16 16\n"));
  CHECK(contains(text, "texts;gelu, bf16, rows=3 columns=64;"));
  const bool is_counted = contains(printed, "× least |");
  CHECK(contains(text, is_counted ? ";packs;4.00 bytes an element, 100 %;16 bytes per thread: an eighth" : " µs, "));
  CHECK(contains(shell(ladder + " --help"), "default: beside this program"));
  CHECK(!contains(shell(ladder + " --check --plot $folder/none"), "picture"));
  CHECK(!std::filesystem::exists(shell.folder / "none"));
}

TEST_CASE("the picture of the ladders' times, and the tables of docs/kernels.md, are those of the tables beside it" * doctest::skip(!python_found)) {
  Shell shell;
  CHECK(shell("python3 dev/ladders/tables.py --times --check") == "");
  CHECK(shell.code == 0);
  // A dot for each rung of each table, further right the larger its share
  const std::string text = shell(R"sh(python3 - <<'end'
import re
picture, printed = (open("dev/ladders/" + name).read() for name in ("h200.svg", "tables.txt"))
dots = re.findall(r'cx="([\d.]+)".*?<title>(\w+): ([\d.]+) µs, ([\d.]+) %', picture)
tables = re.findall(r"<!-- h200_\w+ -->.*?<!-- end of h200 -->", printed, re.DOTALL)
rows = [row for table in tables for row in re.findall(r"^\| (\w+) +\| +([\d.]+) ", table, re.MULTILINE) if row[0] not in ("rung", "library")]
order = sorted(dots, key=lambda dot: float(dot[3]))
print(len(tables), [dot[1:3] for dot in dots] == rows, [float(dot[0]) for dot in order] == sorted(float(dot[0]) for dot in dots))
# docs/kernels.md has a table for each, with the same rungs, times and shares
page = re.findall(r"<!-- \w+ -->.*?<!-- end -->", open("docs/kernels.md").read(), re.DOTALL)
said = [row for table in page for row in re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \| ([\d.]+) \| [\d.]+ \|", table, re.MULTILINE) if row[0] != "library"]
print(len(page), sorted(said) == sorted(rows))
end)sh");
  CHECK(text == "13 True True\n13 True\n");
}

TEST_CASE("pictures of pages, drawn again, are what is there, and there is a command for each" * doctest::skip(!python_found)) {
  Shell shell;
  const std::string text = shell("python3 dev/pictures/draw.py --check");
  INFO(text);  // names those that are left out, too
  CHECK(shell.code == 0);
  // dev/ladders/picture.cpp has drawn the table of the matrix product that is in tables.txt
  CHECK(shell(R"sh(python3 - <<'end'
import re
picture, printed = (open("dev/ladders/" + name).read().replace("&lt;", "<") for name in ("matmul.svg", "tables.txt"))
table = re.search("<!-- ladder_matmul -->(.*?)<!-- end -->", printed, re.DOTALL)[1]
rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")][1:]
lost = [row[0] for row in rows if row[1] != "–" and not all(f">{words}" in picture for words in (row[0] + "<", f"{row[1]} bytes an element, ", row[-1] + "<"))]
print(len(rows) > 5, lost)
end)sh") == "True []\n");
}
