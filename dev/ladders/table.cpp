#include "dev/ladders/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>

namespace ladder {
namespace {

// The number of letters in a text of UTF-8.
size_t letters(const std::string& text) {
  return size_t(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

void write_row(std::ofstream& file, const std::vector<std::string>& cells) {
  for (size_t c = 0; c < cells.size(); ++c) {
    std::string quoted;
    for (char letter : cells[c] == "–" ? "" : cells[c]) quoted += letter == '"' ? "\"\"" : std::string(1, letter);
    file << (c ? "," : "") << '"' << quoted << '"';
  }
  file << '\n';
}

}  // namespace

std::string digits(double value, int significant) {
  if (value == 0) return "0";
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", significant, value);
  double rounded = std::stod(text);
  int decimals = 0;
  const double enough = std::pow(10.0, significant - 1);
  for (double magnitude = std::abs(rounded); magnitude < enough && decimals < 9; magnitude *= 10) ++decimals;
  std::snprintf(text, sizeof text, "%.*f", decimals, rounded);
  return text;
}

bool Table::has(const std::string& column) const {
  return std::find(columns_.begin(), columns_.end(), column) != columns_.end();
}

std::string Table::cell(size_t row, const std::string& column) const {
  const auto found = std::find(columns_.begin(), columns_.end(), column);
  return rows_[row][size_t(found - columns_.begin())];
}

void Table::print() const {
  print_row(columns_);
  std::string rule = "|";
  for (size_t c = 0; c < columns_.size(); ++c) rule += is_text(c) ? "---|" : "---:|";
  std::printf("%s\n", rule.c_str());
  for (const auto& row : rows_) print_row(row);
}

void Table::write_csv(const std::string& path) const {
  std::ofstream file(path);
  write_row(file, columns_);
  for (const auto& row : rows_) write_row(file, row);
  if (!file.flush()) throw std::runtime_error("cannot write " + path + ": check the folder and its space");
}

void Table::print_row(const std::vector<std::string>& cells) const {
  std::string line = "|";
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = letters(columns_[c]);
    for (const auto& row : rows_) width = std::max(width, letters(row[c]));
    const std::string space(c + 1 == columns_.size() ? 0 : width - letters(cells[c]), ' ');
    line += " " + (is_text(c) ? cells[c] + space : space + cells[c]) + " |";
  }
  std::printf("%s\n", line.c_str());
}

}  // namespace ladder
