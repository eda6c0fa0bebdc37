// Causal attention inside segments, and its filtered backward.
//
// With P = exp(S - lse), S = scale q k^T, Delta = rowsum(dO * O), and hats for kept rows:
//   dV^ = P^^T dO^,   dS = P * (dO V^T - Delta),   dK^ = scale dS^^T Q^   over kept columns only,
//   dQ^ = scale (dS^ K^ + dS~ K~)                                       over kept and dropped columns.
// Two parts give it exactly:
//   1. kept x kept: the stock flash backward on gathered rows. Gathering keeps the order, so the causal mask
//      of the compact rows is right; out and lse come from the full forward, so P and Delta are the full rows'.
//   2. kept x dropped: dQ only, in blocks of kept queries, each against the dropped keys that can be visible.
// Grouped heads are never expanded: a group's R query heads are R heads (flash) or R times the rows (part 2)
// beside one key head of stride 0.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <algorithm>

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

void check_device(const Tensor& q) {
  TORCH_CHECK(q.is_cpu(), "lightning-collider's attention runs on the CPU in this version, got ", q.device(),
              ": use engine='oracle' there");
}

// Part 2: adds the dropped keys' share to dQ of one segment.
// q, grad: (G, R, k, d) of the segment's kept rows; lse, delta: (G, R, k, 1); keys: (G, m, d) of dropped rows;
// rows, dropped: the row numbers of both, ascending.
void add_dropped_keys(Tensor& grad_q_GRkd, const Tensor& q_GRkd, const Tensor& grad_GRkd,
                      const Tensor& lse_GRk1, const Tensor& delta_GRk1, const Tensor& k_Gmd,
                      const Tensor& v_Gmd, at::ArrayRef<int64_t> rows, at::ArrayRef<int64_t> dropped,
                      double scale) {
  const int64_t groups = q_GRkd.size(0), repeats = q_GRkd.size(1), n_queries = q_GRkd.size(2),
                d = q_GRkd.size(3);
  // Small blocks waste less on keys that only the block's last queries see; this many rows keep GEMMs busy.
  const int64_t block = std::max<int64_t>(64, 512 / repeats);
  const auto wide = lse_GRk1.scalar_type();
  for (int64_t i = 0; i < n_queries; i += block) {
    const int64_t end = std::min(n_queries, i + block), b = end - i;
    const auto seen_by = [&](int64_t row) {
      return std::lower_bound(dropped.begin(), dropped.end(), row) - dropped.begin();
    };
    const int64_t seen_by_all = seen_by(rows[i]), seen = seen_by(rows[end - 1]);
    if (seen == 0) {
      continue;
    }
    const auto k_Gsd = k_Gmd.narrow(1, 0, seen), v_Gsd = v_Gmd.narrow(1, 0, seen);
    const auto fold = [&](const Tensor& x) {
      return x.narrow(2, i, b).reshape({groups, repeats * b, d});
    };
    const auto unfold = [&](const Tensor& x) { return x.view({groups, repeats, b, x.size(-1)}); };

    auto p = unfold(at::bmm(fold(q_GRkd), k_Gsd.transpose(1, 2)).to(wide).mul_(scale));
    p.sub_(lse_GRk1.narrow(2, i, b)).exp_();
    if (seen > seen_by_all) { // the block's diagonal: keys between its first and its last query
      const auto edge = dropped.slice(seen_by_all, seen - seen_by_all);
      const auto options = at::TensorOptions().dtype(at::kLong).device(p.device());
      const auto hidden = at::tensor(edge, at::kLong).to(options).unsqueeze(0).gt(
          at::tensor(rows.slice(i, b), at::kLong).to(options).unsqueeze(1));
      p.narrow(3, seen_by_all, seen - seen_by_all).masked_fill_(hidden, 0);
    }
    auto ds = unfold(at::bmm(fold(grad_GRkd), v_Gsd.transpose(1, 2)).to(wide));
    ds.sub_(delta_GRk1.narrow(2, i, b)).mul_(p).mul_(scale);
    const auto ds_low = ds.view({groups, repeats * b, seen}).to(k_Gsd.scalar_type());
    grad_q_GRkd.narrow(2, i, b).add_(unfold(at::bmm(ds_low, k_Gsd)));
  }
}

} // namespace

CausalOutput causal_attention(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                              const KeptRows& rows) {
  check_device(q_NHd);
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
  const int64_t groups = k_NGd.size(1), repeats = q_NHd.size(1) / groups;
  const auto q_KHd = rows.gather(q_NHd), k_KGd = rows.gather(k_NGd), v_KGd = rows.gather(v_NGd);
  const auto out_KHd = rows.gather(forward.out_NHd), lse_KH = rows.gather(forward.lse_NH);
  const auto wide = lse_KH.scalar_type();
  const bool any_dropped = rows.filtered();
  const auto k_MGd = any_dropped ? k_NGd.index_select(0, rows.dropped_M) : Tensor();
  const auto v_MGd = any_dropped ? v_NGd.index_select(0, rows.dropped_M) : Tensor();
  const auto delta_KH =
      any_dropped ? (grad_out_KHd.to(wide) * out_KHd.to(wide)).sum(-1) : Tensor();
  const auto& kept_starts = any_dropped ? rows.kept_starts : rows.starts;

  CausalGrads grads{at::empty_like(q_KHd), at::empty_like(k_KGd), at::empty_like(v_KGd)};
  for (int64_t s = 0; s < rows.n_segments(); ++s) {
    const int64_t begin = kept_starts[s], n = kept_starts[s + 1] - begin;
    if (n == 0) {
      continue; // the flash kernel cannot take an empty sequence
    }
    const auto q_GRnd = by_group(q_KHd, begin, n, groups);
    const auto grad_GRnd = by_group(grad_out_KHd, begin, n, groups);
    const auto lse_GRn = by_group(lse_KH.unsqueeze(-1), begin, n, groups).squeeze(-1);
    auto [grad_q_GRnd, grad_k_GRnd, grad_v_GRnd] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad_GRnd, q_GRnd, shared_by_group(k_KGd, begin, n, repeats),
        shared_by_group(v_KGd, begin, n, repeats), by_group(out_KHd, begin, n, groups), lse_GRn,
        /*dropout_p=*/0.0, /*is_causal=*/true, /*attn_mask=*/std::nullopt, scale);
    const int64_t m = any_dropped ? rows.dropped_starts[s + 1] - rows.dropped_starts[s] : 0;
    if (m > 0) {
      const int64_t first = rows.dropped_starts[s];
      add_dropped_keys(grad_q_GRnd, q_GRnd, grad_GRnd, lse_GRn.unsqueeze(-1),
                       by_group(delta_KH.unsqueeze(-1), begin, n, groups),
                       k_MGd.narrow(0, first, m).transpose(0, 1), v_MGd.narrow(0, first, m).transpose(0, 1),
                       at::ArrayRef<int64_t>(rows.rows_host).slice(begin, n),
                       at::ArrayRef<int64_t>(rows.dropped_host).slice(first, m), scale);
    }
    by_group(grads.q_KHd, begin, n, groups).copy_(grad_q_GRnd);
    // The R query heads of a group share one key head: its gradient is the sum of theirs.
    const auto sum_into = [&](Tensor& grad_KGd, const Tensor& grad_GRnd) {
      grad_KGd.narrow(0, begin, n).copy_(grad_GRnd.sum(1, false, wide).transpose(0, 1));
    };
    sum_into(grads.k_KGd, grad_k_GRnd);
    sum_into(grads.v_KGd, grad_v_GRnd);
  }
  return grads;
}

} // namespace collider
