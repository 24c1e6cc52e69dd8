// cuDNN's C++ frontend for tests on the CPU device. It insists on the order of calls of frontend 1.32: a node copies the data
// types of its graph when it is made, and a graph whose nodes have none is refused when it is built. Attention is computed in
// double, by the shapes and strides that the graph's tensors have.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"
#include "cpu/device.h"
#include "cudnn.h"

#define CUDNN_FRONTEND_VERSION 13200

// The test sets how the frontend behaves, and sees what it was asked for.
struct FakeFrontend {
  bool can_leave_sms = true;  // does an engine take fewer than all SMs?
  int built = 0, deterministic = 0;
  std::vector<int> sm_counts;  // of the graphs that were built
};
inline FakeFrontend fake_frontend;

namespace cudnn_frontend {

enum class DataType_t { NOT_SET, FLOAT, HALF, BFLOAT16 };
enum class HeurMode_t { A, FALLBACK };
enum class error_code_t { OK, ATTRIBUTE_NOT_SET, GRAPH_NOT_SUPPORTED };
struct error_t {
  error_code_t code = error_code_t::OK;
  std::string err_msg = "";
};

namespace graph {

#define SETTER(Type, name, Value, field) \
  Type& set_##name(Value value) { return field = value, *this; }

struct Tensor_attributes {
  int64_t uid = 0;
  DataType_t type = DataType_t::NOT_SET;
  std::vector<int64_t> dim = {}, stride = {};
  bool is_output = false;
  SETTER(Tensor_attributes, uid, int64_t, uid)
  SETTER(Tensor_attributes, data_type, DataType_t, type)
  SETTER(Tensor_attributes, dim, std::vector<int64_t>, dim)
  SETTER(Tensor_attributes, stride, std::vector<int64_t>, stride)
  SETTER(Tensor_attributes, output, bool, is_output)
  int64_t get_uid() const { return uid; }
  DataType_t get_data_type() const { return type; }
  std::vector<int64_t> get_dim() const { return dim; }
  std::vector<int64_t> get_stride() const { return stride; }
};
struct SDPA_attributes {
  bool generates_stats = false, is_causal = false;
  float scale = 1;
  SETTER(SDPA_attributes, generate_stats, bool, generates_stats)
  SETTER(SDPA_attributes, causal_mask, bool, is_causal)
  SETTER(SDPA_attributes, attn_scale, float, scale)
};
struct SDPA_backward_attributes {
  bool is_causal = false, is_deterministic = false;
  float scale = 1;
  SETTER(SDPA_backward_attributes, causal_mask, bool, is_causal)
  SETTER(SDPA_backward_attributes, attn_scale, float, scale)
  SETTER(SDPA_backward_attributes, deterministic_algorithm, bool, is_deterministic)
};

class Graph {
  using Tensor = std::shared_ptr<Tensor_attributes>;

 public:
  SETTER(Graph, io_data_type, DataType_t, io_)
  SETTER(Graph, intermediate_data_type, DataType_t, intermediate_)
  SETTER(Graph, compute_data_type, DataType_t, compute_)
  SETTER(Graph, sm_count, int, sm_count_)

  Tensor tensor(const Tensor_attributes& attributes) { return std::make_shared<Tensor_attributes>(attributes); }

  std::array<Tensor, 2> sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const SDPA_attributes& o) {
    make_node({q, k, v, tensor({}), tensor({})}, o.is_causal && o.generates_stats, o.scale, false);
    return {tensors_[3], tensors_[4]};
  }
  std::array<Tensor, 3> sdpa_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& dout,
                                      const Tensor& lse, const SDPA_backward_attributes& o) {
    make_node({q, k, v, out, lse, dout, tensor({}), tensor({}), tensor({})}, o.is_causal, o.scale, true);
    fake_frontend.deterministic += o.is_deterministic;
    return {tensors_[6], tensors_[7], tensors_[8]};
  }

  error_t build(cudnnHandle_t handle, const std::vector<HeurMode_t>&) {
    if (!handle) return {error_code_t::GRAPH_NOT_SUPPORTED, "there is no handle"};
    if (node_intermediate_ == DataType_t::NOT_SET) return {error_code_t::ATTRIBUTE_NOT_SET, "Intermediate tensor data type needs to be set"};
    if (node_compute_ != DataType_t::FLOAT || node_io_ == DataType_t::NOT_SET) return {error_code_t::ATTRIBUTE_NOT_SET, "data types need to be set"};
    for (const Tensor& t : tensors_)
      if (t->uid == 0 || t->dim.size() != 4 || t->stride.size() != 4 || t->type == DataType_t::NOT_SET)
        return {error_code_t::ATTRIBUTE_NOT_SET, "a tensor has no id, shape, strides or type"};
    if (sm_count_ > 0 && !fake_frontend.can_leave_sms) return {error_code_t::GRAPH_NOT_SUPPORTED, "no engine leaves SMs free"};
    fake_frontend.sm_counts.push_back(sm_count_);
    ++fake_frontend.built;
    return {};
  }
  error_t get_workspace_size(int64_t& bytes) const { return bytes = is_backward_ ? 4096 : 256, error_t(); }

  error_t execute(cudnnHandle_t handle, const std::unordered_map<int64_t, void*>& pointers, void* workspace) const {
    if (!workspace) return {error_code_t::GRAPH_NOT_SUPPORTED, "there is no workspace"};
    for (const Tensor& t : tensors_)
      if (!pointers.contains(t->uid)) return {error_code_t::GRAPH_NOT_SUPPORTED, "a tensor has no address"};
    cpu::enqueue(handle->stream, [=, self = *this] {
      std::memset(workspace, 0xff, 256);
      self.compute(pointers);
      return true;
    });
    return {};
  }

 private:
  void make_node(std::vector<Tensor> tensors, bool is_causal, float scale, bool is_backward) {
    tensors_ = std::move(tensors), is_causal_ = is_causal, scale_ = scale, is_backward_ = is_backward;
    node_io_ = io_, node_intermediate_ = intermediate_, node_compute_ = compute_;
  }

  // Element (b, h, row, column) of tensor number i, in double.
  struct Element {
    double get() const {
      if (type == DataType_t::FLOAT) return *static_cast<float*>(address);
      return type == DataType_t::HALF ? __half2float(*static_cast<__half*>(address)) : __bfloat162float(*static_cast<__nv_bfloat16*>(address));
    }
    void set(double x) const {
      if (type == DataType_t::FLOAT) *static_cast<float*>(address) = float(x);
      else if (type == DataType_t::HALF) *static_cast<__half*>(address) = __float2half_rn(float(x));
      else *static_cast<__nv_bfloat16*>(address) = __float2bfloat16_rn(float(x));
    }
    void* address;
    DataType_t type;
  };

  void compute(const std::unordered_map<int64_t, void*>& pointers) const {
    const auto at = [&](int i, int64_t b, int64_t h, int64_t row, int64_t column) {
      const Tensor_attributes& t = *tensors_[size_t(i)];
      const int64_t place = b * t.stride[0] + h * t.stride[1] + row * t.stride[2] + column * t.stride[3];
      return Element{static_cast<char*>(pointers.at(t.uid)) + place * (t.type == DataType_t::FLOAT ? 4 : 2), t.type};
    };
    const std::vector<int64_t>&q_dim = tensors_[0]->dim, &k_dim = tensors_[1]->dim;
    const int64_t queries = q_dim[2], keys = k_dim[2], H = q_dim[3];
    for (int64_t b = 0; b < q_dim[0]; ++b)
      for (int64_t h = 0; h < q_dim[1]; ++h) {
        std::vector<double> dk(size_t(keys * H)), dv(dk);
        for (int64_t t = 0; t < queries; ++t) {
          const int64_t seen = is_causal_ ? std::min(t + 1, keys) : keys;
          std::vector<double> p(static_cast<size_t>(seen));
          double sum = 0;
          for (int64_t j = 0; j < seen; ++j) {
            for (int64_t d = 0; d < H; ++d) p[size_t(j)] += scale_ * at(0, b, h, t, d).get() * at(1, b, h, j, d).get();
            sum += p[size_t(j)] = std::exp(p[size_t(j)] - (is_backward_ ? at(4, b, h, t, 0).get() : 0));
          }
          if (!is_backward_) {
            at(4, b, h, t, 0).set(std::log(sum));
            for (int64_t d = 0; d < H; ++d) {
              double out = 0;
              for (int64_t j = 0; j < seen; ++j) out += p[size_t(j)] / sum * at(2, b, h, j, d).get();
              at(3, b, h, t, d).set(out);
            }
            continue;
          }
          double dot = 0;
          for (int64_t d = 0; d < H; ++d) dot += at(5, b, h, t, d).get() * at(3, b, h, t, d).get();
          std::vector<double> dq(static_cast<size_t>(H));
          for (int64_t j = 0; j < seen; ++j) {
            double dp = 0;
            for (int64_t d = 0; d < H; ++d) dp += at(5, b, h, t, d).get() * at(2, b, h, j, d).get();
            const double ds = p[size_t(j)] * (dp - dot) * scale_;
            for (int64_t d = 0; d < H; ++d) {
              dq[size_t(d)] += ds * at(1, b, h, j, d).get();
              dk[size_t(j * H + d)] += ds * at(0, b, h, t, d).get();
              dv[size_t(j * H + d)] += p[size_t(j)] * at(5, b, h, t, d).get();
            }
          }
          for (int64_t d = 0; d < H; ++d) at(6, b, h, t, d).set(dq[size_t(d)]);
        }
        for (int64_t j = 0; is_backward_ && j < keys; ++j)
          for (int64_t d = 0; d < H; ++d) at(7, b, h, j, d).set(dk[size_t(j * H + d)]), at(8, b, h, j, d).set(dv[size_t(j * H + d)]);
      }
  }

  DataType_t io_ = DataType_t::NOT_SET, intermediate_ = DataType_t::NOT_SET, compute_ = DataType_t::NOT_SET;
  DataType_t node_io_ = DataType_t::NOT_SET, node_intermediate_ = DataType_t::NOT_SET, node_compute_ = DataType_t::NOT_SET;
  int sm_count_ = 0;
  std::vector<Tensor> tensors_;  // forward: q, k, v, out, lse; backward: dout, dq, dk, dv besides
  bool is_causal_ = false, is_backward_ = false;
  float scale_ = 1;
};
#undef SETTER

}  // namespace graph
}  // namespace cudnn_frontend
