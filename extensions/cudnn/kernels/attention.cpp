// Attention by cuDNN, through the graph API of its C++ frontend: "Attention", sections "SDPA FP16/BF16 Forward" and
// "Backward" of the frontend's documentation. kernels/attention/attention.cuh has the maths and explains the functions.
//
// For cuDNN, q, k, v and out have the shape (B, NH, T, HS), where T is the number of queries or of keys, with any
// strides, in elements. Packed tensors have these strides:
//
//   q, k, v, dq, dk, dv   parts 0, 1, 2 of (B, T, 3, NH, HS)   3·T·C, HS, 3·C, 1
//   out, dout             (B, T, NH, HS)                         T·C, HS,   C, 1
//   lse, its "stats"      (B, NH, T, 1) in fp32                 NH·T,  T,   1, 1    max + ln Σ exp, natural, as ours
//
// So it reads and writes our tensors without a copy. A shape with its strides is planned once for each number of SMs that
// it may take, forward and backward together: two graphs of one operation each, for which cuDNN's heuristics choose an engine.
//
// Backward is deterministic. For that, cuDNN on Hopper stores dS, B·NH·T²·2 bytes (T rounded up to tiles), and computes
// dQ = dS·K as a separate product: 1.5 GiB of workspace for gpt2 at B=64, T=1024. With
// CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 in the environment it adds up dQ in a fixed order instead (cuDNN 9.25),
// which takes less memory and more time.
#include "kernels/attention/library_attention.h"

#define CUDNN_FRONTEND_SKIP_JSON_LIB  // leaves out serialisation, which would take half of the time to compile
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
#include <utility>

#include "kernels/device/multiprocessors.h"

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
  AttentionSizes sizes;
  AttentionStrides strides;
  DataType_t type;
  int blocks;  // SMs that it may take; 0: all
  auto operator<=>(const Shape&) const = default;
};

// The ids of the graphs' tensors; execution gives a pointer for each id.
enum Name : int64_t { Q = 1, K, V, OUT, LSE, DOUT, DQ, DK, DV };
using Pointers = std::unordered_map<int64_t, void*>;

struct AttentionPlan {
  Graph forward, backward;
  int64_t bytes = 0;  // the workspace of both
};

// State that all plans of a device share, during the whole run: cuDNN's handle belongs to a device.
struct Context {
  cudnnHandle_t handle = nullptr;
  std::map<Shape, AttentionPlan> plans;
  int64_t asked_bytes = 0;  // the largest workspace of the plans that were asked for lately
  void* own = nullptr;  // a workspace
  size_t own_bytes = 0;
};

// The context of the current device. It is never destroyed, because at exit the library may be unloaded before it.
Context& context() {
  static auto& instances = *new std::map<int, Context>;
  int device = 0;
  cudaGetDevice(&device);
  return instances[device];
}

template <class Float>
Shape shape_of(const AttentionSizes& sizes, const AttentionStrides& strides) {
  return {sizes, strides, std::is_same_v<Float, __half> ? DataType_t::HALF : DataType_t::BFLOAT16,
          SmMargin::current() > 0 ? persistent_blocks() : 0};
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

void require(cudnnStatus_t status) {
  if (status != CUDNN_STATUS_SUCCESS) throw std::runtime_error(cudnnGetErrorString(status));
}
void require(const error_t& error) {
  if (error.code != cudnn_frontend::error_code_t::OK) throw std::runtime_error(first_line(error.err_msg));
}

// ---- the graphs

// Describes a tensor (B, NH, rows, HS).
Tensor_attributes heads_of(Name name, const Shape& s, int rows, const HeadStrides& strides) {
  return Tensor_attributes().set_uid(name).set_data_type(s.type)
      .set_dim({s.sizes.batch, s.sizes.heads, rows, s.sizes.head_size})
      .set_stride({strides.sample, s.sizes.head_size, strides.row, 1});
}

Tensor_attributes queries_of(Name name, const Shape& s) { return heads_of(name, s, s.sizes.queries, s.strides.q); }
Tensor_attributes keys_of(Name name, const Shape& s) { return heads_of(name, s, s.sizes.keys, s.strides.k); }
Tensor_attributes values_of(Name name, const Shape& s) { return heads_of(name, s, s.sizes.keys, s.strides.v); }
Tensor_attributes out_of(Name name, const Shape& s) { return heads_of(name, s, s.sizes.queries, s.strides.out); }

Tensor_attributes lse_of(const Shape& s) {
  const int64_t heads = s.sizes.heads, queries = s.sizes.queries;
  return Tensor_attributes().set_uid(LSE).set_data_type(DataType_t::FLOAT).set_dim({s.sizes.batch, heads, queries, 1})
      .set_stride({heads * queries, queries, 1, 1});
}

void write_to(const Tensor& result, const Tensor_attributes& where) {
  result->set_output(true).set_uid(where.get_uid()).set_data_type(where.get_data_type()).set_dim(where.get_dim())
      .set_stride(where.get_stride());
}

// Comes before the graph's nodes, which copy these types when they are made (frontend 1.32).
void set_types(Graph& graph, const Shape& s) {
  graph.set_io_data_type(s.type).set_intermediate_data_type(DataType_t::FLOAT).set_compute_data_type(DataType_t::FLOAT);
}

void describe_forward(Graph& graph, const Shape& s) {
  set_types(graph, s);
  const auto options =
      SDPA_attributes().set_generate_stats(true).set_causal_mask(s.sizes.causal).set_attn_scale(s.sizes.scale());
  const auto [out, lse] =
      graph.sdpa(graph.tensor(queries_of(Q, s)), graph.tensor(keys_of(K, s)), graph.tensor(values_of(V, s)), options);
  write_to(out, out_of(OUT, s));
  write_to(lse, lse_of(s));
}

void describe_backward(Graph& graph, const Shape& s) {
  set_types(graph, s);
  const auto options = SDPA_backward_attributes().set_causal_mask(s.sizes.causal).set_attn_scale(s.sizes.scale())
                           .set_deterministic_algorithm(true);
  const auto [dq, dk, dv] = graph.sdpa_backward(
      graph.tensor(queries_of(Q, s)), graph.tensor(keys_of(K, s)), graph.tensor(values_of(V, s)),
      graph.tensor(out_of(OUT, s)), graph.tensor(out_of(DOUT, s)), graph.tensor(lse_of(s)), options);
  write_to(dq, queries_of(DQ, s));
  write_to(dk, keys_of(DK, s));
  write_to(dv, values_of(DV, s));
}

// Builds the graph. Returns the bytes of workspace that it needs.
int64_t build(Graph& graph, const Shape& s) {
  using cudnn_frontend::HeurMode_t;
  if (s.blocks > 0) graph.set_sm_count(s.blocks);
  require(graph.build(context().handle, {HeurMode_t::A, HeurMode_t::FALLBACK}));
  int64_t bytes = 0;
  require(graph.get_workspace_size(bytes));
  return bytes;
}

// ---- running the graphs

// A workspace that is large enough: the one that is given, or one that is allocated here if that is too small.
void* large_enough(const LibraryWorkspace& workspace, size_t needed) {
  Context& c = context();
  if (workspace.bytes >= needed) return workspace.data;
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

void run(const char* what, const AttentionPlan& plan, Graph AttentionPlan::*graph, Pointers pointers, cudaStream_t stream,
         const LibraryWorkspace& workspace) {
  try {
    require(cudnnSetStream(context().handle, stream));
    require((plan.*graph).execute(context().handle, pointers, large_enough(workspace, size_t(plan.bytes))));
  } catch (const std::exception& error) {
    throw std::runtime_error(library_attention_name() + ", " + what + ": " + error.what() + ": try --attention own");
  }
}

template <class Float>
void* pointer(const Heads<const Float>& heads) {
  return const_cast<Float*>(heads.data);
}

}  // namespace

std::string library_attention_name() {
  const size_t version = cudnnGetVersion();
  return "cuDNN " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class Float>
std::string plan_library_attention(const AttentionSizes& sizes, const AttentionStrides& strides) {
  Context& c = context();
  const Shape shape = shape_of<Float>(sizes, strides);
  const auto take_into_account = [&](const AttentionPlan& plan) {
    c.asked_bytes = std::max(c.asked_bytes, plan.bytes);
    return "";
  };
  if (const auto known = c.plans.find(shape); known != c.plans.end()) return take_into_account(known->second);
  if (sizes.causal && sizes.past != 0) return library_attention_name() + " is not asked for queries after past keys";
  Shape asked = shape;
  for (;; asked.blocks = 0) {  // not every engine can leave SMs free
    try {
      if (!c.handle) require(cudnnCreate(&c.handle));
      AttentionPlan& plan = c.plans[shape];
      describe_forward(plan.forward, asked);
      describe_backward(plan.backward, asked);
      plan.bytes = std::max(build(plan.forward, asked), build(plan.backward, asked));
      return take_into_account(plan);
    } catch (const std::exception& error) {
      c.plans.erase(shape);
      if (asked.blocks == 0) return library_attention_name() + " can't: " + error.what();
    }
  }
}

template <class Float>
bool library_attention_is_planned(const AttentionSizes& sizes, const AttentionStrides& strides) {
  return context().plans.count(shape_of<Float>(sizes, strides));
}

size_t take_library_attention_workspace_bytes() { return size_t(std::exchange(context().asked_bytes, 0)); }

template <class Float>
void library_attention_forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv,
                               const AttentionSizes& sizes, cudaStream_t stream, const LibraryWorkspace& workspace) {
  run("attention forward", context().plans.at(shape_of<Float>(sizes, strides_of(qkv, out))), &AttentionPlan::forward,
      {{Q, pointer(qkv.q)}, {K, pointer(qkv.k)}, {V, pointer(qkv.v)}, {OUT, out.data}, {LSE, lse}}, stream, workspace);
}

template <class Float>
void library_attention_backward(const QkvHeads<Float>& dqkv, const Heads<const Float>& dout,
                                const Heads<const Float>& out, const QkvHeads<const Float>& qkv, const float* lse,
                                const AttentionSizes& sizes, cudaStream_t stream, const LibraryWorkspace& workspace) {
  run("attention backward", context().plans.at(shape_of<Float>(sizes, strides_of(qkv, out))), &AttentionPlan::backward,
      {{Q, pointer(qkv.q)}, {K, pointer(qkv.k)}, {V, pointer(qkv.v)}, {OUT, pointer(out)}, {DOUT, pointer(dout)},
       {LSE, const_cast<float*>(lse)}, {DQ, dqkv.q.data}, {DK, dqkv.k.data}, {DV, dqkv.v.data}},
      stream, workspace);
}

// The instances that kernels/attention/attention.cuh uses.
#define GPT_ATTENTION(Float)                                                                                          \
  template std::string plan_library_attention<Float>(const AttentionSizes&, const AttentionStrides&);                 \
  template bool library_attention_is_planned<Float>(const AttentionSizes&, const AttentionStrides&);                  \
  template void library_attention_forward(const Heads<Float>&, float*, const QkvHeads<const Float>&,                  \
                                          const AttentionSizes&, cudaStream_t, const LibraryWorkspace&);                 \
  template void library_attention_backward(const QkvHeads<Float>&, const Heads<const Float>&,                         \
                                           const Heads<const Float>&, const QkvHeads<const Float>&, const float*,     \
                                           const AttentionSizes&, cudaStream_t, const LibraryWorkspace&);
GPT_ATTENTION(__nv_bfloat16)
GPT_ATTENTION(__half)
