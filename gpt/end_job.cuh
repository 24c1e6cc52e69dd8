// How an error ends a job of several ranks.
#pragma once

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "gpt/base/error.h"
#include "gpt/options.h"
#include "gpt/ranks.h"

// Returns the result of work(). If work() throws, this ends the job at once, after last(), which does the work that is still
// possible. The exception is caught here so that no destructor outside runs: destructors would wait for the device, and the
// device might wait forever for a rank that has ended.
template <class Work, class Last = void (*)()>
auto end_job_on_error(Ranks& ranks, Work work, Last last = [] {}) {
  std::string problem;
  int exit_code = 1;
  try {
    return work();
  } catch (const UsageError& error) {
    problem = error.what();
    exit_code = 2;
  } catch (const std::filesystem::filesystem_error& error) {
    problem = excerpt(error.path1().native()) + ": " + error.code().message() + ": check this path";
  } catch (const std::exception& error) {
    problem = error.what();
  }
  attempt(last);  // if it fails, too, the first error is still the one to tell
  ranks.fail(problem, exit_code);
  std::abort();  // as g++ 12 does not know that a virtual function does not return
}
