#include "dev/ladders/counts.h"

#include <algorithm>
#include <cstdio>

#include "dev/ladders/table.h"

namespace ladder {

std::vector<std::string> count_columns() {
  return {"rung",   "moved",     "× least",  "load width", "load full %", "store width", "store full %",
          "shared", "conflicts", "barriers", "shuffles",   "mma",         "atomics",     "idea"};
}

std::string ratio(double a, double b, int significant) {
  return a > 0 && b > 0 ? digits(a / b, significant) : "–";
}

std::vector<std::string> count_row(const std::string& name, const std::string& idea, const cpu::AccessCounts& c,
                                   double elements, double least_bytes) {
  const cpu::MemoryCounts &loads = c.global_loads, &stores = c.global_stores, &atomics = c.global_atomics;
  const double moved = sector_bytes * double(loads.transactions + stores.transactions + atomics.transactions);
  const double wavefronts = double(c.shared_loads.transactions + c.shared_stores.transactions);
  const double enough = double(c.shared_loads.ideal + c.shared_stores.ideal);
  const auto full = [](const cpu::MemoryCounts& m) { return ratio(100.0 * double(m.ideal), double(m.transactions)); };
  const auto width = [](const cpu::MemoryCounts& m) { return ratio(double(m.bytes), double(m.threads)); };
  const auto often = [&](int64_t count) { return count ? digits(1000.0 * double(count) / elements, 3) : "–"; };
  return {name,
          ratio(moved, elements),
          ratio(moved, least_bytes),
          width(loads),
          full(loads),
          width(stores),
          full(stores),
          often(int64_t(wavefronts)),
          ratio(wavefronts, enough),
          often(c.barriers),
          often(c.shuffles),
          often(c.matrix_instructions),
          often(atomics.requests + c.shared_atomics.requests),
          idea};
}

void print_lines(const std::string& rung, const std::vector<cpu::LineCounts>& lines) {
  std::printf("\n%s\n", rung.c_str());
  for (size_t i = 0; i < std::min<size_t>(lines.size(), 8); ++i) {
    const cpu::AccessCounts& c = lines[i].counts;
    if (c.global_loads.requests + c.global_stores.requests + c.global_atomics.requests + c.shared_loads.requests +
            c.shared_stores.requests == 0)
      continue;  // a barrier or a shuffle
    std::printf("  %s:%d: ", lines[i].file.c_str(), lines[i].line);
    const auto say = [](const char* what, const char* unit, const cpu::MemoryCounts& m) {
      if (m.requests)
        std::printf(" %s %lld in %lld %s (%.3g times the fewest);", what, static_cast<long long>(m.requests),
                    static_cast<long long>(m.transactions), unit, double(m.transactions) / double(m.ideal));
    };
    say("loads", "sectors", c.global_loads);
    say("stores", "sectors", c.global_stores);
    say("atomics", "sectors", c.global_atomics);
    say("shared loads", "wavefronts", c.shared_loads);
    say("shared stores", "wavefronts", c.shared_stores);
    std::printf("\n");
  }
}

}  // namespace ladder
