// The source filter of the CPU device: turns a CUDA source file into C++.
//
//   filter INPUT OUTPUT
//
// How it rewrites a kernel launch. CUDA extends C++ by one statement that g++ cannot parse:
//
//     scale<float><<<blocks, 256, 0, stream>>>(x, n);
//
// The filter cuts the file into tokens, so that comments, strings and macros cannot mislead it, and looks for
// `<<<`. From there it walks back over the template arguments to the kernel's name, and on to the matching
// `>>>`. Text is inserted or replaced at three places, and everything between them stays as it was written:
//
//     ::cpu::launcher("scale", CPU_KERNEL(                       before the name
//     scale<float>
//     ),                                                         for <<<
//     blocks, 256, 0, stream
//     )                                                          for >>>
//     (x, n);
//
// So a launch becomes a call of `launcher` (cpu/device.h) with the kernel's name for messages, a function
// that runs one thread of the kernel and the kernel's address (both made by the macro), and the configuration; the
// returned function is called with the kernel's arguments. These pass through `auto...`: write nullptr, not 0, for a
// pointer.
//
// The second form is dynamic shared memory, whose size only the launch knows:
//
//     extern __shared__ __align__(16) float buffer[];   ->   float* buffer = ::cpu::dynamic_shared<float>();
//
// The filter also removes `static` from `static __global__`. On the GPU it is needed if several objects of a program
// contain the kernel; here the macro `__global__` says how a kernel is linked (cpu/cuda_runtime.h).
//
// The output's first line is `#line 1 "INPUT"`; after it each input line is one output line, so that compiler
// messages and breakpoints name the line that the author wrote. If the filter does not understand something, it prints
// `INPUT:LINE: found, supported`, ends with exit code 1, and writes no output.

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

enum class Kind {
  blank,        // white space, comments, backslash-newline
  identifier,   // keywords too
  literal,      // numbers (without sign, point or exponent sign), characters, strings
  punctuation,  // one character, or one of long_punctuation
  boundary,     // the begin or end of the file or of a preprocessor directive
};

struct Token {
  Kind kind;
  std::string text;    // as it is in the input
  int line;            // the line of its first character, from 1
  std::string output;  // as it will be in the output
};

// Every `>` is a token of its own, because only the context tells a shift from closing angle brackets.
constexpr std::string_view long_punctuation[] = {"<<<", "<<=", "<=>", "<<", "<=", ">=", "->", "::"};

struct Refusal {
  int line;
  std::string message;
};

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> list) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// Can the character be part of an identifier or number? Bytes beyond ASCII are parts of letters.
bool is_word(unsigned char c) { return std::isalnum(c) || c == '_' || c >= 128; }

// Cuts a file into tokens. Their texts, joined, are the file again.
class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  std::vector<Token> tokens() {
    add(Kind::boundary, 0);
    line_is_blank_ = true;
    while (at_ < source_.size()) read_token();
    add(Kind::boundary, 0);
    return std::move(tokens_);
  }

 private:
  char peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }
  bool starts_with(std::string_view text) const { return source_.substr(at_).starts_with(text); }

  void add(Kind kind, size_t length) {
    const std::string text(source_.substr(at_, length));
    tokens_.push_back({kind, text, line_, text});
    line_ += std::count(text.begin(), text.end(), '\n');
    at_ += length;
    line_is_blank_ = text == "\n" || (line_is_blank_ && kind == Kind::blank);
    in_directive_ = in_directive_ && text != "\n";
  }

  void read_token() {
    const char c = peek();
    if (c == '\n') return add(in_directive_ ? Kind::boundary : Kind::blank, 1);
    if (starts_with("\\\n")) return add(Kind::blank, 2);
    if (starts_with("//")) return add(Kind::blank, line_length());
    if (starts_with("/*")) return add(Kind::blank, length_through("*/", 2, "comment"));
    if (c == ' ' || (c >= '\t' && c <= '\r')) return add(Kind::blank, 1);
    if (c == '#' && line_is_blank_) return read_directive();
    if (c == '"' || c == '\'') return add(Kind::literal, quoted_length());
    if (is_word(c)) return read_word();
    for (const std::string_view text : long_punctuation)
      if (starts_with(text)) return add(Kind::punctuation, text.size());
    add(Kind::punctuation, 1);
  }

  void read_directive() {
    add(Kind::boundary, 1);
    in_directive_ = true;
    while (peek() == ' ' || peek() == '\t') add(Kind::blank, 1);
    // The text of #error and #warning is prose, in which an apostrophe does not begin a character literal.
    if (starts_with("error") || starts_with("warning")) add(Kind::literal, line_length());
  }

  void read_word() {
    const bool is_number = std::isdigit(static_cast<unsigned char>(peek()));
    size_t length = 1;
    while (is_word(peek(length)) || (is_number && peek(length) == '\'')) ++length;  // 1'000'000
    const bool is_prefix = is_one_of(source_.substr(at_, length), {"R", "LR", "uR", "UR", "u8R"});
    if (!is_prefix || peek(length) != '"') return add(is_number ? Kind::literal : Kind::identifier, length);
    const size_t parenthesis = std::min(source_.find('(', at_), source_.size());
    const std::string delimiter(source_.substr(at_ + length + 1, parenthesis - at_ - length - 1));
    add(Kind::literal, length_through(")" + delimiter + "\"", parenthesis - at_, "raw string"));
  }

  // The number of characters up to the newline that ends the line. A backslash before a newline continues the line.
  size_t line_length() const {
    size_t length = 0;
    while (at_ + length < source_.size() && peek(length) != '\n') length += peek(length) == '\\' ? 2 : 1;
    return std::min(length, source_.size() - at_);
  }

  size_t length_through(const std::string& end, size_t from, const std::string& what) const {
    const size_t found = source_.find(end, at_ + from);
    if (found == source_.npos) throw Refusal{line_, what + " that never ends, supported is one that ends in the same file"};
    return found + end.size() - at_;
  }

  size_t quoted_length() const {
    const char quote = peek();
    size_t length = 1;
    while (peek(length) != quote) {
      if (at_ + length >= source_.size() || peek(length) == '\n')
        throw Refusal{line_, "literal that never ends, supported is one that ends in the same line"};
      length += peek(length) == '\\' ? 2 : 1;
    }
    return length + 1;
  }

  const std::string_view source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_is_blank_ = false;  // only blanks so far on this line: a # begins a directive
  bool in_directive_ = false;
  std::vector<Token> tokens_;
};

// Rewrites launches and dynamic shared memory. Positions are indices of tokens. A boundary at each end stops every
// search.
class Rewriter {
 public:
  explicit Rewriter(std::vector<Token>& tokens) : tokens_(tokens) {}

  void rewrite() {
    std::vector<bool> braces;  // for each open {: is it inside a function?
    for (size_t at = 1; at + 1 < tokens_.size(); ++at) {
      const bool in_function = !braces.empty() && braces.back();
      if (text(at) == "{") braces.push_back(in_function || opens_function(at));
      if (text(at) == "}" && !braces.empty()) braces.pop_back();
      if (text(at) == "<<<") rewrite_launch(at);
      if (text(at) == "extern") rewrite_shared(at, in_function);
      if (text(at) == "static" && text(next(at)) == "__global__") tokens_[at].output.clear();
    }
  }

 private:
  const std::string& text(size_t at) const { return tokens_[at].text; }
  bool is_boundary(size_t at) const { return tokens_[at].kind == Kind::boundary; }
  bool is_identifier(size_t at) const { return tokens_[at].kind == Kind::identifier; }
  bool is_opening(size_t at) const { return is_one_of(text(at), {"(", "[", "{"}); }
  bool is_closing(size_t at) const { return is_one_of(text(at), {")", "]", "}"}); }

  size_t neighbour(size_t at, int step) const {
    do at += step;
    while (tokens_[at].kind == Kind::blank);
    return at;
  }
  size_t next(size_t at) const { return neighbour(at, 1); }
  size_t previous(size_t at) const { return neighbour(at, -1); }

  std::string quoted(size_t at) const {
    if (is_boundary(at)) return "the edge of the file or of a preprocessor line";
    return tokens_[at].kind == Kind::literal ? "a literal" : "'" + text(at) + "'";
  }

  bool opens_function(size_t brace) const {
    size_t at = previous(brace);
    while (is_one_of(text(at), {"const", "noexcept", "override", "final", "mutable"})) at = previous(at);
    return text(at) == ")";
  }

  [[noreturn]] void refuse_launch(size_t at, const std::string& found) const {
    throw Refusal{tokens_[at].line, found + ", supported is name<...><<<grid, block, shared, stream>>>(...)"};
  }

  // The position of the bracket that matches the one at `at`. step: 1 searches forward, -1 backward.
  size_t matching(size_t at, int step, size_t launch) const {
    int depth = 0;
    for (const size_t first = at;; at = neighbour(at, step)) {
      if (is_boundary(at)) refuse_launch(launch, quoted(first) + " without its counterpart");
      if (is_opening(at)) depth += step;
      if (is_closing(at)) depth -= step;
      if (depth == 0) return at;
    }
  }

  // Searches backward from `at` for the first < that has no > yet, and skips brackets. Returns 0 if the statement has
  // none.
  size_t open_angle(size_t at, size_t launch) const {
    int closed = 0;
    for (;; at = previous(at)) {
      if (is_boundary(at) || is_opening(at) || is_one_of(text(at), {";", "}"})) return 0;
      if (is_closing(at)) at = matching(at, -1, launch);
      if (text(at) == ">") ++closed;
      if (text(at) == "<" && closed-- == 0) return at;
    }
  }

  // The first token of the kernel's name, which ends at the launch. Sets `name` to it, without template arguments.
  size_t kernel_begin(size_t launch, std::string& name) const {
    size_t at = previous(launch);
    for (;;) {
      if (text(at) == ">") {
        const size_t angle = open_angle(previous(at), launch);
        if (angle == 0) refuse_launch(launch, "'>' that closes no template arguments before '<<<'");
        at = previous(angle);
      }
      if (!is_identifier(at)) refuse_launch(launch, "'<<<' after " + quoted(at));
      name.insert(0, text(at));
      const size_t colons = previous(at);
      if (text(colons) != "::") return at;
      name.insert(0, "::");
      // Only `a::b` without blanks is one name: in `return ::b`, or after a macro's name, the name begins at `::`.
      if (!is_identifier(colons - 1) && text(colons - 1) != ">") return colons;
      at = colons - 1;
    }
  }

  // A launch is a whole statement or operand. Any other token before the name is a part of it that this filter does not
  // know, and is refused.
  void check_before(size_t begin, size_t launch) const {
    const size_t before = previous(begin);
    const bool is_keyword = is_one_of(text(before), {"else", "do", "return"});
    const bool is_macro = is_identifier(before) && text(previous(before)) == "define";
    const bool is_start = is_boundary(before) || is_keyword || is_macro ||
                          is_one_of(text(before), {";", "{", "}", "(", ")", "]", ",", ":", "?"});
    if (!is_start) refuse_launch(launch, quoted(before) + " before a kernel's name");
    if (open_angle(before, launch)) refuse_launch(launch, "comparison with '<' that is not in parentheses");
  }

  // The first > of the >>> that ends the configuration. Other closing angle brackets may come before it, as in
  // f<a<b<c>>>(x) and v<a>>>>.
  size_t configuration_end(size_t launch, int& expressions) const {
    int angles = 0;
    expressions = text(next(launch)) == ">" ? 0 : 1;
    for (size_t at = next(launch);; at = next(at)) {
      if (is_boundary(at) || is_closing(at) || text(at) == ";") refuse_launch(launch, "'<<<' without '>>>' before " + quoted(at));
      if (is_opening(at)) at = matching(at, 1, launch);
      if (text(at) == "<") ++angles;
      if (text(at) == "," && angles == 0) ++expressions;
      if (text(at) != ">") continue;
      int run = 1;
      while (text(at + run) == ">") ++run;
      if (run > 3 || (run == 3 && angles < 3)) return at + run - 3;
      angles = std::max(angles - run, 0);  // not below 0: the > may be of a comparison or a shift
      at += run - 1;
    }
  }

  void rewrite_launch(size_t launch) {
    std::string name;
    const size_t begin = kernel_begin(launch, name);
    check_before(begin, launch);
    int count = 0;
    const size_t end = configuration_end(launch, count);
    if (count < 1 || count > 4) refuse_launch(launch, std::to_string(count) + " expressions in '<<<...>>>'");
    const size_t after = next(end + 2);
    if (text(after) != "(") refuse_launch(end, quoted(after) + " after '>>>'");
    tokens_[begin].output.insert(0, "::cpu::launcher(\"" + name + "\", CPU_KERNEL(");
    tokens_[launch].output = "), ";
    tokens_[end].output = ')';
    for (const size_t at : {end + 1, end + 2}) tokens_[at].output.clear();
  }

  // Rewrites `extern ... __shared__ ... TYPE name[];`, with alignments at any place. Does not change other `extern`
  // declarations.
  void rewrite_shared(size_t begin, bool in_function) {
    size_t end = begin;
    while (!is_boundary(end) && !is_one_of(text(end), {";", "{", "}"})) end = next(end);
    const auto is_shared = [](const Token& token) { return token.text == "__shared__"; };
    if (std::none_of(tokens_.begin() + begin, tokens_.begin() + end, is_shared)) return;
    std::vector<size_t> words;  // positions of the tokens TYPE name [ ]
    for (size_t at = begin, dropped = begin; at != end; at = next(at)) {
      if (is_one_of(text(at), {"__align__", "alignas"})) dropped = matching(next(at), 1, begin);
      if (text(at) == "__shared__") dropped = at;
      if (at > dropped) words.push_back(at);
      if (at <= dropped) tokens_[at].output.clear();
    }
    std::string type;
    for (size_t k = 0; k + 3 < words.size(); ++k) type += (k > 0 ? " " : "") + text(words[k]);
    const bool is_array = !type.empty() && type.find_first_of("[({=") == type.npos && text(end) == ";" &&
                          text(words.end()[-2]) == "[" && text(words.end()[-1]) == "]";
    const bool is_list = type.find(',') < type.find('<');
    if (!is_array || is_list || !in_function) {
      const std::string found = in_function ? "of anything but one unsized array" : "outside a function";
      const std::string supported = ", supported is extern __shared__ TYPE name[]; in a function";
      throw Refusal{tokens_[begin].line, "'extern __shared__' " + found + supported};
    }
    tokens_[words.end()[-4]].output += "*";
    tokens_[words.end()[-2]].output = " = ::cpu::dynamic_shared<" + type + ">()";
    tokens_[words.end()[-1]].output.clear();
  }

  std::vector<Token>& tokens_;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) throw std::runtime_error(path + ": cannot be read, give a readable file");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string filtered(const std::string& source, const std::string& name) {
  std::vector<Token> tokens = Lexer(source).tokens();
  Rewriter(tokens).rewrite();
  std::ostringstream output;
  output << "#line 1 " << std::quoted(name) << "\n";
  for (const Token& token : tokens) output << token.output;
  return output.str();
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.close();
  if (!file) throw std::runtime_error(path + ": cannot be written, check folder, permissions and free space");
}

int main(int argument_count, char** arguments) {
  const std::vector<std::string> files(arguments + 1, arguments + argument_count);
  std::error_code ignored;
  if (files.size() != 2 || std::filesystem::equivalent(files[0], files[1], ignored)) {
    std::cerr << "usage: filter INPUT OUTPUT (two files)\n";
    return 2;
  }
  try {
    write_file(files[1], filtered(read_file(files[0]), files[0]));
    return 0;
  } catch (const Refusal& refusal) {
    std::cerr << files[0] << ":" << refusal.line << ": " << refusal.message << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  if (std::filesystem::is_regular_file(files[1], ignored)) std::filesystem::remove(files[1], ignored);
  return 1;
}
