// How the test cases of a program end. One without an assertion fails, unless it called skip(), and so does a selection
// (--test-case) that matches none. A case that breaks the device ends the program, which names it, and says from which case
// on a new process has to go on: test/every_case.sh starts that one. Included once in a program, beside doctest's
// implementation.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "test/broken_device.h"
#include "test/skip.h"

struct Cases {
  int first = 1, started = 0, passed = 0, failed = 0;  // first: the number of the first that runs (--first)
  std::string running, file;                           // the name of the case; the file of all cases, empty: any
  std::vector<std::string> skipped, left_out, empty;  // left_out: by a condition that is known before any case runs
  bool some_elsewhere = false;  // do other ways to run this test have some of its cases?
  std::ostream* out = &std::cout;
};
inline Cases cases;
// Of a program that has the cases of several files, those of the file run by whose name it is called (test/one_text.sh).
bool cases_by_file = false;
inline bool is_of_file(const doctest::String& file) { return std::string_view(file.c_str()).find(cases.file) != std::string_view::npos; }

// Says in the last lines how the cases ended, which test/run.sh adds up.
inline size_t report_cases(const std::vector<std::string>& left_out) {
  for (const std::string& name : cases.empty) *cases.out << "failed: there is no assertion in " << name << "\n";
  for (const std::vector<std::string>* names : {&std::as_const(cases.skipped), &left_out})
    for (const std::string& name : *names) *cases.out << "skipped: " << name << "\n";
  const size_t failed = size_t(cases.failed) + cases.empty.size(), skipped = cases.skipped.size() + left_out.size();
  *cases.out << "cases: " << cases.passed << " passed, " << failed << " failed, " << skipped << " skipped" << std::endl;
  return failed;
}

// Ends the program after the running case, which counts as failed. (Cases that are left out are told by the process that
// comes to the end.)
[[noreturn]] inline void stop_cases(const std::string& error) {
  cases.out->flush();
  if (const auto* log = dynamic_cast<std::ostringstream*>(cases.out)) std::cerr << log->str();  // a rank's, who is silent
  std::cerr << "stopped: the case \"" << cases.running << "\" has broken the device: " << error
            << ". The cases after it need a new process: --first=" << cases.first + cases.started << std::endl;
  ++cases.failed;
  report_cases({});
  std::_Exit(1);
}

class CountCases : public doctest::IReporter {
 public:
  explicit CountCases(const doctest::ContextOptions& options) { cases.first = std::max(1, int(options.first)); }

  void test_case_start(const doctest::TestCaseData& data) override {
    cases.running = data.m_name;
    ++cases.started;
    skip_reason.clear();
  }
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    if (!stats.failure_flags && !skip_reason.empty()) cases.skipped.push_back(cases.running + ": " + skip_reason);
    else if (!stats.failure_flags && stats.numAssertsCurrentTest == 0) cases.empty.push_back(cases.running);
    else if (!stats.failure_flags) ++cases.passed;
    else if (const std::string error = device_error(); !error.empty()) stop_cases(error);
    else ++cases.failed;
  }

  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData& data) override {
    if (!data.m_skip || !is_of_file(data.m_file)) return;
    cases.left_out.push_back(std::string(data.m_name) + ": what it is for is not here");
  }
};
REGISTER_LISTENER("cases", 1, CountCases);

// program: the path by which it was called
inline void select_file(doctest::Context& context, const std::string& program) {
  if (!cases_by_file) return;
  cases.file = "/" + std::filesystem::path(program).filename().string() + ".c";  // pp or u
  context.addFilter("source-file", ("*" + cases.file + "*").c_str());
}

// A test that runs in several ways, as on 8 ranks and on 3, runs each of its cases in half of them, by GPT_CASES_TURN
// (turns.h), which is even in one way, and odd in another.
inline void leave_to_other_ways(doctest::Context& context) {
  const char* turn = std::getenv("GPT_CASES_TURN");
  if (!turn || !*turn) return;
  int number = std::atoi(turn);
  unsetenv("GPT_CASES_TURN");  // processes that a case starts run the case that they are told
  for (const doctest::detail::TestCase& one : doctest::detail::getRegisteredTests()) {
    if (!is_of_file(one.m_file) || number++ % 2 == 0) continue;
    std::string name = one.m_name;
    std::ranges::replace(name, ',', '?');  // a comma ends a filter
    context.addFilter("test-case-exclude", name.c_str());
    cases.some_elsewhere = true;
  }
}

// Runs the cases. Returns the exit code. compare: ranks' lists of cases without an assertion.
inline int run_cases(doctest::Context& context, std::ostream& out = std::cout, void (*compare)() = [] {}) {
  cases.out = &out;
  std::at_quick_exit([] { stop_cases("as the line above says"); });  // the CPU device ends a program so whose kernel faults
  leave_to_other_ways(context);
  const int code = context.run();
  if (context.shouldExit()) return code;  // it listed something
  if (cases.first == 1 && !cases.started && cases.left_out.empty() && !cases.some_elsewhere) cases.empty.push_back("this selection");
  compare();
  const size_t failed = report_cases(cases.left_out);
  return code ? code : failed > 0;
}
inline int run_cases(int argument_count, char** arguments) {
  doctest::Context context(argument_count, arguments);
  select_file(context, arguments[0]);
  return run_cases(context);
}
