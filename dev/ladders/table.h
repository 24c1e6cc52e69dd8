// Tables of text, as Markdown and as CSV.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ladder {

// `value` with `significant` significant digits, without an exponent.
std::string digits(double value, int significant);

class Table {
 public:
  explicit Table(std::vector<std::string> columns) : columns_(std::move(columns)) {}

  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  size_t rows() const { return rows_.size(); }
  bool has(const std::string& column) const;
  std::string cell(size_t row, const std::string& column) const;  // `column` must exist

  // The first and the last column hold text, the others numbers.
  void print() const;
  void write_csv(const std::string& path) const;

 private:
  bool is_text(size_t column) const { return column == 0 || column + 1 == columns_.size(); }
  void print_row(const std::vector<std::string>& cells) const;

  std::vector<std::string> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ladder
