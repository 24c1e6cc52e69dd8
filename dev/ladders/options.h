// The command line of a ladder's program, and the shapes that it runs.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dev/ladders/picture.h"

namespace ladder {

// Named sizes, in the order in which they are printed: {{"rows", 64}, {"channels", 768}}.
class Shape {
 public:
  Shape(std::initializer_list<std::pair<std::string, int>> sizes) : sizes_(sizes) {}

  int operator[](const std::string& name) const { return const_cast<Shape*>(this)->size(name); }
  std::string text() const {
    std::string text;
    for (const auto& [name, size] : sizes_) text += (text.empty() ? "" : " ") + name + "=" + std::to_string(size);
    return text;
  }

  // `changes`: rows=100,channels=77
  Shape with(const std::string& changes) const;

 private:
  int& size(const std::string& name) {
    for (auto& [known, size] : sizes_)
      if (known == name) return size;
    throw std::invalid_argument("there is no size named " + name + " in " + text());
  }

  std::vector<std::pair<std::string, int>> sizes_;
};

struct Options {
  static constexpr int go_on = -1;

  std::vector<std::string> rungs;  // empty: all
  std::string shape, dtype = "bf16", csv, plot = usual_picture();
  bool check_only = false, once = false, lines = false;

  bool wants(const std::string& rung) const {
    return rungs.empty() || std::find(rungs.begin(), rungs.end(), rung) != rungs.end();
  }

  Shape shape_or(const Shape& usual) const { return shape.empty() ? usual : usual.with(shape); }
  std::vector<Shape> shapes_or(const std::vector<Shape>& usual) const {
    if (shape.empty()) return usual;
    return {usual.front().with(shape)};
  }

  // go_on, or the code to exit with. `names`: of the ladder's rungs.
  int parse(const std::string& operation, const std::vector<std::string>& names, const Shape& usual, int count,
            char** arguments);
};

}  // namespace ladder
