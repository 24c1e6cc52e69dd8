// Prints as JSON which grids a training step launches our own kernels with, and with which bytes and FLOPs: for
// dev/machine_code.py, which reads the kernels' machine code, but does not know their launchers. It runs on the CPU
// device, where a launch can be rehearsed: the launcher computes its grid, and no thread runs, so that tensors need no
// memory. The build is the one that counts accesses, because it has a GPU's packs of 16 bytes and its tensor cores.
//
//   make DEVICE=cpu build/cpu/launches && build/cpu/launches
#include <cstdio>

#include <nlohmann/json.hpp>

#include "dev/step_kernels.cuh"

static_assert(pack_bytes == 16, "the grids of a GPU: built with VARIANT=counts");

namespace {

using Json = nlohmann::ordered_json;

Json triple(const dim3& d) { return Json{d.x, d.y, d.z}; }

// Describes the kernels that `launch` launches.
Json operation(int calls, double elements, auto launch) {
  Json launches = Json::array();
  cpu::rehearsal = [&](const cpu::Launch& l) {
    launches.push_back({{"kernel", l.kernel}, {"grid", triple(l.grid)}, {"block", triple(l.block)},
                        {"shared", l.shared_bytes}});
  };
  Profiler::instance().trace = true;
  launch();
  const TracedRange range = Profiler::instance().take_timeline().ranges.back();
  cpu::rehearsal = {};
  return {{"operation", range.name}, {"calls", calls},       {"elements", elements},
          {"bytes", range.bytes},    {"flops", range.flops}, {"launches", launches}};
}

Json operations_of(const Shape& shape) {
  Json all = Json::array();
  for_each_operation(shape, [&](int calls, double elements, auto launch) { all.push_back(operation(calls, elements, launch)); });
  return all;
}

}  // namespace

int main() {
  Json all;
  for (const Shape& s : shapes) {
    const Json shape{{"B", s.B}, {"T", s.T}, {"L", s.L}, {"NH", s.NH}, {"C", s.C}, {"V", s.V}};
    all[s.name] = {{"shape", shape}, {"operations", operations_of(s)}};
  }
  std::printf("%s\n", all.dump(1).c_str());
}
