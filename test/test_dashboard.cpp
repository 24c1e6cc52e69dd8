// dev/dashboard.py without a browser (`make test-dashboard` has one): test/dashboard/test_server.py says what is tested. Left out
// where there is no Python.
#include <cstdlib>

#include <doctest/doctest.h>

#include "test/temporary_folder.h"

TEST_CASE("the dashboard reads, thins, serves, prints and exports runs" *
          doctest::skip(std::system("python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' > /dev/null 2>&1") != 0)) {
  TemporaryFolder folder;
  const std::string output = folder / "output";
  const int status = std::system(("python3 test/dashboard/test_server.py > '" + output + "' 2>&1").c_str());
  CHECK_MESSAGE(status == 0, content_of(output));
}
