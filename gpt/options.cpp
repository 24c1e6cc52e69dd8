#include "gpt/options.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <set>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "gpt/base/text.h"
#include "gpt/option_list.h"
#include "gpt/option_rules.h"

namespace {

// The sets that the words of --val name: NAME=FILE begins one, other words go on with the one before.
decltype(Options::val) validation_sets(const std::vector<std::string>& words) {
  decltype(Options::val) sets;
  std::set<std::string> names;
  for (const std::string& word : words) {
    const auto end = std::ranges::find_if(word, [](unsigned char c) { return !std::isalnum(c) && c != '_'; });
    const bool is_named = end != word.begin() && end != word.end() && *end == '=';
    const std::string name(word.begin(), is_named ? end : word.begin()), file(is_named ? end + 1 : word.begin(), word.end());
    if (is_named && access(word.c_str(), F_OK) == 0) usage_error("--val ", excerpt(word), " is a file: write ./ before its name");
    if (is_named && (file.empty() || !names.insert(name).second))
      usage_error("--val ", excerpt(word), file.empty() ? " names no file" : " names a set again", ": all files of a set follow one NAME=");
    if (is_named || sets.empty()) sets.push_back({sets.empty() ? "val_loss" : "val_loss_" + name, {}});
    sets.back().second.push_back(file);
  }
  return sets;
}

// CLI11 reads [a,b] as a list, and its newer releases [[aa]] as [a]. Here these are globs, or texts like others: a mark
// before them keeps them as they are.
constexpr char mark = '\x1f';

std::string marked(std::string word) {
  const size_t start = word.starts_with("--") ? word.find('=') + 1 : 0;
  if (word.ends_with(']') && word[start] == '[') word.insert(start, 1, mark);
  return word;
}
std::string unmarked(std::string word) {
  if (word.starts_with(mark)) word.erase(0, 1);
  return word;
}

std::string names_of_rooms() { return joined(rooms(), &Room::name); }

// topic: a room, all, or "" for the core.
void print_help(CLI::App& app, const std::string& topic) {
  bool is_known = topic.empty() || topic == "all";
  for (CLI::Option* option : app.get_options()) {
    const Room* room = room_of(*option);
    const bool is_shown = topic == "all" || topic == (room ? room->name : "");
    is_known |= is_shown;
    if (!is_shown) option->group("");
  }
  if (!is_known) usage_error("--help ", excerpt(topic), ": no room of this build has that name; these have options: ", names_of_rooms());
  app.footer("More options, by room (--help ROOM; --help all has everything): " + names_of_rooms());
  std::printf("%s", app.help().c_str());
}

}  // namespace

std::pair<RoomOptions, std::vector<std::string>> split_private(std::vector<std::string> words) {
  Options options;
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  for (const Room* room : rooms())
    if (room->is_private) room->add_options(app, options);
  std::ranges::reverse(words);
  try {
    app.parse(words);
  } catch (const CLI::ParseError&) {
  }
  return {options, app.remaining()};
}

std::optional<Options> parse_options(int argc, char** argv) {
  Options o;
  o.words = split_private({argv, argv + argc}).second;
  o.schedule.steps = 100;
  CLI::App app("Trains a GPT on text or token shards.", "train_gpt");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(28);
  app.set_help_flag("-h,--help", "these options; --help ROOM: those of a room; --help all: all")->group("Run");
  add_options(app, o);
  for (CLI::Option* option : app.get_options())
    if (option->get_items_expected_min() > 0 || option->get_name() == "--resume") option->transform(unmarked);
  refuse_missing_values(app, argc, argv);
  for (int i = 1; i < argc; ++i)
    if (asks_for_help(argv[i])) {
      print_help(app, i + 1 < argc && argv[i + 1][0] != '-' ? argv[i + 1] : "");
      return {};
    }
  std::vector<std::string> words;  // CLI11 takes the last one first
  for (int i = argc - 1; i > 0; --i) words.push_back(marked(argv[i]));
  try {
    app.parse(words);
  } catch (const CLI::ExtrasError&) {  // whose own text differs between releases
    usage_error(excerpt(unmarked(app.remaining().front())), " is neither an option nor the value of one; train_gpt --help all lists "
                "all options of this build, which has the rooms ", names_of_rooms());
  } catch (const CLI::ParseError& error) {
    usage_error(error.what(), "; train_gpt --help all lists all options");
  }
  for (const Room* room : rooms())
    if (room->decide) room->decide(o, Refusals(app));
  o.val = validation_sets(o.val_words);
  refuse_together(app, o);
  for (const Room* room : rooms())
    if (room->complete) room->complete(o);
  o.resume = app.count("--resume") > 0;
  o.model_given = app.count("--model") > 0;
  o.steps_given = app.count("--steps") > 0;
  o.attention_given = o.attention != "auto";
  return o;
}
