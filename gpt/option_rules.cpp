#include "gpt/option_rules.h"

#include <set>

#include "gpt/option_list.h"

void refuse_missing_values(const CLI::App& app, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--") && word.find('=') == word.size() - 1)
      usage_error(word, " is followed by no value: give one, or leave the option out");
    const CLI::Option* option = app.get_option_no_throw(word);
    if (!option || i + 1 == argc) continue;
    if (option->get_items_expected_min() > 0 && app.get_option_no_throw(argv[i + 1]))
      usage_error(word, " is followed by no value, but by ", argv[i + 1], ": give one (", word, "=", argv[i + 1],
                  " if that is meant)");
    if (!*argv[i + 1] && word != "--out" && std::set<std::string>{"DIR", "[DIR]", "FILE", "CMD"}.contains(option->get_type_name()))
      usage_error(word, " '' names nothing: leave the option out");
  }
}

void Refusals::operator()(bool wrong, std::initializer_list<const char*> flags, const std::string& why) const {
  for (const char* flag : flags) {
    const CLI::Option* option = wrong ? app_.get_option_no_throw(flag) : nullptr;  // its room may not be here
    if (!option || option->count() == 0) continue;
    const Room* room = room_of(*option);
    usage_error(flag, option->get_items_expected_min() > 0 && !(room && room->is_private) ? ' ' + option->results().back() : "", ' ', why);
  }
}

void refuse_together(const CLI::App& app, const Options& o) {
  const Refusals refuse(app);
  for (const Room* room : rooms())
    if (room->refuse_together) room->refuse_together(refuse, o);
  refuse(o.dtype != "fp16", {"--loss-scale", "--loss-scale-window"}, "keeps small gradients of fp16: it needs --dtype fp16");
  refuse(o.dtype != "bf16" && o.reduce_dtype == "bf16", {"--reduce-dtype"}, "needs --dtype bf16");
  refuse(o.val.empty() && o.val_every > 0, {"--val-every"}, "needs --val FILES");
}
