// Any file as metrics.jsonl of a resumed run: what is kept are whole leading lines, all that may be kept, and a line
// can be appended. The bill takes from it whatever there is. Input: the step of the checkpoint in a byte, then the
// file.
#include "test/fuzz/fuzz.h"

#include <nlohmann/json.hpp>

#include "runtime/reports/bill.h"
#include "runtime/reports/metrics.h"

namespace {

bool belongs(const std::string& line, size_t step) {
  const nlohmann::json fields = nlohmann::json::parse(line, nullptr, false);
  return fields.is_object() && fields.contains("step") && fields["step"].is_number_unsigned() &&
         fields["step"].get<uint64_t>() <= step;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t step = data[0];
  const std::string before(data + 1, data + size);
  const std::filesystem::path path = fuzzed("metrics.jsonl", before);
  require(done(size, [&] { Bill(1, 1).restore(path, step); }), "no bill");
  require(done(size, [&] { MetricsLog(path, step).append({{"step", step + 1}}); }), "a log that cannot be continued");

  const std::string after = content_of(path), line = "{\"step\": " + std::to_string(step + 1) + "}\n";
  require(after.ends_with(line), "no line was appended");
  const size_t kept = after.size() - line.size();
  require(before.compare(0, kept, after, 0, kept) == 0, "lines were changed");
  size_t start = 0;
  for (size_t end; start < kept; start = end + 1) {
    end = before.find('\n', start);
    require(end < kept && belongs(before.substr(start, end - start), step), "a line too many");
  }
  const size_t end = before.find('\n', kept);
  require(end == std::string::npos || !belongs(before.substr(kept, end - kept), step), "a line too few");
  return 0;
}
