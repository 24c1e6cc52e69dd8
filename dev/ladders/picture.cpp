#include "dev/ladders/picture.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "gpt/base/error.h"

namespace ladder {
namespace {

constexpr int left = 190, width = 560, right = 210, top = 66, row = 38, bar = 16;  // pixels
const std::string library = "library";  // the rung that the others are compared with

struct Bar {
  std::string rung, label, idea;
  double length;
};

struct Bars {
  std::string axis, unit;
  double perfect;  // the length of a perfect bar; 0: not known
  std::vector<Bar> bars;
};

double number(const std::string& cell) { return cell.empty() || cell == "–" ? 0 : std::stod(cell); }

Bars bars_of(const Table& table) {
  const bool counted = table.has("moved"), collective = table.has("bus GB/s");
  Bars all = {"% of the ceiling", " %", 100, {}};
  if (counted) all.axis = "% of the moved bytes that had to be moved";
  if (collective) all = {"GB/s of the bus", "", 0, {}};
  for (size_t r = 0; r < table.rows(); ++r) {
    const auto cell = [&](const char* column) { return table.cell(r, column); };
    const double least = counted ? number(cell("× least")) : 0;
    const double reached = counted ? 0 : number(cell(collective ? "bus GB/s" : "% of ceiling"));
    const double length = least > 0 ? 100 / least : reached;
    const std::string label = (counted ? cell("moved") + " bytes an element, " : cell("µs") + " µs, ") + digits(length, 3);
    all.bars.push_back({cell("rung"), length > 0 ? label + (collective ? " GB/s" : " %") : "not counted", cell("idea"), length});
  }
  return all;
}

std::string text(double x, double y, const std::string& words, const std::string& style) {
  std::string escaped;
  for (const char c : words) escaped += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  return concat(R"(<text x=")", x, R"(" y=")", y, R"(" )", style, ">", escaped, "</text>\n");
}

std::string vertical(double x, int bottom, const char* style) {
  return concat(R"(<path d="M)", x, " ", top - 8, "V", bottom, R"(" )", style, "/>\n");
}

// The axis and the text above it.
std::string frame(const Bars& all, double longest, int bottom) {
  const double most = all.perfect > 0 ? all.perfect : longest;
  std::string svg = text(left, bottom + 32, all.axis, R"(fill="#555")");
  for (int quarter = 0; quarter <= 4; ++quarter) {
    const double value = quarter * most / 4, x = left + value * width / longest;
    svg += vertical(x, bottom, quarter == 4 && all.perfect > 0 ? R"(stroke="#c33")" : R"(stroke="#ddd")");
    svg += text(x, bottom + 14, digits(value, 2) + all.unit, R"(text-anchor="middle" fill="#555")");
  }
  return svg;
}

std::string draw(const Bar& b, int y, double scale) {
  return concat(R"(<rect x=")", left, R"(" y=")", y, R"(" width=")", b.length * scale, R"(" height=")", bar, R"(" fill=")",
                b.rung == library ? "#999" : "#4a86c5", "\"/>\n") +
         text(left - 8, y + 12, b.rung, R"(text-anchor="end" font-weight="bold")") +
         text(left + b.length * scale + 6, y + 12, b.label, "") +
         text(left, y + bar + 12, b.idea, R"(fill="#555" font-size="10")");
}

}  // namespace

std::string usual_picture() {
  return std::filesystem::proximate(std::filesystem::canonical("/proc/self/exe")).string() + ".svg";
}

void draw(const Table& table, const std::string& title, const std::string& machine, const std::string& path) {
  const Bars all = bars_of(table);
  double longest = std::max(all.perfect, 1e-9);
  for (const Bar& b : all.bars) longest = std::max(longest, b.length);
  const int bottom = top + row * int(all.bars.size());
  std::ofstream file(path);
  file << R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 )" << left + width + right << ' ' << bottom + 40
       << R"(" font-family="sans-serif" font-size="11">
<style>text{paint-order:stroke;stroke:white;stroke-width:3px}</style>
<rect width="100%" height="100%" fill="white"/>
)" << text(12, 22, title, R"(font-weight="bold" font-size="14")") << text(12, 40, machine, R"(fill="#555")")
       << frame(all, longest, bottom);
  for (const Bar& b : all.bars)
    if (b.rung == library && b.length > 0)
      file << vertical(left + b.length * width / longest, bottom, R"(stroke="#555" stroke-dasharray="4 3")");
  int y = top - row;
  for (const Bar& b : all.bars) file << draw(b, y += row, width / longest);
  file << "</svg>\n";
  if (!file.flush())
    throw std::runtime_error("cannot write " + path + ": check the folder and its space, or give --plot another file");
  std::printf("\npicture   %s\n", path.c_str());
}

}  // namespace ladder
