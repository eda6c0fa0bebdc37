// Causal attention and its filtered backward (the definition is in causal.cpp) in ATen calls that every device has:
// chunks of queries, each against the run of keys that any of them sees. Computed in float32 or wider.
#include <limits>

#include "causal.h"

namespace collider {
namespace {

constexpr int64_t kChunkScores = int64_t{1} << 24; // scores held at a time, of all heads: 64 MiB in float32
constexpr int64_t kChunkQueries = 256;

// Queries [begin, begin + n) and keys [first, first + n_keys).
struct Chunk {
  int64_t begin, n, first, n_keys;
};

template <typename F>
void for_each_chunk(const Sight& sight, int64_t heads, const F& f) {
  const auto n_queries = static_cast<int64_t>(sight.first.size());
  for (int64_t begin = 0, end = 0; begin < n_queries; begin = end) {
    const int64_t first = sight.first[begin];
    const auto fits = [&](int64_t query) { // where many short segments meet long ones, a run of keys grows fast
      const int64_t n = query + 1 - begin;
      return n <= kChunkQueries && heads * n * (sight.last[query] - first) <= kChunkScores;
    };
    end = begin + 1;
    while (end < n_queries && fits(end)) {
      ++end;
    }
    if (sight.last[end - 1] > first) {
      f(Chunk{begin, end - begin, first, sight.last[end - 1] - first});
    }
  }
}

// Grouped heads: the R query heads of a group are R times the rows beside its one key head.
struct Groups {
  Groups(const Tensor& q, const Tensor& k) : groups(k.size(1)), repeats(q.size(1) / groups) {}

  // Rows of a chunk: (Q, H, d) -> (G, R n, d)
  Tensor fold(const Tensor& x_QHd, const Chunk& chunk) const {
    const auto x = x_QHd.narrow(0, chunk.begin, chunk.n).view({chunk.n, groups, repeats, -1});
    return x.permute({1, 2, 0, 3}).reshape({groups, repeats * chunk.n, -1});
  }

  // (G, R n, d) -> (n, H, d)
  Tensor unfold(const Tensor& x_GRd, const Chunk& chunk) const {
    const auto x = x_GRd.view({groups, repeats, chunk.n, -1}).permute({2, 0, 1, 3});
    return x.reshape({chunk.n, groups * repeats, -1});
  }

  // Scaled scores of folded queries, -inf where a query does not see a key: (G, R n, keys)
  Tensor scores(const Tensor& q_GRd, const Tensor& k_Gkd, const Chunk& chunk, const Sight& sight,
                double scale) const {
    const auto scores = at::bmm(q_GRd, k_Gkd.transpose(1, 2)).mul_(scale);
    const auto bound = [&](const Tensor& t) { return t.narrow(0, chunk.begin, chunk.n).unsqueeze(1); };
    const auto key = at::arange(chunk.first, chunk.first + chunk.n_keys, sight.first_Q.options());
    const auto hidden_nk = (key < bound(sight.first_Q)).logical_or_(key >= bound(sight.last_Q));
    scores.view({-1, chunk.n, chunk.n_keys}).masked_fill_(hidden_nk, -std::numeric_limits<double>::infinity());
    return scores;
  }

  int64_t groups, repeats;
};

// Key heads (m, G, d) as (G, m, d), in the dtype that everything here is computed in.
Tensor keys_by_group(const Tensor& x_mGd, at::ScalarType wide) { return x_mGd.to(wide).transpose(0, 1); }

// Kept queries with what the backward needs of them, and the gradients that are summed over chunks.
struct Backward {
  Groups groups;
  Tensor q_KHd, grad_KHd, lse_KH1, delta_KH1, grad_q_KHd;
  double scale;

  // Adds the share of some keys to dQ, and to dK and dV (G, m, d) where they are wanted. k, v: (m, G, d).
  void add(const Tensor& k_mGd, const Tensor& v_mGd, const Sight& sight, Tensor* grad_k_Gmd, Tensor* grad_v_Gmd) {
    const auto wide = q_KHd.scalar_type();
    const auto k_Gmd = keys_by_group(k_mGd, wide), v_Gmd = keys_by_group(v_mGd, wide);
    for_each_chunk(sight, q_KHd.size(1), [&](const Chunk& chunk) {
      const auto keys = [&](const Tensor& x_Gmd) { return x_Gmd.narrow(1, chunk.first, chunk.n_keys); };
      const auto q = groups.fold(q_KHd, chunk), grad = groups.fold(grad_KHd, chunk);
      const auto k = keys(k_Gmd), v = keys(v_Gmd);
      const auto p = groups.scores(q, k, chunk, sight, scale).sub_(groups.fold(lse_KH1, chunk)).exp_();
      if (grad_v_Gmd != nullptr) {
        keys(*grad_v_Gmd).add_(at::bmm(p.transpose(1, 2), grad));
      }
      const auto ds = at::bmm(grad, v.transpose(1, 2)).sub_(groups.fold(delta_KH1, chunk)).mul_(p).mul_(scale);
      if (grad_k_Gmd != nullptr) {
        keys(*grad_k_Gmd).add_(at::bmm(ds.transpose(1, 2), q));
      }
      grad_q_KHd.narrow(0, chunk.begin, chunk.n).add_(groups.unfold(at::bmm(ds, k), chunk));
    });
  }
};

} // namespace

CausalOutput causal_aten(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                         const KeptRows& rows) {
  const auto wide = accumulate_dtype(q_NHd.scalar_type());
  const Groups groups(q_NHd, k_NGd);
  const auto& sight = rows.sight(Keys::kAll, q_NHd.device());
  const auto k_GNd = keys_by_group(k_NGd, wide), v_GNd = keys_by_group(v_NGd, wide);
  auto out_NHd = at::empty_like(q_NHd);
  auto lse_NH = at::empty({q_NHd.size(0), q_NHd.size(1)}, q_NHd.options().dtype(wide));
  for_each_chunk(sight, q_NHd.size(1), [&](const Chunk& chunk) {
    const auto keys = [&](const Tensor& x_GNd) { return x_GNd.narrow(1, chunk.first, chunk.n_keys); };
    const auto s = groups.scores(groups.fold(q_NHd, chunk).to(wide), keys(k_GNd), chunk, sight, scale);
    const auto lse = s.logsumexp(-1, /*keepdim=*/true);
    const auto out = at::bmm((s - lse).exp_(), keys(v_GNd));
    out_NHd.narrow(0, chunk.begin, chunk.n).copy_(groups.unfold(out, chunk));
    lse_NH.narrow(0, chunk.begin, chunk.n).copy_(groups.unfold(lse, chunk).squeeze(-1));
  });
  return {out_NHd, lse_NH};
}

CausalGrads causal_aten_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                 const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                 const KeptRows& rows) {
  const auto dtype = q_NHd.scalar_type(), wide = forward.lse_NH.scalar_type();
  const auto device = q_NHd.device();
  const auto q_KHd = rows.gather(q_NHd).to(wide), grad_KHd = grad_out_KHd.to(wide);
  const auto k_KGd = rows.gather(k_NGd), v_KGd = rows.gather(v_NGd);
  const auto delta_KH1 = (grad_KHd * rows.gather(forward.out_NHd).to(wide)).sum(-1, /*keepdim=*/true);
  Backward backward{Groups(q_NHd, k_NGd), q_KHd, grad_KHd, rows.gather(forward.lse_NH).unsqueeze(-1),
                    delta_KH1, at::zeros_like(q_KHd), scale};

  auto grad_k_GKd = at::zeros({k_KGd.size(1), k_KGd.size(0), k_KGd.size(2)}, q_KHd.options());
  auto grad_v_GKd = at::zeros_like(grad_k_GKd);
  backward.add(k_KGd, v_KGd, rows.sight(rows.filtered() ? Keys::kKept : Keys::kAll, device), &grad_k_GKd,
               &grad_v_GKd);
  if (rows.filtered()) {
    backward.add(k_NGd.index_select(0, rows.dropped_M), v_NGd.index_select(0, rows.dropped_M),
                 rows.sight(Keys::kDropped, device), nullptr, nullptr);
  }
  const auto rows_first = [&](const Tensor& x_GKd) { return x_GKd.transpose(0, 1).to(dtype).contiguous(); };
  return {backward.grad_q_KHd.to(dtype), rows_first(grad_k_GKd), rows_first(grad_v_GKd)};
}

} // namespace collider
