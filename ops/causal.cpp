// Causal attention inside segments, and its filtered backward.
//
// With P = exp(S - lse), S = scale q k^T, Delta = rowsum(dO * O), and hats for kept rows:
//   dV^ = P^^T dO^,   dS = P * (dO V^T - Delta),   dK^ = scale dS^^T Q^   over kept columns only,
//   dQ^ = scale (dS^ K^ + dS~ K~)                                       over kept and dropped columns.
// Two parts give it exactly:
//   1. kept x kept. Gathering keeps the order, so the compact rows are causal among themselves; out and lse come from
//      the full forward, so P and Delta are the full rows'.
//   2. kept x dropped: dQ only, each kept query against the dropped keys before it.
// Both are in causal_flash.cpp where CUDA's flash attention applies, else in causal_chunks.cpp.
// Grouped heads are never expanded: a group's R query heads are R heads (flash) or R times the rows (products) beside
// one key head.
#include "causal.h"

namespace collider {

CausalOutput causal_attention(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                              const KeptRows& rows) {
  const auto forward = flash_applies(q_NHd, rows) ? causal_flash : causal_chunks;
  return forward(q_NHd, k_NGd, v_NGd, scale, rows);
}

CausalGrads causal_attention_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                      const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                      const KeptRows& rows) {
  const auto backward = flash_applies(q_NHd, rows) ? causal_flash_backward : causal_chunks_backward;
  return backward(grad_out_KHd, q_NHd, k_NGd, v_NGd, forward, scale, rows);
}

} // namespace collider
