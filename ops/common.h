// What every operator shares: the kept rows of one forward, precision, gather and scatter.
//
// Shape suffixes, here and in every file of this folder:
//   B sequences, T positions, N = B T rows, K kept rows, M dropped rows, D hidden width, F MLP width,
//   V vocabulary, H query heads, G key/value heads, R = H / G, d head width, r rotated width, S segments.
//
// An operator is one torch::autograd::Function. Its forward is the dense one. Its backward asks the
// KeptRows it was given, at backward time, which rows stay, and runs dense GEMMs over those K rows. It takes
// the gradient of its output, and gives that of its input, at K rows where graph.cpp found that both sides
// agree, and at N rows (gathered, scattered) elsewhere. Without a mask K = N and nothing is gathered.
#pragma once

// Not torch/extension.h: it would add half a minute to the compilation of each file.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace collider {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Nodes are held by std::shared_ptr before torch 2.13, by c10::intrusive_ptr since.
template <class T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& p) {
  return p;
}
template <class T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& p) {
  return c10::weak_intrusive_ptr<T>(p);
}
using WeakNode = decltype(weak(torch::autograd::Edge().function));

// The gradient of one hidden state in the last backward: the node that took it, and why it was full size.
struct FlowEdge {
  std::string node, why_dense;
};

// A hidden state's recorded shape, before it was narrowed to (K, D).
struct NarrowedShape {
  WeakNode node;
  uint32_t input_nr;
  c10::SymInt batch, length;
};

// What an operator computes with. The device decides; a test may decide instead, so that a CPU runs all three.
enum class Path {
  kLoops, // loops over rows (vec_rows.h) and ATen's CPU kernels
  kAten,  // ATen calls that every device has
  kFused, // CUDA's fused kernels in ATen, and ours in Triton where it is installed
};

// The keys that each query of an attention sees: [first, last) of a list of keys. Neither falls from one query to
// the next.
struct Sight {
  std::vector<int64_t> first, last;
  Tensor first_Q, last_Q; // the same on the device, int64
  Tensor starts_S1;       // first query of each segment, then their number, on the device, int32
  int64_t longest = 0;    // queries of the longest segment
};

// Queries and keys of a sight: all rows and all rows, kept rows and kept rows, kept rows and dropped rows.
enum class Keys { kAll, kKept, kDropped };

// The rows of one forward that stay in its backward. Rows are numbered over the flattened (B, T) batch.
// A segment is a run of rows inside which attention is causal: a sequence, or a part of a padded one.
struct KeptRows : torch::CustomClassHolder {
  // starts_S1: first row of each segment, then N.
  explicit KeptRows(std::vector<int64_t> starts_S1);

  // keep_N: bool, any device. The only host synchronisation of a filtered step is here.
  void set(const Tensor& keep_N, const at::Device& device);

  bool filtered() const { return filtered_; }
  int64_t n_rows() const { return starts.back(); }
  int64_t n_kept() const { return filtered_ ? kept_starts.back() : n_rows(); }
  int64_t n_segments() const { return static_cast<int64_t>(starts.size()) - 1; }

  // (N, ...) -> (K, ...)
  Tensor gather(const Tensor& x_N) const { return filtered_ ? x_N.index_select(0, rows_K) : x_N; }
  // Numbers of the kept rows, for a kernel that gathers by itself; none where it need not
  std::optional<Tensor> kept_or_all() const { return filtered_ ? std::make_optional(rows_K) : std::nullopt; }
  // (K, D) -> a tensor of the given sizes, zero in dropped rows
  Tensor scatter(const Tensor& x_KD, at::IntArrayRef sizes) const;

  Path path(const Tensor& x) const {
    const auto own = x.is_cpu() ? Path::kLoops : x.is_cuda() ? Path::kFused : Path::kAten;
    return forced_path.value_or(own);
  }
  // Made on first use.
  const Sight& sight(Keys keys, const at::Device& device) const;

  std::optional<Path> forced_path;     // for tests

  std::vector<FlowEdge> flow;          // hidden states of the last backward, compact or not
  std::vector<NarrowedShape> narrowed; // those whose recorded shape is (K, D) now
  std::vector<WeakNode> giving;        // operators that give (K, D) gradients now

  std::vector<int64_t> starts;         // S + 1: segment s holds rows starts[s] .. starts[s + 1]
  std::vector<int64_t> kept_starts;    // S + 1: the same, counted in kept rows
  std::vector<int64_t> dropped_starts; // S + 1: counted in dropped rows
  Tensor rows_K, dropped_M;            // int64 row numbers, on the model's device
  std::vector<int64_t> rows_host;

 private:
  bool filtered_ = false;
  mutable std::array<std::optional<Sight>, 3> sights_;
};

using KeptRowsPtr = c10::intrusive_ptr<KeptRows>;

inline void save_rows(AutogradContext* ctx, const KeptRowsPtr& rows) {
  ctx->saved_data["rows"] = at::IValue::make_capsule(rows);
  ctx->saved_data["takes_compact"] = false; // set by graph.cpp as a backward starts
  ctx->saved_data["gives_compact"] = false;
}

inline KeptRowsPtr saved_rows(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<KeptRows>(ctx->saved_data["rows"].toCapsule());
}

// The dtype that a GEMM on x computes in: autocast's where it is on and applies, else x's own.
inline at::ScalarType compute_dtype(const Tensor& x) {
  const auto device = x.device().type();
  const bool casts = at::autocast::is_autocast_enabled(device) && x.scalar_type() != at::kDouble;
  const auto dtype = casts ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
  TORCH_CHECK_VALUE(dtype != at::kHalf, "lightning-collider does not support float16: use bfloat16");
  return dtype;
}

// Sums and exponentials run in float32, or float64 where the data is.
inline at::ScalarType accumulate_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// Switches autograd and autocast off inside an operator: it casts by itself, in forward and in backward.
struct OperatorGuard {
  explicit OperatorGuard(const Tensor& x)
      : no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(x.device().type())) {}
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast;
};

// (..., D) -> (N, D); copies only what is not contiguous over its rows.
inline Tensor as_rows(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// Kept rows of the gradient that arrives, in the dtype the GEMMs compute in.
inline Tensor kept_grad(AutogradContext* ctx, const Tensor& grad, const KeptRows& rows, at::ScalarType dtype) {
  const bool compact = ctx->saved_data["takes_compact"].toBool();
  return (compact ? grad : rows.gather(as_rows(grad))).to(dtype);
}

// The gradient that leaves: as it is, or as a tensor of the input's sizes.
inline Tensor input_grad(AutogradContext* ctx, const Tensor& grad_KD, const KeptRows& rows,
                         at::IntArrayRef sizes) {
  const bool compact = ctx->saved_data["gives_compact"].toBool();
  return compact ? grad_KD : rows.scatter(grad_KD, sizes);
}

// A parameter that a module lacks is an empty tensor: a Function's inputs must be defined tensors.
inline Tensor or_empty(const std::optional<Tensor>& p, const Tensor& like) {
  return p.has_value() ? *p : at::empty({0}, like.options().requires_grad(false));
}

using OptionalTensor = std::optional<Tensor>;

// One function an operator; each file documents its own. weights and biases: one for each projection.
Tensor boundary(const Tensor& x_BTD, const KeptRowsPtr& rows);
Tensor embedding(const Tensor& ids_BT, const Tensor& w_VD, int64_t padding_idx, const KeptRowsPtr& rows);
Tensor rms_norm(const Tensor& x_BTD, const Tensor& w_D, double eps, const KeptRowsPtr& rows);
Tensor layer_norm(const Tensor& x_BTD, const Tensor& w_D, const Tensor& b_D, double eps,
                  const KeptRowsPtr& rows);
Tensor linear(const Tensor& x_BTD, const Tensor& w_ED, const OptionalTensor& b_E, const KeptRowsPtr& rows);
Tensor swiglu_mlp(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                  const std::vector<OptionalTensor>& biases, const KeptRowsPtr& rows);
Tensor gelu_mlp(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                const std::vector<OptionalTensor>& biases, bool tanh, const KeptRowsPtr& rows);
Tensor attention(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                 const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& norms,
                 double norm_eps, const Tensor& cos_Tr, const Tensor& sin_Tr, int64_t head_dim, double scale,
                 const KeptRowsPtr& rows);
Tensor linear_cross_entropy(const Tensor& h_BTD, const Tensor& w_VD, const OptionalTensor& b_V,
                            const Tensor& targets_BT, const KeptRowsPtr& rows);

} // namespace collider
