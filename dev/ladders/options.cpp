#include "dev/ladders/options.h"

#include <cstdio>
#include <filesystem>
#include <sstream>

#include <CLI/CLI.hpp>

namespace ladder {

Shape Shape::with(const std::string& changes) const {
  Shape changed = *this;
  std::stringstream list(changes);
  for (std::string part; std::getline(list, part, ',');) {
    const size_t equals = part.find('=');
    int value = 0, used = 0;
    const char* number = part.c_str() + (equals == std::string::npos ? part.size() : equals + 1);
    if (std::sscanf(number, "%d%n", &value, &used) != 1 || number[used] != 0 || value < 1)
      throw std::invalid_argument("--shape " + changes + ": " + part + " is not NAME=SIZE; this ladder has " +
                                  text());
    changed.size(part.substr(0, equals)) = value;
  }
  return changed;
}

int Options::parse(const std::string& operation, const std::vector<std::string>& names, const Shape& usual, int count,
                   char** arguments) {
  CLI::App app("The kernel ladder of " + operation + ": checks each rung against float64, then measures it.");
  app.add_option("--rung", rungs, "this rung alone (may be repeated)")->check(CLI::IsMember(names));
  app.add_option("--shape", shape,
                 "other sizes than " + usual.text() + ", as NAME=SIZE,... (what is checked has these sizes, and small "
                 "ones where none is given)");
  app.add_option("--dtype", dtype, "what is measured: bf16 or fp32 (both are checked)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_flag("--check", check_only, "check, and don't measure");
  app.add_flag("--once", once,
               "launch each rung once, neither checked nor measured, at the shape that is counted: for a profiler");
  app.add_flag("--lines", lines, "on the CPU device: the source lines that move the most, for each rung");
  app.add_option("--csv", csv, "write the table to this file, too");
  app.add_option("--plot", plot, "draw the table into this file, an SVG; default: beside this program");
  try {
    app.parse(count, arguments);
    if (!shape.empty()) usual.with(shape);
    for (const std::filesystem::path file : {csv, plot})
      if (file.has_parent_path() && !std::filesystem::is_directory(file.parent_path()))
        throw std::invalid_argument(file.string() + ": there is no folder " + file.parent_path().string() + ": create it");
    return go_on;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

}  // namespace ladder
