// How an error ends a job of several ranks.
#pragma once

#include <exception>
#include <filesystem>
#include <stdexcept>

#include "parallel/processes/control.h"
#include "parallel/processes/error.h"
#include "runtime/input/options.h"

// Runs work(). If it throws, this ends the job at once, after last(), which does what can still be done. The exception
// is caught here so that no destructor outside runs: destructors would wait for the device, and the device might wait
// forever for a rank that has ended.
template <class Work, class Last = void (*)()>
void end_job_on_error(Control& control, Work work, Last last = [] {}) {
  const auto fail = [&](const std::exception& error, int exit_code) {
    try {
      last();
    } catch (const std::exception&) {  // the first error is the one to tell
    }
    control.fail(error.what(), exit_code);
  };
  try {
    work();
  } catch (const UsageError& error) {
    fail(error, 2);
  } catch (const std::filesystem::filesystem_error& error) {
    fail(std::runtime_error(excerpt(error.path1().native()) + ": " + error.code().message() + ": check this path"), 1);
  } catch (const std::exception& error) {
    fail(error, 1);
  }
}
