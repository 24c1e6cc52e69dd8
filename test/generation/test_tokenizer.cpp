// Text to tokens and back: extensions/generation/tokenizer.h.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "extensions/generation/tokenizer.h"
#include "test/temporary_folder.h"

using Ids = std::vector<int>;

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (size_t start = 0, end; start < text.size(); start = end) {
    end = Tokenizer::word_end(text, start);
    words.push_back(text.substr(start, end - start));
  }
  return words;
}

TEST_CASE("words as GPT-2's rule divides them") {
  using Words = std::vector<std::string>;
  CHECK(words_of("Hello world") == Words{"Hello", " world"});
  CHECK(words_of("  two spaces") == Words{" ", " two", " spaces"});
  CHECK(words_of("a\n\n  b") == Words{"a", "\n\n ", " b"});
  CHECK(words_of("a\nb\t\tc") == Words{"a", "\n", "b", "\t", "\t", "c"});
  CHECK(words_of("end  ") == Words{"end", "  "});
  CHECK(words_of("x1 22,33 !?") == Words{"x", "1", " 22", ",", "33", " !?"});
  CHECK(words_of("we're don't I'll 'tis") == Words{"we", "'re", " don", "'t", " I", "'ll", " '", "tis"});
  CHECK(words_of("it'S 'd") == Words{"it", "'", "S", " '", "d"});
  CHECK(words_of("caf\xc3\xa9 au") == Words{"caf\xc3\xa9", " au"});
}

TEST_CASE("a byte-level model needs no files") {
  TemporaryFolder folder;
  Tokenizer bytes(256, folder.path());
  CHECK(bytes.encode("h\xc3\xa9!") == Ids{'h', 0xc3, 0xa9, '!'});
  CHECK(bytes.decode({'h', 0xc3, 0xa9, '!'}) == "h\xc3\xa9!");
  std::string error = error_of([&] { Tokenizer(100, folder.path()).encode("a~"); });
  CHECK(is_line_with(error, "'~'", "126", "ends at 99"));
}

TEST_CASE("without files ids are numbers, and text cannot be encoded") {
  TemporaryFolder folder;
  Tokenizer numbers(50257, folder.path());
  CHECK(numbers.decode({5, 50256, 0}) == "5 50256 0 ");
  std::string error = error_of([&] { numbers.encode("a"); });
  CHECK(is_line_with(error, folder.path().string(), "vocab.json", "merges.txt"));
}

// Bytes and their spelling: space U+0120, newline U+010A, 0xe9 itself, 0x80 U+0122.
TEST_CASE("a small vocabulary: merges by rank, spelled bytes, added tokens") {
  for (bool hugging_face : {true, false}) {
    TemporaryFolder folder;
    put(folder / (hugging_face ? "vocab.json" : "encoder.json"),
        R"({"a": 0, "b": 1, "c": 2, "Ġ": 3, "Ċ": 4, "ab": 5, "bc": 6, "Ġab": 7, "abc": 8, "é": 9, "Ģ": 10,
            "<|end|>": 11})");
    put(folder / (hugging_face ? "merges.txt" : "vocab.bpe"), "#version: 0.2\nb c\na b\nĠ ab\nab c\n");
    Tokenizer tokenizer(14, folder.path());
    CHECK(tokenizer.encode("abc") == Ids{0, 6});  // "b c" comes before "a b"
    CHECK(tokenizer.encode("ab ab\n") == Ids{5, 7, 4});
    CHECK(tokenizer.encode("abab") == Ids{5, 5});
    CHECK(tokenizer.encode("\xe9\x80") == Ids{9, 10});
    CHECK(tokenizer.encode("").empty());
    CHECK(tokenizer.decode({5, 7, 4, 9, 10, 11}) == "ab ab\n\xe9\x80<|end|>");
    CHECK(tokenizer.decode({12, 0, 13}) == "12 a13 ");  // the model's vocabulary is larger
    CHECK(is_line_with(error_of([&] { tokenizer.encode("abz"); }), "no token 'z': give a --prompt without it"));
    CHECK(is_line_with(error_of([&] { Tokenizer(7, folder.path()).encode(" ab"); }), "token 7", "ends at 6: give another --prompt"));
  }
}

TEST_CASE("decoding needs no merges, and bad files are refused") {
  TemporaryFolder folder;
  put(folder / "vocab.json", R"({"a": 0, "Ġb": 1})");
  CHECK(Tokenizer(300, folder.path()).decode({0, 1}) == "a b");
  CHECK(is_line_with(error_of([&] { Tokenizer(300, folder.path()).encode("a"); }), "merges.txt"));
  for (const char* bad : {R"("a": 0, "b": 0)", R"("a": 1)", R"("a": -1)", R"("a": "x")", R"("": 0)"}) {
    put(folder / "vocab.json", std::string("{") + bad + "}");
    CHECK(is_line_with(error_of([&] { Tokenizer(300, folder.path()); }), "vocab.json", "has id", "get the tokenizer's files again"));
  }
  put(folder / "vocab.json", "[");
  CHECK(is_line_with(error_of([&] { Tokenizer(300, folder.path()); }), "vocab.json", "JSON", "correct it, or get it again"));
  put(folder / "vocab.json", R"({"a": 0})");
  put(folder / "merges.txt", "#version: 0.2\nab\n");
  CHECK(is_line_with(error_of([&] { Tokenizer(300, folder.path()); }), "merges.txt", "line 2, 'ab', is not 'LEFT RIGHT': get"));
}

TEST_CASE("tokenizer.json, as transformers saves it instead of the two files") {
  TemporaryFolder folder;
  const std::string vocabulary = R"("vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 5, "bc": 6, "Ġab": 7, "<|end|>": 4})";
  const std::string divides = R"("pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";
  auto write = [&](const std::string& merges, const std::string& added, const std::string& more) {
    put(folder / "tokenizer.json", R"({"normalizer": null, "added_tokens": [)" + added + R"(], "model": {"type": "BPE", )" +
                                       vocabulary + R"(, "merges": [)" + merges + "]}, " + more + "}");
    return Tokenizer(12, folder.path());
  };
  auto refusal = [&](const std::string& merges, const std::string& added, const std::string& more) {
    return error_of([&] { write(merges, added, more); });
  };
  const std::string pairs = R"(["b", "c"], ["a", "b"], ["Ġ", "ab"])", end = R"({"id": 4, "content": "<|end|>"})";
  for (std::string merges : {pairs, std::string(R"("b c", "a b", "Ġ ab")")}) {
    const Tokenizer tokenizer = write(merges, end + R"(, {"id": 8, "content": "Ġ new"})", divides);
    CHECK(tokenizer.encode("abc ab") == Ids{0, 6, 7});
    CHECK(tokenizer.decode({0, 6, 7, 4, 8, 9}) == "abc ab<|end|>Ġ new9 ");  // added tokens are not spelled
  }
  // Added tokens are known in a text, too, the longest first, and no word reaches over them.
  const Tokenizer with_added = write(pairs, end + R"(, {"id": 8, "content": "<|end|>b"})", divides);
  CHECK(with_added.encode("ab<|end|>ab<|end|>bc") == Ids{5, 4, 5, 8, 2});
  CHECK(with_added.encode("<|end|>") == Ids{4});
  CHECK(is_line_with(refusal(R"("bc")", end, divides), "tokenizer.json", "merge", "bc", "LEFT RIGHT", "get the tokenizer's files again"));
  CHECK(is_line_with(refusal(R"(["b"])", end, divides), "tokenizer.json", "merge"));
  CHECK(is_line_with(refusal(pairs, R"({"id": 4, "content": "<|other|>"})", divides), "<|other|>", "has id '4'"));
  CHECK(is_line_with(refusal(pairs, R"({"id": 9, "content": "x"})", divides), "x", "has id '9'"));
  CHECK(is_line_with(refusal(pairs, end + R"(, {"id": 9, "content": "x"})", divides), "no token has id 8"));
  CHECK(is_line_with(refusal(pairs, "7", divides), "added token '7'"));
  CHECK(is_line_with(refusal(pairs, end, R"("pre_tokenizer": {"type": "Metaspace"})"), "/pre_tokenizer/type", "is 'Metaspace', this", "ByteLevel", "remove the tokenizer's files"));
  CHECK(is_line_with(refusal(pairs, end, divides + R"(, "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}, {"Sequence": {}}]})"),
                     "/post_processor/single/1"));
  CHECK(refusal(pairs, end, divides + R"(, "post_processor": {"type": "ByteLevel", "trim_offsets": true})") == "");
  for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
    CHECK(is_line_with(refusal(pairs, R"({"id": 4, "content": "<|end|>", ")" + std::string(flag) + R"(": true})", divides), flag, "is 'true'"));
    CHECK(refusal(pairs, R"({"id": 4, "content": "<|end|>", ")" + std::string(flag) + R"(": false})", divides) == "");
  }
  CHECK(is_line_with(refusal(pairs, end, R"("model": {"type": "Unigram"})"), "/model/type", "Unigram"));
  CHECK(is_line_with(refusal(pairs, end, R"("model": [])"), "/model/type", "null"));

  write(pairs, end, divides);  // it comes first, as in transformers, as it alone knows the added tokens
  put(folder / "vocab.json", R"({"a": 0})");
  put(folder / "merges.txt", "#version: 0.2\n");
  CHECK(Tokenizer(12, folder.path()).decode({1}) == "b");
  for (const char* flag : {"add_prefix_space", "add_bos_token", "add_eos_token"}) {
    put(folder / "tokenizer_config.json", R"({")" + std::string(flag) + R"(": true})");
    CHECK(is_line_with(error_of([&] { Tokenizer(12, folder.path()); }), "tokenizer_config.json", flag, "is 'true'"));
  }
}

TEST_CASE("added tokens beside vocab.json, as transformers' slow tokenizer saves them") {
  TemporaryFolder folder;
  put(folder / "vocab.json", R"({"a": 0, "b": 1, "<|endoftext|>": 2})");
  put(folder / "merges.txt", "#version: 0.2\na b\n");
  const std::string text = "a<|user|>b[PAD]<|endoftext|>";
  const auto known = [&] { return Tokenizer(5, folder.path()).encode(text) == Ids{0, 3, 1, 4, 2}; };
  put(folder / "added_tokens.json", R"({"<|user|>": 3, "[PAD]": 4})");
  CHECK(known());
  put(folder / "tokenizer_config.json", R"({"added_tokens_decoder": {"2": {"content": "<|endoftext|>"}, "3": {"content": "<|user|>", "lstrip": false}, "4": {"content": "[PAD]"}}})");
  CHECK(known());
  put(folder / "added_tokens.json", "{}");
  CHECK(known());
  const auto refusal = [&](const std::string& decoder) {
    put(folder / "tokenizer_config.json", R"({"added_tokens_decoder": )" + decoder + "}");
    return error_of([&] { Tokenizer(5, folder.path()); });
  };
  CHECK(is_line_with(refusal(R"({"3": {"content": "x", "rstrip": true}})"), "rstrip", "is 'true'"));
  CHECK(is_line_with(refusal(R"({"x": {"content": "x"}})"), "has id"));
  CHECK(is_line_with(refusal(R"({"3": 1})"), "lacks"));
}

TEST_CASE("what begins and ends a text: config.json's ids, of which generation_config.json may have others") {
  TemporaryFolder folder;
  put(folder / "vocab.json", R"({"a": 0, "b": 1, "c": 2, "<|endoftext|>": 3})");
  const auto ends = [&](const char* name, const char* config) {
    put(folder / name, config);
    return Tokenizer(4, folder.path()).end_tokens();
  };
  CHECK(ends("config.json", "{}") == Ids{3});
  CHECK(ends("config.json", R"({"eos_token_id": null})") == Ids{3});
  CHECK(ends("config.json", R"({"eos_token_id": 50256})") == Ids{3});  // transformers' default, for any vocabulary
  CHECK(ends("config.json", R"({"eos_token_id": 1, "bos_token_id": 2})") == Ids{1});
  CHECK(Tokenizer(4, folder.path()).first_token() == 2);
  CHECK(ends("generation_config.json", R"({"eos_token_id": [2, 0]})") == Ids{2, 0});
  CHECK(ends("generation_config.json", R"({"eos_token_id": ["x", -1, {}]})") == Ids{1});
}

TEST_CASE("what a sample without a prompt starts from, by the tokenizer") {
  TemporaryFolder folder;
  CHECK(Tokenizer(256, "").first_token() == '\n');
  CHECK(Tokenizer(7, "").first_token() == 6);
  CHECK(Tokenizer(1000, "").first_token() == '\n');
  for (int padded : {50257, 50304, 50400}) CHECK(Tokenizer(padded, "").first_token() == 50256);
  put(folder / "vocab.json", R"({"a": 0, "Ċ": 1, "b": 2})");
  CHECK(Tokenizer(50304, folder.path()).first_token() == 1);
  put(folder / "vocab.json", R"({"a": 0, "Ċ": 1, "<|endoftext|>": 2})");
  put(folder / "merges.txt", "#version: 0.2\na b\n");
  const Tokenizer tokenizer(50304, folder.path());
  CHECK(tokenizer.first_token() == 2);
  CHECK(tokenizer.encode("a<|endoftext|>\n") == Ids{0, 2, 1});
}

TEST_CASE("text is refused where tokens are not bytes") {
  TemporaryFolder folder;
  auto refusal = [&](int vocabulary) { return error_of([&] { check_tokens_are_bytes(folder.path(), vocabulary); }); };
  CHECK(refusal(256) == "");
  CHECK(is_line_with(refusal(257), folder.path().string(), "vocabulary of 257", "data/tokenize.py"));
  put(folder / "tokenizer.json", "{}");
  CHECK(is_line_with(refusal(256), folder.path().string(), "tokenizer", "data/tokenize.py"));
}
