// main() of all test programs but those of several ranks (test/ranks/ranks.cuh): compiled once.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
