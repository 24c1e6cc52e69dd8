// Attention by cuDNN, through the graph API of its C++ frontend: "Attention", sections "SDPA FP16/BF16 Forward" and
// "Backward" of the frontend's documentation. kernels/attention.cuh has the maths and explains the functions.
//
// For cuDNN, q, k, v and out have the shape (B, NH, T, HS), with any strides, in elements:
//
//   q, k, v, dq, dk, dv   parts 0, 1, 2 of (B, T, 3, NH, HS)   3·T·C, HS, 3·C, 1
//   out, dout             (B, T, NH, HS)                         T·C, HS,   C, 1
//   lse, its "stats"      (B, NH, T, 1) in fp32                 NH·T,  T,   1, 1    max + ln Σ exp, natural, as ours
//
// So it reads and writes our tensors without a copy. A shape is planned once, forward and backward together: two graphs
// of one operation each, for which cuDNN's heuristics choose an engine.
//
// Backward is deterministic. For that, cuDNN on Hopper stores dS, B·NH·T²·2 bytes (T rounded up to tiles), and computes
// dQ = dS·K as a separate product: 1.5 GiB of workspace for gpt2 at B=64, T=1024. With
// CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 in the environment it adds up dQ in a fixed order instead (cuDNN 9.25),
// which takes less memory and more time.
#include "kernels/cudnn/attention.h"

#define CUDNN_FRONTEND_SKIP_JSON_LIB  // leaves out serialisation, which would take half of the time to compile
#include <cmath>
#include <cstring>  // frontend 1.32 forgets to include it

#include <cudnn.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>

static_assert(CUDNN_FRONTEND_VERSION >= 11300, "cuDNN's frontend is too old: 1.13 or later is needed (make build/cudnn)");

namespace {

using cudnn_frontend::DataType_t;
using cudnn_frontend::error_t;
using cudnn_frontend::graph::Graph;
using cudnn_frontend::graph::SDPA_attributes;
using cudnn_frontend::graph::SDPA_backward_attributes;
using cudnn_frontend::graph::Tensor_attributes;
using Tensor = std::shared_ptr<Tensor_attributes>;

struct Shape {
  int64_t batch, seq_len, heads, head_size;
  DataType_t type;
  int64_t channels() const { return heads * head_size; }
  float scale() const { return 1.0f / std::sqrt(float(head_size)); }
  auto operator<=>(const Shape&) const = default;
};

// The ids of the graphs' tensors; execution gives a pointer for each id.
enum Name : int64_t { Q = 1, K, V, OUT, LSE, DOUT, DQ, DK, DV };
using Pointers = std::unordered_map<int64_t, void*>;

struct Plan {
  Graph forward, backward;
};

// What all plans share, during the whole run.
struct Context {
  cudnnHandle_t handle = nullptr;
  std::map<Shape, Plan> plans;
  int64_t most_bytes = 0;  // the largest workspace that a plan needs
  void *lent = nullptr, *own = nullptr;  // workspaces
  size_t lent_bytes = 0, own_bytes = 0;
};

// It is never destroyed, because at exit the library may be unloaded before it.
Context& context() {
  static Context& instance = *new Context;
  return instance;
}

template <class Float>
Shape shape_of(int batch, int seq_len, int heads, int head_size) {
  constexpr DataType_t type = std::is_same_v<Float, __half> ? DataType_t::HALF : DataType_t::BFLOAT16;
  return {batch, seq_len, heads, head_size, type};
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

void require(cudnnStatus_t status) {
  if (status != CUDNN_STATUS_SUCCESS) throw std::runtime_error(cudnnGetErrorString(status));
}
void require(const error_t& error) {
  if (error.code != cudnn_frontend::error_code_t::OK) throw std::runtime_error(first_line(error.err_msg));
}

// ---- the graphs

// Describes a tensor (B, NH, T, HS) that is one part of a tensor (B, T, parts, NH, HS).
Tensor_attributes heads_of(Name name, const Shape& s, int parts) {
  const int64_t row = parts * s.channels();
  return Tensor_attributes().set_uid(name).set_data_type(s.type).set_dim({s.batch, s.heads, s.seq_len, s.head_size})
      .set_stride({s.seq_len * row, s.head_size, row, 1});
}

Tensor_attributes lse_of(const Shape& s) {
  return Tensor_attributes().set_uid(LSE).set_data_type(DataType_t::FLOAT).set_dim({s.batch, s.heads, s.seq_len, 1})
      .set_stride({s.heads * s.seq_len, s.seq_len, 1, 1});
}

void write_to(const Tensor& result, const Tensor_attributes& where) {
  result->set_output(true).set_uid(where.get_uid()).set_data_type(where.get_data_type()).set_dim(where.get_dim())
      .set_stride(where.get_stride());
}

void describe_forward(Graph& graph, const Shape& s) {
  const auto options = SDPA_attributes().set_generate_stats(true).set_causal_mask(true).set_attn_scale(s.scale());
  const auto [out, lse] = graph.sdpa(graph.tensor(heads_of(Q, s, 3)), graph.tensor(heads_of(K, s, 3)),
                                     graph.tensor(heads_of(V, s, 3)), options);
  write_to(out, heads_of(OUT, s, 1));
  write_to(lse, lse_of(s));
}

void describe_backward(Graph& graph, const Shape& s) {
  const auto options =
      SDPA_backward_attributes().set_causal_mask(true).set_attn_scale(s.scale()).set_deterministic_algorithm(true);
  const auto [dq, dk, dv] = graph.sdpa_backward(
      graph.tensor(heads_of(Q, s, 3)), graph.tensor(heads_of(K, s, 3)), graph.tensor(heads_of(V, s, 3)),
      graph.tensor(heads_of(OUT, s, 1)), graph.tensor(heads_of(DOUT, s, 1)), graph.tensor(lse_of(s)), options);
  write_to(dq, heads_of(DQ, s, 3));
  write_to(dk, heads_of(DK, s, 3));
  write_to(dv, heads_of(DV, s, 3));
}

// Builds the graph. Returns the bytes of workspace that it needs.
int64_t build(Graph& graph, const Shape& s) {
  using cudnn_frontend::HeurMode_t;
  graph.set_io_data_type(s.type).set_intermediate_data_type(DataType_t::FLOAT).set_compute_data_type(DataType_t::FLOAT);
  require(graph.build(context().handle, {HeurMode_t::A, HeurMode_t::FALLBACK}));
  int64_t bytes = 0;
  require(graph.get_workspace_size(bytes));
  return bytes;
}

// ---- running the graphs

// A workspace large enough for every plan: the lent one, or one that is allocated here if none or too little is lent.
void* workspace() {
  Context& c = context();
  const size_t needed = size_t(c.most_bytes);
  if (c.lent_bytes >= needed) return c.lent;
  if (c.own_bytes >= needed) return c.own;
  cudaFree(c.own);
  c.own_bytes = 0;
  const cudaError_t error = cudaMalloc(&c.own, needed);
  if (error != cudaSuccess)
    throw std::runtime_error("cuDNN's attention needs a workspace of " + std::to_string(needed) + " bytes: " +
                             cudaGetErrorString(error));
  c.own_bytes = needed;
  return c.own;
}

void run(const char* what, const Graph& graph, Pointers pointers, cudaStream_t stream) {
  try {
    require(cudnnSetStream(context().handle, stream));
    require(graph.execute(context().handle, pointers, workspace()));
  } catch (const std::exception& error) {
    throw std::runtime_error(library_attention_name() + ", " + what + ": " + error.what());
  }
}

template <class Float>
void* pointer(const Float* tensor) {
  return const_cast<std::remove_const_t<Float>*>(tensor);
}

}  // namespace

std::string library_attention_name() {
  const size_t version = cudnnGetVersion();
  return "cuDNN " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class Float>
std::string plan_library_attention(int batch, int seq_len, int heads, int head_size) {
  Context& c = context();
  const Shape shape = shape_of<Float>(batch, seq_len, heads, head_size);
  if (c.plans.count(shape)) return "";
  try {
    if (!c.handle) require(cudnnCreate(&c.handle));
    Plan& plan = c.plans[shape];
    describe_forward(plan.forward, shape);
    describe_backward(plan.backward, shape);
    c.most_bytes = std::max({c.most_bytes, build(plan.forward, shape), build(plan.backward, shape)});
    return "";
  } catch (const std::exception& error) {
    c.plans.erase(shape);
    return library_attention_name() + " can't: " + error.what();
  }
}

template <class Float>
bool library_attention_is_planned(int batch, int seq_len, int heads, int head_size) {
  return context().plans.count(shape_of<Float>(batch, seq_len, heads, head_size));
}

size_t library_attention_workspace_bytes() { return context().most_bytes; }

void use_library_attention_workspace(void* workspace, size_t bytes) {
  context().lent = workspace;
  context().lent_bytes = workspace ? bytes : 0;
}

template <class Float>
void library_attention_forward(Float* out, float* lse, const Float* qkv, int batch, int seq_len, int heads,
                               int head_size, cudaStream_t stream) {
  const Shape s = shape_of<Float>(batch, seq_len, heads, head_size);
  run("attention forward", context().plans.at(s).forward,
      {{Q, pointer(qkv)}, {K, pointer(qkv + s.channels())}, {V, pointer(qkv + 2 * s.channels())}, {OUT, out}, {LSE, lse}},
      stream);
}

template <class Float>
void library_attention_backward(Float* dqkv, const Float* dout, const Float* out, const Float* qkv, const float* lse,
                                int batch, int seq_len, int heads, int head_size, cudaStream_t stream) {
  const Shape s = shape_of<Float>(batch, seq_len, heads, head_size);
  const int64_t C = s.channels();
  run("attention backward", context().plans.at(s).backward,
      {{Q, pointer(qkv)}, {K, pointer(qkv + C)}, {V, pointer(qkv + 2 * C)}, {OUT, pointer(out)}, {DOUT, pointer(dout)},
       {LSE, pointer(lse)}, {DQ, dqkv}, {DK, dqkv + C}, {DV, dqkv + 2 * C}},
      stream);
}

// The instances that kernels/attention.cuh uses.
#define GPT_ATTENTION(Float)                                                                                         \
  template std::string plan_library_attention<Float>(int, int, int, int);                                            \
  template bool library_attention_is_planned<Float>(int, int, int, int);                                             \
  template void library_attention_forward(Float*, float*, const Float*, int, int, int, int, cudaStream_t);           \
  template void library_attention_backward(Float*, const Float*, const Float*, const Float*, const float*, int, int, \
                                           int, int, cudaStream_t);
GPT_ATTENTION(__nv_bfloat16)
GPT_ATTENTION(__half)
