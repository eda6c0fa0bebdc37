// Causal attention inside segments, and its filtered backward.
//
// With P = exp(S - lse), S = scale q k^T, Delta = rowsum(dO * O), and hats for kept rows:
//   dV^ = P^^T dO^,   dS = P * (dO V^T - Delta),   dK^ = scale dS^^T Q^   over kept columns only,
//   dQ^ = scale (dS^ K^ + dS~ K~)                                       over kept and dropped columns.
// Two parts give it exactly:
//   1. kept x kept: the stock flash backward on gathered rows. Gathering keeps the order, so the causal mask
//      of the compact rows is right; out and lse come from the full forward, so P and Delta are the full rows'.
//   2. kept x dropped: dQ only, in blocks of kept queries, each against the dropped keys that can be visible.
// This file does so on the CPU, and hands other devices on to causal_flash.cpp and causal_aten.cpp.
// Grouped heads are never expanded: a group's R query heads are R heads (flash) or R times the rows (part 2)
// beside one key head of stride 0.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <algorithm>

#include "causal.h"
#include "vec_rows.h"

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

// What part 2 needs to know of one segment: rows of dropped keys that each kept query sees come first.
struct Visible {
  at::ArrayRef<int64_t> rows, dropped; // row numbers of kept queries and of dropped keys, ascending
  int64_t keys_of(int64_t query) const {
    return std::lower_bound(dropped.begin(), dropped.end(), rows[query]) - dropped.begin();
  }
};

// scale exp(scale s - lse) (dp - delta) for the keys that a query sees, 0 for the others. s, dp: (G, R b, keys),
// queries first .. first + b; lse, delta: (G, R, n) of all the segment's queries. Overwrites s.
Tensor score_grad(Tensor s, const Tensor& dp, const Tensor& lse_GRn, const Tensor& delta_GRn, int64_t first,
                  int64_t b, const Visible& visible, double scale) {
  const int64_t repeats = lse_GRn.size(1), n = lse_GRn.size(2), keys = s.size(2);
  TORCH_INTERNAL_ASSERT(s.is_contiguous() && dp.is_contiguous() && lse_GRn.is_contiguous() &&
                        delta_GRn.is_contiguous());
  std::vector<int64_t> seen_b(b);
  for (int64_t i = 0; i < b; ++i) {
    seen_b[i] = visible.keys_of(first + i);
  }
  COLLIDER_DISPATCH(s.scalar_type(), [&] {
    using wide_t = at::opmath_type<scalar_t>;
    using V = Vec<scalar_t>;
    auto* scores = s.mutable_data_ptr<scalar_t>();
    const auto* dps = dp.const_data_ptr<scalar_t>();
    const auto *lse = lse_GRn.const_data_ptr<wide_t>(), *delta = delta_GRn.const_data_ptr<wide_t>();
    for_each_row(s.size(0) * repeats * b, keys, [&](int64_t row) {
      const int64_t seen = seen_b[row % b], query = row / b * n + first + row % b;
      auto* s_row = scores + row * keys;
      const V factor(scale), shift(lse[query]), mean(delta[query]);
      vec::map2<scalar_t>(
          [&](const V& score, const V& grad) {
            return (score * factor - shift).exp_u20() * (grad - mean) * factor;
          },
          s_row, s_row, dps + row * keys, seen);
      std::fill(s_row + seen, s_row + keys, scalar_t(0));
    });
  });
  return s;
}

// Part 2: adds the dropped keys' share to dQ of one segment.
// q, grad: (G, R, n, d) of the segment's kept rows; lse, delta: (G, R, n); keys, values: (G, m, d) of dropped rows.
void add_dropped_keys(Tensor& grad_q_GRnd, const Tensor& q_GRnd, const Tensor& grad_GRnd, const Tensor& lse_GRn,
                      const Tensor& delta_GRn, const Tensor& k_Gmd, const Tensor& v_Gmd,
                      const Visible& visible, double scale) {
  const int64_t groups = q_GRnd.size(0), repeats = q_GRnd.size(1), n_queries = q_GRnd.size(2), d = q_GRnd.size(3);
  // Small blocks waste less on keys that only the block's last queries see; this many rows keep GEMMs busy.
  const int64_t block = std::max<int64_t>(64, 512 / repeats);
  for (int64_t i = 0; i < n_queries; i += block) {
    const int64_t end = std::min(n_queries, i + block), b = end - i;
    const int64_t seen = visible.keys_of(end - 1);
    if (seen == 0) {
      continue;
    }
    const auto k_Gsd = k_Gmd.narrow(1, 0, seen), v_Gsd = v_Gmd.narrow(1, 0, seen);
    const auto fold = [&](const Tensor& x) { return x.narrow(2, i, b).reshape({groups, repeats * b, d}); };
    const auto ds = score_grad(at::bmm(fold(q_GRnd), k_Gsd.transpose(1, 2)),
                               at::bmm(fold(grad_GRnd), v_Gsd.transpose(1, 2)), lse_GRn, delta_GRn, i, b,
                               visible, scale);
    grad_q_GRnd.narrow(2, i, b).add_(at::bmm(ds, k_Gsd).view({groups, repeats, b, d}));
  }
}

} // namespace

CausalOutput causal_attention(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                              const KeptRows& rows) {
  if (rows.path(q_NHd) != Path::kLoops) {
    return flash_applies(q_NHd, rows) ? causal_flash(q_NHd, k_NGd, v_NGd, scale, rows)
                                      : causal_aten(q_NHd, k_NGd, v_NGd, scale, rows);
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
  if (rows.path(q_NHd) != Path::kLoops) {
    const auto backward = flash_applies(q_NHd, rows) ? causal_flash_backward : causal_aten_backward;
    return backward(grad_out_KHd, q_NHd, k_NGd, v_NGd, forward, scale, rows);
  }
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
      const Visible visible{at::ArrayRef<int64_t>(rows.rows_host).slice(begin, n),
                            at::ArrayRef<int64_t>(rows.dropped_host).slice(first, m)};
      add_dropped_keys(grad_q_GRnd, q_GRnd, grad_GRnd, lse_GRn.contiguous(),
                       by_group(delta_KH.unsqueeze(-1), begin, n, groups).squeeze(-1).contiguous(),
                       k_MGd.narrow(0, first, m).transpose(0, 1), v_MGd.narrow(0, first, m).transpose(0, 1),
                       visible, scale);
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
