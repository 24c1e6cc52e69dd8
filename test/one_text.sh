#!/usr/bin/env bash
# Prints tests as one text for a compiler: the headers of all of them, then each in a namespace of its name.
#
#   test/one_text.sh test/test_data.cpp test/test_plan.cpp ...
grep -h '^#include' "$@" | LC_ALL=C sort -ru  # <libraries> before "our own"
for source; do
  name=$(basename "${source%.*}")
  printf 'namespace %s {\n#include "%s"\n}\n' "$name" "$source"
done
echo 'extern bool cases_by_file;  // test/run_cases.h'
echo 'static const bool by_file = cases_by_file = true;'
