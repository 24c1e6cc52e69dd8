#include "runtime/training/product_file.h"

#include <cstdlib>
#include <sstream>

#include <sys/file.h>

#include "parallel/processes/error.h"
#include "parallel/processes/text.h"
#include "runtime/input/files.h"

namespace {

constexpr std::string_view heading = "the fastest matrix products, by gpt.cu; without this file they are timed anew\n";

std::string text_of(const ProductChoices& choices) {
  std::string text(heading);
  for (const auto& [name, choice] : choices) {
    const std::string line = name + '\t' + choice;
    text += xxh3(line) + ' ' + line + '\n';
  }
  return text;
}

// Adds them, and returns what else is to be said.
std::string add(const std::filesystem::path& given, ProductChoices timed) {
  if (given.empty()) fail("neither XDG_CACHE_HOME nor HOME is set: give --products FILE");
  const std::filesystem::path file = std::filesystem::absolute(given);
  if (holds_something_else(file, heading)) fail(file, ": holds something else: remove it, or give --products another FILE");
  std::filesystem::create_directories(file.parent_path());
  const File turn(file.string() + ".lock", O_RDWR | O_CREAT);
  flock(turn.descriptor(), LOCK_EX);  // until it is closed
  const std::string content = std::filesystem::exists(file) ? read_file(file) : "";
  ProductChoices all = choices_in(content);
  const bool was_damaged = !content.empty() && content != text_of(all);
  all.merge(timed);
  replace_file(file, text_of(all));
  return was_damaged ? ", without lines that were damaged" : "";
}

}  // namespace

std::string user_products() {
  const auto folder = [](const char* variable) {  // relative ones are no folders of a user
    const char* value = std::getenv(variable);
    return std::string(value && *value == '/' ? value : "");
  };
  if (const std::string cache = folder("XDG_CACHE_HOME"); !cache.empty()) return cache + "/gpt.cu/products";
  const std::string home = folder("HOME");
  return home.empty() ? "" : home + "/.cache/gpt.cu/products";
}

std::string read_products(const std::filesystem::path& file) {
  std::string content;
  attempt([&] {
    if (!holds_something_else(file, heading)) content = read_file(file);
  });
  return content;
}

ProductChoices choices_in(const std::string& content) {
  ProductChoices choices;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.find(' '), tab = line.find('\t');
    if (tab == std::string::npos || space > tab || line.substr(0, space) != xxh3(line.substr(space + 1))) continue;
    choices.try_emplace(line.substr(space + 1, tab - space - 1), line.substr(tab + 1));
  }
  return choices;
}

std::string keep_products(const std::filesystem::path& file, ProductChoices timed) {
  const size_t count = timed.size();
  std::string more;
  const std::string problem = attempt([&] { more = add(file, std::move(timed)); });
  return one_line(concat(count, " timed, ", problem.empty() ? concat("kept in ", file, more) : "and not kept: " + problem));
}
