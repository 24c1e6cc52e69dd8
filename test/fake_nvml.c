// An NVML that tests play with, for one GPU: GPT_NVML names this library. FAKE_NVML holds what it answers, NAME=NUMBER ...:
//
//   utilisation, temperature, reasons   as NVML gives them; defaults: 97, 61, 4 (the limit of power)
//   init, error            what nvmlInit_v2, and each question about the card, returns: an error
//   unsupported            of the questions about the card, in the order below: this one is not supported (from 1)
//   lost_after             after so many questions the card is lost
//   print                  1: print the number of each question
//
// With -DFAKE_NVML_OLD the library lacks all questions but the first.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_GPU_IS_LOST = 15 };

static int questions = 0;

static long number_of(const char* name, long otherwise) {
  const char* at = getenv("FAKE_NVML");
  for (const size_t length = strlen(name); at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL)
    if (strncmp(at, name, length) == 0 && at[length] == '=') return atol(at + length + 1);
  return otherwise;
}

// What a question with this number returns.
static int answer(const void* device, int number) {
  ++questions;
  if (number_of("print", 0)) fprintf(stderr, "question %d\n", questions);
  if (device != &questions) return NVML_ERROR_INVALID_ARGUMENT;
  if (questions > number_of("lost_after", 1L << 40)) return NVML_ERROR_GPU_IS_LOST;
  if (number_of("unsupported", 0) == number) return NVML_ERROR_NOT_SUPPORTED;
  return (int)number_of("error", NVML_SUCCESS);
}

int nvmlInit_v2(void) {
  questions = 0;
  return (int)number_of("init", NVML_SUCCESS);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  if (!bus) return NVML_ERROR_INVALID_ARGUMENT;
  *device = &questions;
  return NVML_SUCCESS;
}

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void* device, struct utilization* rates) {
  rates->gpu = (unsigned)number_of("utilisation", 97), rates->memory = 40;
  return answer(device, 1);
}

#ifndef FAKE_NVML_OLD
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void* device, struct memory* memory) {
  memory->total = 85899345920ull, memory->used = 64424509440ull, memory->free = memory->total - memory->used;
  return answer(device, 2);
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) { return *milliwatts = 654321, answer(device, 3); }
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) { return *milliwatts = 700000, answer(device, 4); }
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) {
  if (sensor != 0) return NVML_ERROR_INVALID_ARGUMENT;
  return *degrees = (unsigned)number_of("temperature", 61), answer(device, 5);
}
int nvmlDeviceGetTemperatureThreshold(void* device, int type, unsigned* degrees) {
  if (type != 1) return NVML_ERROR_INVALID_ARGUMENT;
  return *degrees = 90, answer(device, 6);
}
int nvmlDeviceGetClockInfo(void* device, int type, unsigned* mhz) { return *mhz = type == 1 ? 1755 : 2619, answer(device, 7); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  return *reasons = (unsigned long long)number_of("reasons", 4), answer(device, 8);
}
int nvmlDeviceGetPcieThroughput(void* device, int counter, unsigned* kilobytes) {
  return *kilobytes = counter == 1 ? 2000 : 1000, answer(device, 9);
}
// A MiB more in each call, sent twice as much as received.
struct field { unsigned id, scope; long long time, latency; int type, result; unsigned long long value; };
int nvmlDeviceGetFieldValues(void* device, int count, struct field* fields) {
  static unsigned long long calls = 0;
  ++calls;
  for (int i = 0; i < count; ++i) {
    const int known = (fields[i].id == 138 || fields[i].id == 139) && fields[i].scope == ~0u;
    fields[i].result = known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED, fields[i].type = 3;
    fields[i].value = 1024 * calls * (fields[i].id == 138 ? 2 : 1);
  }
  return answer(device, 10);
}
int nvmlDeviceGetTotalEccErrors(void* device, int type, int counter, unsigned long long* errors) {
  if (counter != 0) return NVML_ERROR_INVALID_ARGUMENT;
  return *errors = type == 0 ? 12 : 0, answer(device, 11);
}
#endif
