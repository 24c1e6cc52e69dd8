// The dense peak rates of devices, by name, from NVIDIA's data sheets. The MFU is computed with them.
#pragma once

#include <cstring>
#include <string>

struct PeakRate {
  const char* name;   // part of the device's name
  double bf16, fp32;  // FLOP/s, dense; fp32 without TF32
};

// The peak FLOP/s of this device and dtype, 0 if unknown. The first match counts, so longer names come first.
inline double peak_flops(const std::string& device, bool is_fp32) {
  static const PeakRate rates[] = {
      {"B200", 2250e12, 80e12},       {"GH200", 989e12, 67e12},   {"H200 NVL", 835e12, 60e12},
      {"H200", 989e12, 67e12},        {"H100 PCIe", 756e12, 51e12}, {"H100 NVL", 835e12, 60e12},
      {"H100", 989e12, 67e12},        {"H800", 989e12, 67e12},    {"A100", 312e12, 19.5e12},
      {"A800", 312e12, 19.5e12},      {"L40S", 362e12, 91.6e12},  {"L4", 121e12, 30.3e12},
      {"RTX 4090", 165e12, 82.6e12},  {"RTX 3090", 71e12, 35.6e12}};
  for (const PeakRate& rate : rates)
    if (device.find(rate.name) != std::string::npos) return is_fp32 ? rate.fp32 : rate.bf16;
  return 0;
}
