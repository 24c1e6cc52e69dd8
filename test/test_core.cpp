// The core (train_gpt.cu, gpt/, kernels/) is to be complete by itself, and to know no room of extensions/ and runtime/. Until
// it does, test/core.txt says what it still knows: each include that leads from the core to a room, each room that another one
// includes, how often the core uses a room's words, and how many lines of code it has. These may become fewer, not more.
#include <algorithm>
#include <cctype>
#include <iostream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "test/house.h"

namespace {

// "isFp8_is_on" -> " is fp8 is on ": identifiers as words, in lower case
std::string as_words(const std::string& text) {
  std::string words = " ";
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = text[i], before = i > 0 ? text[i - 1] : ' ';
    if (std::isupper(c) && (std::islower(before) || std::isdigit(before))) words += ' ';
    words += std::isalnum(c) ? char(std::tolower(c)) : ' ';
  }
  words += ' ';
  const auto both_spaces = [](char a, char b) { return a == ' ' && b == ' '; };
  words.erase(std::unique(words.begin(), words.end(), both_spaces), words.end());
  return words;
}

// The words of a room: a line of extensions/ROOM/words each. "not in kernels: ring" is no word where it stands in kernels/.
struct Word {
  std::string word, not_in;
};
std::vector<Word> words_of(const std::string& room) {
  std::vector<Word> words;
  std::smatch match;
  for (const std::string& line : lines_of(room + "/words"))
    if (std::regex_match(line, match, std::regex("not in (\\w+): (.+)"))) words.push_back({match[2], match[1].str() + "/"});
    else if (!line.empty()) words.push_back({line, ""});
  return words;
}

int count(const std::string& text, const Word& word) {
  const std::string wanted = ' ' + word.word + ' ';
  int found = 0;
  for (size_t at = text.find(wanted); at != text.npos; at = text.find(wanted, at + 1)) ++found;
  return found;
}

std::set<std::string> rooms_of_the_house() {
  std::set<std::string> rooms;
  for (const char* floor : {"extensions", "runtime"})
    for (const auto& entry : std::filesystem::directory_iterator(floor))
      if (entry.is_directory()) rooms.insert(entry.path().string());
  return rooms;
}

// test/core.txt, a line for each thing that is known: "lines 10007", "words extensions/fp8 43",
// "gpt/zero.cuh -> extensions/fp8/fp8.cuh", "runtime/hooks -> runtime/control"
struct Known {
  std::map<std::string, int> numbers;
  std::set<std::string> arrows;
};
Known known_so_far() {
  Known known;
  for (const std::string& line : lines_of("test/core.txt")) {
    if (line.empty() || line.starts_with("#")) continue;
    if (line.find(" -> ") != line.npos) known.arrows.insert(line);
    else known.numbers[line.substr(0, line.rfind(' '))] = std::stoi(line.substr(line.rfind(' ')));
  }
  return known;
}

Known known_now() {
  Known now;
  std::map<std::string, std::string> core;  // the words of each file
  for (const std::string& file : sources_of(core_folders)) {
    now.numbers["lines"] += code_lines(file);
    core[file] = as_words(content_of(file));
  }
  for (const std::string& room : rooms_of_the_house()) {
    int& uses = now.numbers["words " + room];
    const std::vector<Word> words = words_of(room);
    for (const auto& [file, text] : core)
      for (const Word& word : words)
        if (word.not_in.empty() || !file.starts_with(word.not_in)) uses += count(text, word);
  }
  for (const auto& [file, others] : includes_of(sources_of_the_house()))
    for (const std::string& other : others) {
      const std::string from = room_of(file), to = room_of(other);
      if (to.empty() || from == to || file.starts_with("cpu/")) continue;
      now.arrows.insert((from.empty() ? file : from) + " -> " + (from.empty() ? other : to));
    }
  return now;
}

}  // namespace

TEST_CASE("the core has no more lines, words and files of rooms than test/core.txt says, and that page has nothing that is gone") {
  const Known before = known_so_far(), now = known_now();
  for (const auto& [what, number] : now.numbers) {
    CAPTURE(what);
    const auto found = before.numbers.find(what);
    REQUIRE(found != before.numbers.end());
    CHECK(number <= found->second);
    if (number < found->second) std::cout << "test/core.txt: " << what << " may fall from " << found->second << " to " << number << "\n";
  }
  for (const auto& [what, number] : before.numbers) {
    CAPTURE(what);
    CHECK(now.numbers.contains(what));
  }
  for (const std::string& arrow : now.arrows) {
    INFO("a new include from the core to a room, or from room to room: " << arrow);
    CHECK(before.arrows.contains(arrow));
  }
  for (const std::string& arrow : before.arrows) {
    INFO("gone, so it leaves test/core.txt, too: " << arrow);
    CHECK(now.arrows.contains(arrow));
  }
}

TEST_CASE("words of rooms are found in identifiers, and each room has words") {
  CHECK(as_words("if (unit_.isFp8() && kSmMargin)") == " if unit is fp8 k sm margin ");
  CHECK(count(as_words("Fp8Weights fp8_; // fp8, eight bits"), {"fp8", ""}) == 3);
  CHECK(count(" fp8 fp8 ", {"fp8", ""}) == 2);
  CHECK(count(as_words("offloaded"), {"offload", ""}) == 0);
  for (const std::string& room : rooms_of_the_house()) {
    CAPTURE(room);
    CHECK(!words_of(room).empty());
  }
}
