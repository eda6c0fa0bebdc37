// Causal attention and its filtered backward (the definition is in causal.cpp) with CUDA's flash attention, in its
// form for sequences of several lengths: rows of all segments in one list, (rows, heads, d), logsumexp (heads, rows).
//
// Written from ATen's headers and tested with stand-ins for its two kernels; not yet run on a GPU.
// torch.backends.cuda.enable_flash_sdp(False) turns it off.
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>

#include "causal.h"
#include "kernels.h"

namespace collider {
namespace {

// Gradients from the gradient of the output; all tensors hold the same rows, those of the sight's queries.
CausalGrads flash_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& out, const Tensor& lse_NH, double scale, const Sight& sight) {
  // Without dropout the state of the random numbers is not read.
  const auto unused = at::empty({2}, q.options().dtype(at::kUInt64));
  auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
      grad_out, q, k, v, out, lse_NH.t().contiguous(), sight.starts_S1, sight.starts_S1, sight.longest,
      sight.longest, /*dropout_p=*/0.0, /*is_causal=*/true, unused, unused, scale);
  return {grad_q, grad_k, grad_v};
}

} // namespace

bool flash_applies(const Tensor& q_NHd, const KeptRows& rows) {
  if (rows.path(q_NHd) != Path::kFused) {
    return false;
  }
  const int64_t d = q_NHd.size(2); // not every GPU has the backward of wider heads
  const bool takes_it = q_NHd.scalar_type() == at::kBFloat16 && d % 8 == 0 && d <= 192 &&
                        rows.sight(Keys::kAll, q_NHd.device()).longest > 1 &&
                        at::globalContext().userEnabledFlashSDP();
  return takes_it || rows.forced_path.has_value(); // a test brings its own kernels, for any dtype
}

CausalOutput causal_flash(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                          const KeptRows& rows) {
  const auto& sight = rows.sight(Keys::kAll, q_NHd.device());
  const auto result = at::_flash_attention_forward(
      q_NHd, k_NGd, v_NGd, sight.starts_S1, sight.starts_S1, sight.longest, sight.longest, /*dropout_p=*/0.0,
      /*is_causal=*/true, /*return_debug_mask=*/false, scale);
  const auto& lse_HN = std::get<1>(result);
  TORCH_CHECK(lse_HN.dim() == 2 && lse_HN.size(0) == q_NHd.size(1) && lse_HN.size(1) == q_NHd.size(0),
              "this torch's flash attention gives logsumexp as ", lse_HN.sizes(),
              ", not (heads, rows): turn it off with torch.backends.cuda.enable_flash_sdp(False)");
  return {std::get<0>(result), lse_HN.t()};
}

CausalGrads causal_flash_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                  const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                  const KeptRows& rows) {
  if (grad_out_KHd.size(0) == 0) { // the kernel takes no empty list
    return {rows.gather(q_NHd), rows.gather(k_NGd), rows.gather(v_NGd)};
  }
  using DroppedKeys = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, const Tensor&, const Tensor&, double);
  const auto dropped_keys = find_kernel<DroppedKeys>("lightning_collider::dropped_keys", q_NHd);
  if (rows.filtered() && dropped_keys.has_value()) { // the two parts of causal.cpp
    const auto q_KHd = rows.gather(q_NHd), out_KHd = rows.gather(forward.out_NHd);
    const auto lse_KH = rows.gather(forward.lse_NH);
    auto grads = flash_backward(grad_out_KHd, q_KHd, rows.gather(k_NGd), rows.gather(v_NGd), out_KHd, lse_KH,
                                scale, rows.sight(Keys::kKept, q_NHd.device()));
    const auto& sight = rows.sight(Keys::kDropped, q_NHd.device());
    dropped_keys->call(grads.q_KHd, q_KHd, grad_out_KHd, out_KHd, lse_KH, k_NGd, v_NGd, rows.dropped_M,
                       sight.first_Q, sight.last_Q, scale);
    return grads;
  }
  // A dropped row whose output has no gradient gives nothing to any key, and its own gradients are left behind:
  // the definition again, at the cost of a dense attention backward, which is one call.
  const int64_t width = q_NHd.size(1) * q_NHd.size(2);
  const auto grad_out_NHd = rows.scatter(grad_out_KHd.view({-1, width}), {q_NHd.size(0), width}).view_as(q_NHd);
  const auto grads = flash_backward(grad_out_NHd, q_NHd, k_NGd, v_NGd, forward.out_NHd, forward.lse_NH, scale,
                                    rows.sight(Keys::kAll, q_NHd.device()));
  return {rows.gather(grads.q_KHd), rows.gather(grads.k_KGd), rows.gather(grads.v_KGd)};
}

} // namespace collider
