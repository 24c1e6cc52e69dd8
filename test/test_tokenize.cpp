// data/tokenize.py: test/data/test_tokenize.py says what is tested. Left out where there is no Python with numpy.
#include <cstdlib>

#include <doctest/doctest.h>

#include "test/temporary_folder.h"

TEST_CASE("tokenize.py takes what it can, and says in one line what it can't" *
          doctest::skip(std::system("python3 -c 'import numpy' > /dev/null 2>&1") != 0)) {
  TemporaryFolder folder;
  const std::string output = folder / "output";
  const int status = std::system(("python3 test/data/test_tokenize.py > '" + output + "' 2>&1").c_str());
  CHECK_MESSAGE(status == 0, content_of(output));
}
