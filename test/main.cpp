// main() of all test programs, but for tests of several ranks (test/ranks/ranks.cuh): compiled once.
#define DOCTEST_CONFIG_IMPLEMENT
#include "test/run_cases.h"

int main(int argument_count, char** arguments) { return run_cases(argument_count, arguments); }
