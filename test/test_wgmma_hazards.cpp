// dev/wgmma_hazards.py on machine code made up for it, with hazards planted. Left out where there is no Python.
#include <doctest/doctest.h>

#include <cstdio>
#include <vector>

#include <sys/wait.h>

#include "test/temporary_folder.h"

namespace {

const bool python_found = std::system("python3 --version > /dev/null 2>&1") == 0;

using Code = std::vector<std::string>;

// What the program prints about these kernels, then its exit code. Instruction i is at address 16·i.
std::string check_all(const std::vector<Code>& kernels) {
  TemporaryFolder folder;
  std::string text;
  for (size_t kernel = 0; kernel < kernels.size(); ++kernel) {
    text += "\t\tFunction : kernel_" + std::to_string(kernel) + "\n";
    for (size_t i = 0; i < kernels[kernel].size(); ++i) {
      char address[16];
      std::snprintf(address, sizeof address, "/*%04zx*/", 16 * i);
      text += "        " + std::string(address) + "    " + kernels[kernel][i] + " ;   /* 0x00e0000010b879f0 */\n";
    }
  }
  put(folder / "code.sass", text);
  const int status = std::system(("python3 dev/wgmma_hazards.py '" + (folder / "code.sass").string() + "' > '" +
                                  (folder / "out").string() + "' 2>&1").c_str());
  return content_of(folder / "out") + "exit " + std::to_string(WEXITSTATUS(status)) + "\n";
}

std::string check(const Code& code) { return check_all({code}); }

// What it printed about a kernel: how many hazards, then these.
std::string about(size_t kernel, const std::string& printed) {
  const std::string name = " hazards: kernel_" + std::to_string(kernel) + "\n";
  const size_t found = printed.find(name);
  if (found == std::string::npos) return printed;
  const size_t end = printed.find(" products, ", found);
  return printed.substr(found - 1, end == std::string::npos ? end : printed.rfind('\n', end) - found + 1);
}

// Two groups of products: R24 to R55 += (R4 to R7)·B, then R64 to R95 += A·B. At the end all is waited for and used,
// so that without waits a kernel has hazards of both kinds.
const Code start = {"WARPGROUP.ARRIVE",
                    "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], RZ, !UPT, gsb0",       // 0x10
                    "HGMMA.64x64x16.F32.BF16 R64, gdesc[UR4], gdesc[UR8], R64",           // 0x20
                    "HGMMA.64x64x16.F32.BF16 R64, gdesc[UR4], gdesc[UR8], R64, gsb0"};    // 0x30
const Code end = {"WARPGROUP.DEPBAR.LE gsb0, 0x0", "FADD R4, R24, R64", "STG.E desc[UR6][R2.64], R4", "EXIT"};

Code with(const Code& between) {
  Code code = start;
  code.insert(code.end(), between.begin(), between.end());
  code.insert(code.end(), end.begin(), end.end());
  return code;
}

const std::string wait_1 = "WARPGROUP.DEPBAR.LE gsb0, 0x1";

}  // namespace

TEST_CASE("wgmma_hazards.py: what may happen while products run" * doctest::skip(!python_found)) {
  const std::string said = check_all({
      with({}),
      with({"FADD R8, R4, R5", "STS.128 [R2], R4"}),                // reads the left operand
      with({"LDS.128 R8, [R2]", "IMAD.WIDE R20, R21, R22, R8"}),    // writes R8 to R11, R20 and R21
      with({wait_1, "FADD R4, R24, R55"}),                          // the first group is done
      with({wait_1, "MOV R5, R6", "ISETP.GE.AND P0, PT, R4, R5, PT"}),
      with({"ISETP.GE.AND P0, PT, R4, R5, PT", "BAR.SYNC.DEFER_BLOCKING R4, 0x100"}),  // they have no results
      with({"HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"})});  // adds to the same sums
  CHECK_MESSAGE(contains(said, "7 kernels, 0 hazards\nexit 0"), said);
}

TEST_CASE("wgmma_hazards.py: hazards are found" * doctest::skip(!python_found)) {
  struct Case {
    Code code;
    std::string message;
  };
  const std::string sums = "of the product at 0x0010", left = "writes the left operand (R";
  const std::vector<Case> cases = {
           {{"FADD R8, R9, R55"}, "0x0040 FADD R8, R9, R55: uses the sums (R55) " + sums},
           {{"MOV R24, RZ"}, "uses the sums (R24) " + sums},
           {{"STS.64 [R2], R23"}, "uses the sums (R24) " + sums},                      // R23 and R24
           {{"LDS R8, [R24+UR4+0x100]"}, "uses the sums (R24) " + sums},               // an address
           {{"IMAD.WIDE R23, R20, R21, R16"}, "uses the sums (R24) " + sums},          // its result is R23 and R24
           {{"MOV R7, RZ"}, left + "7) " + sums},
           {{"@P0 MOV R7, RZ"}, left + "7) " + sums},                                  // perhaps
           {{"LDS.128 R0, [R8]", "LDS.128 R1, [R8]"}, "0x0050 LDS.128 R1, [R8]: " + left + "4) " + sums},
           {{"SHFL.BFLY PT, R5, R9, 0x1, 0x1f"}, left + "5) " + sums},  // after a predicate
           {{"F2FP.BF16.F32.PACK_AB R6, R8, R9"}, left + "6) " + sums},
           {{wait_1, "FADD R8, R24, R95"}, "uses the sums (R95) of the product at 0x0030"},  // not done yet
           {{"@P0 WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R7, RZ"}, left + "7) " + sums},  // perhaps
           {{"HGMMA.64x64x16.F32.BF16 R96, R28, gdesc[UR8], R96, gsb0"}, "uses the sums (R28, R29, R30, R31) " + sums},
           {{"HGMMA.64x8x16.F32.BF16 R4, gdesc[UR4], gdesc[UR8], RZ, !UPT, gsb0"}, left + "4, R5, R6, R7) " + sums},
           {{"HGMMA.64x64x16.F32.BF16 R40, gdesc[UR4], gdesc[UR8], R40, gsb0"}, "uses the sums (R40, "},
  };
  std::vector<Code> kernels;
  for (const Case& planted : cases) kernels.push_back(with(planted.code));
  const std::string said = check_all(kernels);
  for (size_t i = 0; i < cases.size(); ++i) {
    CHECK_MESSAGE(contains(about(i, said), "1 hazards"), about(i, said));
    CHECK_MESSAGE(contains(about(i, said), cases[i].message), about(i, said));
  }
  CHECK(contains(said, "15 kernels, 15 hazards\nexit 1"));
}

TEST_CASE("wgmma_hazards.py follows branches, loops and calls" * doctest::skip(!python_found)) {
  // A loop from 0x10 on: the instruction before the product is one after it in the next round.
  Code loop = {"WARPGROUP.ARRIVE", "MOV R4, R8", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0",
               "@P0 BRA 0x10"};
  loop.insert(loop.end(), end.begin(), end.end());
  Code waiting_loop = loop;
  waiting_loop.insert(waiting_loop.begin() + 3, "WARPGROUP.DEPBAR.LE gsb0, 0x0");
  // Two left operands by turns: a wait for all but one group is enough, if there is one in each turn.
  Code turns = {"MOV R4, R8", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0", wait_1,
                "MOV R12, R8", "HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR8], R24, gsb0", wait_1, "@P0 BRA 0x0"};
  turns.insert(turns.end(), end.begin(), end.end());
  Code careless_turns = turns;
  careless_turns[5] = "NOP";
  Code call = with({"CALL.REL.NOINC 0x90"});  // of a function after the kernel's end
  call.insert(call.end(), {"MOV R6, RZ", "RET.REL.NODEC R8 0x0"});

  const std::string said = check_all({with({"@P0 BRA 0x60", wait_1, "MOV R7, RZ"}),  // to 0x60, around the wait
                                  with({"@P0 BRA 0x50", wait_1, "MOV R7, RZ"}), loop, waiting_loop,
                                      turns, careless_turns, call});
  CHECK_MESSAGE(contains(about(0, said), "0x0060 MOV R7, RZ: writes the left operand (R7)"), said);
  CHECK_MESSAGE(contains(about(1, said), "0 hazards"), said);
  CHECK_MESSAGE(contains(about(2, said), "0x0010 MOV R4, R8: writes the left operand (R4)"), said);
  CHECK_MESSAGE(contains(about(3, said), "0 hazards"), said);
  CHECK_MESSAGE(contains(about(4, said), "0 hazards"), said);
  CHECK_MESSAGE(contains(about(5, said), "0x0000 MOV R4, R8: writes the left operand (R4)"), said);
  CHECK_MESSAGE(contains(about(6, said), "0x0090 MOV R6, RZ: writes the left operand (R6)"), said);
}

TEST_CASE("wgmma_hazards.py refuses what it does not understand" * doctest::skip(!python_found)) {
  CHECK(contains(check({"FADD R4, R5, R6", "EXIT"}), "has no HGMMA: is it compiled for sm_90a?\nexit 2"));
  CHECK(contains(check({start[1], "EXIT"}), "even without waits nothing touches the sums of a product"));
  CHECK(contains(check({start[1], "EXIT"}), "the check is blind here\nexit 2"));
  CHECK(contains(check({start[1], "FADD R8, R24, R25", "EXIT"}), "nothing touches the left operand of a product"));
  CHECK(contains(check({"EXIT", start[1], "FADD R8, R24, R25", "EXIT"}), "no way leads to the product at 0x10"));
  CHECK(contains(check({start[1], "BRX R8 -0x100", "EXIT"}), "goes to an address that only a run knows"));
}
