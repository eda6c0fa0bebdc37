// Causal attention inside segments, and its filtered backward.
//
// With P = exp(S - lse), S = scale q k^T, Delta = rowsum(dO * O), and hats for kept rows:
//   dV^ = P^^T dO^,   dS = P * (dO V^T - Delta),   dK^ = scale dS^^T Q^   over kept columns only,
//   dQ^ = scale (dS^ K^ + dS~ K~)                                       over kept and dropped columns.
// Two parts give it exactly:
//   1. kept x kept. Gathering keeps the order, so the compact rows are causal among themselves; out and lse come from
//      the full forward, so P and Delta are the full rows'.
//   2. kept x dropped: dQ only, each kept query against the dropped keys before it.
// The CPU's forward is here; every backward, and the forward elsewhere, is in causal_flash.cpp or causal_chunks.cpp.
// Grouped heads are never expanded: a group's R query heads are R heads (flash) or R times the rows (products) beside
// one key head.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>

#include "causal.h"

namespace collider {
namespace {

// Rows [begin, begin + n) of (N, H, d), as the (G, R, n, d) that a flash call takes for G sequences of R heads.
Tensor by_group(const Tensor& x_NHd, int64_t begin, int64_t n, int64_t groups) {
  const auto x = x_NHd.narrow(0, begin, n);
  return x.view({n, groups, x.size(1) / groups, x.size(2)}).permute({1, 2, 0, 3});
}

// Key heads (N, G, d) in the same form, each seen by R query heads without a copy.
Tensor shared_by_group(const Tensor& x_NGd, int64_t begin, int64_t n, int64_t repeats) {
  const auto x_G1nd = x_NGd.narrow(0, begin, n).permute({1, 0, 2}).unsqueeze(1);
  return x_G1nd.expand({-1, repeats, -1, -1});
}

} // namespace

CausalOutput causal_attention(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                              const KeptRows& rows) {
  if (rows.path(q_NHd) != Path::kLoops) {
    const auto forward = flash_applies(q_NHd, rows) ? causal_flash : causal_chunks;
    return forward(q_NHd, k_NGd, v_NGd, scale, rows);
  }
  const int64_t groups = k_NGd.size(1), repeats = q_NHd.size(1) / groups;
  auto out_NHd = at::empty_like(q_NHd);
  auto lse_NH = at::empty({q_NHd.size(0), q_NHd.size(1)},
                          q_NHd.options().dtype(accumulate_dtype(q_NHd.scalar_type())));
  for (int64_t s = 0; s < rows.n_segments(); ++s) {
    const int64_t begin = rows.starts[s], n = rows.starts[s + 1] - begin;
    const auto [out_GRnd, lse_GRn] = at::_scaled_dot_product_flash_attention_for_cpu(
        by_group(q_NHd, begin, n, groups), shared_by_group(k_NGd, begin, n, repeats),
        shared_by_group(v_NGd, begin, n, repeats), /*dropout_p=*/0.0, /*is_causal=*/true,
        /*attn_mask=*/std::nullopt, scale);
    by_group(out_NHd, begin, n, groups).copy_(out_GRnd);
    by_group(lse_NH.unsqueeze(-1), begin, n, groups).copy_(lse_GRn.unsqueeze(-1));
  }
  return {out_NHd, lse_NH};
}

CausalGrads causal_attention_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                      const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                      const KeptRows& rows) {
  const auto backward = flash_applies(q_NHd, rows) ? causal_flash_backward : causal_chunks_backward;
  return backward(grad_out_KHd, q_NHd, k_NGd, v_NGd, forward, scale, rows);
}

} // namespace collider
