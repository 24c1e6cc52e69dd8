#include "runtime/cache/product_file.h"

#include <cstdlib>
#include <sstream>

#include <sys/file.h>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/text.h"

namespace {

constexpr std::string_view heading = "the fastest matrix products, by gpt.cu; without this file they are timed anew\n";

std::string text_of(const ProductChoices& choices) {
  std::string text(heading);
  for (const auto& [name, choice] : choices) text += xxh3(name + '\t' + choice) + ' ' + name + '\t' + choice + '\n';
  return text;
}

}  // namespace

std::string user_products() {
  for (const auto& [variable, folder] : {std::pair("XDG_CACHE_HOME", ""), std::pair("HOME", "/.cache")})
    if (const char* home = std::getenv(variable); home && *home == '/') return concat(home, folder, "/gpt.cu/products");
  return "";
}

ProductChoices choices_in(const std::string& content) {
  ProductChoices choices;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.find(' '), tab = line.find('\t');
    if (line.substr(0, space) != xxh3(line.substr(space + 1))) continue;
    choices.try_emplace(line.substr(space + 1, tab - space - 1), line.substr(tab + 1));
  }
  return choices;
}

ProductChoices ProductFile::read() const {
  std::string content;
  attempt([&] { if (!holds_something_else(file_, heading)) content = read_file(file_); });
  return choices_in(content);
}

std::string ProductFile::keep(const ProductChoices& timed) const {
  std::string kept = "kept in " + file_;
  const std::string problem = attempt([&] {
    if (file_.empty()) fail("neither XDG_CACHE_HOME nor HOME is set: give --products FILE");
    const std::filesystem::path file = std::filesystem::absolute(file_);
    if (holds_something_else(file, heading)) fail(file, ": holds something else: remove it, or give another --products");
    std::filesystem::create_directories(file.parent_path());
    const File turn(file.string() + ".lock", O_RDWR | O_CREAT);
    flock(turn.descriptor(), LOCK_EX);  // until it is closed
    const std::string content = std::filesystem::exists(file) ? read_file(file) : "";
    ProductChoices all = choices_in(content);
    if (!content.empty() && content != text_of(all)) kept += ", without lines that were damaged";
    all.insert(timed.begin(), timed.end());  // where they differ, the file's choice stays
    replace_file(file, text_of(all));
  });
  return one_line(concat(timed.size(), " timed, ", problem.empty() ? kept : "and not kept: " + problem));
}
