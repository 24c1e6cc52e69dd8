// The switches that make the CPU device as strict as a GPU (cpu/switches.h): each finds what it is for, and nothing is found
// without it. They are read once, so each small program below runs in a child process.
#define DOCTEST_CONFIG_IMPLEMENT
#include <unistd.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "extensions/pipeline/command.cuh"
#include "gpt/device.cuh"
#include "kernels/matmul.cuh"
#include "test/cpu/child.h"
#include "test/kernel_test.cuh"
#include "test/run_cases.h"
#include "test/temporary_folder.h"

namespace {

__global__ void first_kernel(int* out) { *out = 1; }
__global__ void second_kernel(int* out) { *out = 2; }

cudaStream_t new_stream() {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

// Keeps a stream busy for a while, as a message does that another rank has not sent yet. Says whether a call of the
// host waited for it.
class Message {
 public:
  Message() {
    cpu::enqueue(stream_, [this] { return arrived_ = std::chrono::steady_clock::now() > begin_ + std::chrono::milliseconds(100); });
  }
  ~Message() { cudaStreamSynchronize(stream_); }
  template <class Call>
  static std::string waits(Call call) {
    const Message message;
    call();
    return message.arrived_ ? "waits\n" : "goes on\n";
  }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool arrived_ = false;
  cudaStream_t stream_ = new_stream();
};

// A queue with a limit: the host waits before the launch that would be beyond it.
void many_launches() {
  const Buffer<int> out(1);
  const cudaStream_t stream = new_stream();
  first_kernel<<<1, 1, 0, stream>>>(out.data());
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  for (int launches : {9, 10}) {
    bool arrived = false;
    begin = std::chrono::steady_clock::now();
    cpu::enqueue(stream, [&] { return arrived = std::chrono::steady_clock::now() > begin + std::chrono::milliseconds(100); });
    for (int i = 0; i < launches; ++i) first_kernel<<<1, 1, 0, stream>>>(out.data());
    std::printf("%d launches: %s\n", launches, arrived ? "waits" : "goes on");
    CUDA_CHECK(cudaStreamSynchronize(stream));
  }
}

void first_uses() {
  const Buffer<int> out(1);
  const cudaStream_t stream = new_stream();
  const auto first = [&] { first_kernel<<<1, 1, 0, stream>>>(out.data()); };
  const auto second = [&] { second_kernel<<<1, 1, 0, stream>>>(out.data()); };
  void* device = nullptr;
  int host = 0;
  std::printf("first launch %s", Message::waits(first).c_str());
  std::printf("launch again %s", Message::waits(first).c_str());
  std::printf("another kernel %s", Message::waits(second).c_str());
  std::printf("cudaMalloc %s", Message::waits([&] { CUDA_CHECK(cudaMalloc(&device, 64)); }).c_str());
  std::printf("cudaHostRegister %s", Message::waits([&] { CUDA_CHECK(cudaHostRegister(&host, sizeof host, cudaHostRegisterDefault)); }).c_str());
  std::printf("cudaFree %s", Message::waits([&] { CUDA_CHECK(cudaFree(device)); }).c_str());
  std::printf("cudaHostUnregister %s", Message::waits([&] { CUDA_CHECK(cudaHostUnregister(&host)); }).c_str());
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Uses what belongs to device 0 while device 1 is the current one.
void other_device() {
  const Buffer<int> out(1);
  const cudaStream_t stream = new_stream();
  cudaEvent_t event;
  CUDA_CHECK(cudaEventCreate(&event));
  const auto say = [](const char* what, cudaError_t error) {
    std::printf("%s: %s\n", what, cudaGetErrorName(error));
    cudaGetLastError();
  };
  say("cudaSetDevice(1)", cudaSetDevice(1));
  first_kernel<<<1, 1, 0, stream>>>(out.data());
  say("launch in its stream", cudaPeekAtLastError());
  say("memset of its memory", cudaMemset(out.data(), 0, 4));
  say("copy in its stream", cudaMemcpyAsync(&event, &event, 4, cudaMemcpyHostToHost, stream));
  say("its event", cudaEventRecord(event, nullptr));
  say("wait of its stream", cudaStreamWaitEvent(stream, event));
  const Buffer<int> own(1);
  first_kernel<<<1, 1>>>(own.data());
  say("its own", cudaPeekAtLastError());
  CUDA_CHECK(cudaSetDevice(0));
}

void other_memory() {
  const Buffer<int> out(1);
  CUDA_CHECK(cudaSetDevice(1));
  first_kernel<<<1, 1>>>(out.data());
}

void changed_variable() {
  const Buffer<int> out(1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  const Buffer<int> more(1);
}

void pipeline() {
  CUDA_CHECK(cudaSetDevice(0));
  std::printf("problem: %s\nadvice: %s\n", pipeline_problem().c_str(), pipeline_advice().c_str());
}

// Does what the program of rank `argument` of two does before anything else.
void prepare() {
  prepare_cuda({0, 2, "mpirun", true});
  pipeline();
}

// Calls of each kind that the log has, but for NCCL's. Says what the kernel and the product have computed.
void logged() {
  const Buffer<int> out(1);
  const Buffer<float> product(1), two(std::vector{2.0f});
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -5));
  cudaEvent_t event;
  CUDA_CHECK(cudaEventCreate(&event));
  CUDA_CHECK(cudaStreamWaitEvent(stream, event));
  CUDA_CHECK(cudaMemsetAsync(out.data(), 0, sizeof(int)));
  CUDA_CHECK(cudaEventRecord(event));
  CUDA_CHECK(cudaStreamWaitEvent(stream, event));
  {
    KernelRange range("launcher", stream, {4, 0});
    first_kernel<<<dim3(2, 3), 4, 0, stream>>>(out.data());
  }
  CUDA_CHECK(cudaEventRecord(event, stream));
  gemm<float, float>(product, two, two, nullptr, {1, 1, 1}, stream);
  int result = 0;
  CUDA_CHECK(cudaMemcpyAsync(&result, out.data(), sizeof(int), cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  std::printf("%d, %s\n", result, product.get()[0] == 4 ? "4" : "no product");
}

const std::map<std::string, void (*)()> programs = {{"many_launches", many_launches}, {"first_uses", first_uses},
                                                    {"other_device", other_device},   {"other_memory", other_memory},
                                                    {"changed_variable", changed_variable},
                                                    {"pipeline", pipeline},           {"prepare", prepare},
                                                    {"logged", logged}};

std::string output(const std::string& program, const std::string& environment) {
  return run_child(program, "GPT_CPU_SCHEDULE=forward " + environment).output;
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 3 || arguments[1] != std::string("--program")) return run_cases(argument_count, arguments);
  programs.at(arguments[2])();
  std::fflush(stdout);
  _exit(0);  // streams and events end with the process, which is no leak
}

TEST_CASE("GPT_CPU_QUEUE=N: a launch waits while its stream has N operations pending") {
  CHECK(output("many_launches", "") == "9 launches: goes on\n10 launches: goes on\n");
  CHECK(output("many_launches", "GPT_CPU_QUEUE=10") == "9 launches: goes on\n10 launches: waits\n");
}

TEST_CASE("GPT_CPU_LAZY: a kernel's first launch, and changes of memory, wait for the device") {
  CHECK(output("first_uses", "GPT_CPU_LAZY=1 CUDA_MODULE_LOADING=EAGER") ==
        "first launch waits\nlaunch again goes on\nanother kernel waits\ncudaMalloc waits\ncudaHostRegister waits\n"
        "cudaFree waits\ncudaHostUnregister waits\n");
  CHECK(output("first_uses", "") ==
        "first launch goes on\nlaunch again goes on\nanother kernel goes on\ncudaMalloc goes on\ncudaHostRegister goes on\n"
        "cudaFree waits\ncudaHostUnregister waits\n");
}

TEST_CASE("GPT_CPU_DEVICES: what belongs to one device is refused on another") {
  CHECK(output("other_device", "GPT_CPU_DEVICES=2") ==
        "cudaSetDevice(1): cudaSuccess\nlaunch in its stream: cudaErrorInvalidResourceHandle\n"
        "memset of its memory: cudaErrorInvalidValue\n"
        "copy in its stream: cudaErrorInvalidResourceHandle\nits event: cudaErrorInvalidResourceHandle\n"
        "wait of its stream: cudaErrorInvalidResourceHandle\nits own: cudaSuccess\n");
  const Outcome fault = run_child("other_memory", "GPT_CPU_DEVICES=2");
  CHECK(fault.code == 1);
  CHECK(fault.output == "kernel first_kernel: an argument points into the memory of another device: set the device to which "
                        "it belongs\n");
  CHECK(output("other_device", "").starts_with("cudaSetDevice(1): cudaErrorInvalidDevice\n"));
}

TEST_CASE("a variable CUDA_* that is changed after the first CUDA call, which has read it, is named") {
  const Outcome outcome = run_child("changed_variable", "");
  CHECK(outcome.code == 1);
  CHECK(outcome.output == "CUDA_MODULE_LOADING was changed after the first CUDA call, which has read it: change it before\n");
  CHECK(run_child("changed_variable", "CUDA_MODULE_LOADING=EAGER").code == 0);
}

TEST_CASE("kernels of several ranks are loaded at the start, whatever the environment says; a lazy pipeline is refused") {
  const std::string right = "problem: \nadvice: \n";
  CHECK(output("prepare", "") == right);
  CHECK(output("prepare", "CUDA_MODULE_LOADING=EAGER") == right);
  CHECK(output("prepare", "CUDA_MODULE_LOADING=LAZY") ==
        "train_gpt: CUDA_MODULE_LOADING is 'LAZY', and several ranks need EAGER: it is used\n" + right);
  for (const char* lazy : {"", "CUDA_MODULE_LOADING=LAZY"})
    CHECK(output("pipeline", lazy).starts_with("problem: kernels would be loaded lazily"));
  CHECK(output("prepare", "NCCL_LAUNCH_ORDER_IMPLICIT=1").starts_with("problem: NCCL_LAUNCH_ORDER_IMPLICIT=1 "));
  CHECK(output("prepare", "CUDA_DEVICE_MAX_CONNECTIONS=1").starts_with("problem: \nadvice: CUDA_DEVICE_MAX_CONNECTIONS is 1"));
}

TEST_CASE("GPT_CPU_LOG: what the host gives to its streams, in its order; GPT_CPU_DRY: kernels compute nothing") {
  const TemporaryFolder folder;
  const std::string log = (folder / "log").string(), wanted =
      "memset 0 4\nmemset 0 4\nmemset 0 4\ncopy 0 4\nstream 1 -5\nwait 1 0\nmemset 0 4\nrecord 0 1\nwait 1 1\n"
      "range launcher\nkernel 1 first_kernel 6\nend\nrecord 1 2\nproduct 1 1 1 1 4 4\ncopy 1 4\ncopy 0 4\n";
  const std::string environment = "OMPI_COMM_WORLD_RANK=3 GPT_CPU_LOG='" + log + "' ";
  CHECK(output("logged", environment) == "1, 4\n");
  CHECK(content_of(log + ".3") == wanted);
  CHECK(output("logged", environment + "GPT_CPU_SCHEDULE=reverse") == "1, 4\n");
  CHECK(content_of(log + ".3") == wanted);
  CHECK(output("logged", environment + "GPT_CPU_DRY=1") == "0, no product\n");
  CHECK(content_of(log + ".3") == wanted);
  CHECK(output("logged", "GPT_CPU_LOG=/nowhere/log") == "GPT_CPU_LOG: /nowhere/log.0 can't be written\n");
}

TEST_CASE("a value that is not understood is refused in one line") {
  const auto refusal = [](const std::string& environment) {
    const Outcome outcome = run_child("pipeline", environment);
    CHECK(outcome.code == 1);
    return outcome.output;
  };
  for (const char* value : {"0", "many", "-1", "1000001", "99999999999999999999"})
    CHECK(refusal("GPT_CPU_QUEUE=" + std::string(value)) ==
          "GPT_CPU_QUEUE is '" + std::string(value) + "'; give a number from 1 to 1000000\n");
  CHECK(refusal("GPT_CPU_DRY=2") == "GPT_CPU_DRY is '2'; give a number from 0 to 1\n");
  CHECK(refusal("GPT_CPU_LAZY=yes") == "GPT_CPU_LAZY is 'yes'; give a number from 0 to 1\n");
  CHECK(refusal("GPT_CPU_NCCL=rings") == "GPT_CPU_NCCL is 'rings'; give direct or ring\n");
  for (const char* value : {"split:0", "split:2nd", "2"})
    CHECK(refusal("GPT_CPU_NCCL_FAULT=" + std::string(value)) ==
          "GPT_CPU_NCCL_FAULT is '" + std::string(value) + "'; give split:N, with N from 1\n");
  CHECK(refusal("GPT_CPU_DEVICES=65") == "GPT_CPU_DEVICES is '65'; give a number from 0 to 64\n");
}
