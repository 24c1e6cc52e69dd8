// How the test cases of a program end. One without an assertion fails, unless it called skip(), and so does a selection
// (--test-case) that matches none. Included once in a program, beside doctest's implementation.
#pragma once

#include <iostream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "test/skip.h"

struct Cases {
  int passed = 0, failed = 0;
  std::vector<std::string> skipped, empty;
};
inline Cases cases;

class CountCases : public doctest::IReporter {
 public:
  explicit CountCases(const doctest::ContextOptions&) {}

  void test_case_start(const doctest::TestCaseData& data) override {
    name_ = data.m_name;
    skip_reason.clear();
  }
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    if (stats.failure_flags) ++cases.failed;
    else if (!skip_reason.empty()) cases.skipped.push_back(name_ + ": " + skip_reason);
    else if (stats.numAssertsCurrentTest == 0) cases.empty.push_back(name_);
    else ++cases.passed;
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
    if (data.m_skip) cases.skipped.push_back(std::string(data.m_name) + ": what it is for is not here");
  }

 private:
  std::string name_;
};
REGISTER_LISTENER("cases", 1, CountCases);

// Runs the cases, and says in the last line how they ended, which test/run.sh adds up. Returns the exit code. compare:
// ranks' lists of cases without an assertion.
inline int run_cases(doctest::Context& context, std::ostream& out = std::cout, void (*compare)() = [] {}) {
  const int code = context.run();
  if (context.shouldExit()) return code;  // it listed something
  if (!cases.passed && !cases.failed && cases.skipped.empty() && cases.empty.empty()) cases.empty.push_back("this selection");
  compare();
  for (const std::string& name : cases.empty) out << "failed: there is no assertion in " << name << "\n";
  for (const std::string& name : cases.skipped) out << "skipped: " << name << "\n";
  const size_t failed = size_t(cases.failed) + cases.empty.size();
  out << "cases: " << cases.passed << " passed, " << failed << " failed, " << cases.skipped.size() << " skipped" << std::endl;
  return code ? code : failed > 0;
}
inline int run_cases(int argument_count, char** arguments) {
  doctest::Context context(argument_count, arguments);
  return run_cases(context);
}
