// Causal attention and its filtered backward (the definition is in causal.cpp) in chunks of queries, each against the
// run of keys that any of them sees. In ATen calls that every device has, computed in float32 or wider; on the CPU with
// loops between the products, which are in the dtype of the data. Scores are float32 or wider there too: rounded to
// bfloat16 they would put an error of |s| / 256 on P.
#include <algorithm>
#include <limits>

#include "causal.h"
#include "vec_rows.h"

namespace collider {
namespace {

constexpr int64_t kChunkScores = int64_t{1} << 24; // scores held at a time, of all heads: 64 MiB in float32
constexpr int64_t kChunkQueries = 256;
// On the CPU a chunk's scores stay in the cache between products.
constexpr int64_t kLoopQueries = 64, kLoopRows = 512; // R queries stand beside one key: a few queries fill a product

// Queries [begin, begin + n) and keys [first, first + n_keys).
struct Chunk {
  int64_t begin, n, first, n_keys;
};

template <typename F>
void for_each_chunk(const Sight& sight, int64_t heads, int64_t most, const F& f) {
  const auto n_queries = static_cast<int64_t>(sight.first.size());
  for (int64_t begin = 0, end = 0; begin < n_queries; begin = end) {
    const int64_t first = sight.first[begin];
    const auto fits = [&](int64_t query) { // where many short segments meet long ones, a run of keys grows fast
      const int64_t n = query + 1 - begin;
      return n <= most && heads * n * (sight.last[query] - first) <= kChunkScores;
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

int64_t most_queries(bool loops, int64_t repeats) {
  return loops ? std::max<int64_t>(kLoopQueries, kLoopRows / repeats) : kChunkQueries;
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

  // Scales scores (G, R n, keys) in place, and makes them -inf where a query does not see a key.
  void scale_and_hide(const Tensor& scores, const Chunk& chunk, const Sight& sight, double scale) const {
    scores.mul_(scale);
    const auto bound = [&](const Tensor& t) { return t.narrow(0, chunk.begin, chunk.n).unsqueeze(1); };
    const auto key = at::arange(chunk.first, chunk.first + chunk.n_keys, sight.first_Q.options());
    const auto hidden_nk = (key < bound(sight.first_Q)).logical_or_(key >= bound(sight.last_Q));
    scores.view({-1, chunk.n, chunk.n_keys}).masked_fill_(hidden_nk, -std::numeric_limits<double>::infinity());
  }

  int64_t groups, repeats;
};

// Key heads (m, G, d) as (G, m, d), in the dtype of a product.
Tensor keys_by_group(const Tensor& x_mGd, at::ScalarType dtype) { return x_mGd.to(dtype).transpose(0, 1); }

// A row of a chunk's scores (G, R, n, keys): whose it is, and which of the chunk's keys it sees, [first, last).
struct ScoreRow {
  int64_t query, head, first, last;
};

ScoreRow score_row(int64_t row, const Chunk& chunk, const Sight& sight) {
  const int64_t query = chunk.begin + row % chunk.n;
  return {query, row / chunk.n, sight.first[query] - chunk.first, sight.last[query] - chunk.first};
}

// P = softmax(scale s) of a chunk, zero where a query does not see a key, in the given dtype (overwriting s if it
// has that one); writes the logsumexp of its queries.
Tensor softmax_loops(const Tensor& s_GRk, at::ScalarType dtype, double scale, const Chunk& chunk, const Sight& sight,
                     Tensor& lse_NH) {
  const int64_t heads = lse_NH.size(1), n_keys = chunk.n_keys;
  TORCH_INTERNAL_ASSERT(s_GRk.is_contiguous() && lse_NH.is_contiguous());
  auto p_GRk = s_GRk.scalar_type() == dtype ? s_GRk : at::empty(s_GRk.sizes(), s_GRk.options().dtype(dtype));
  COLLIDER_DISPATCH(dtype, [&] {
    using wide_t = at::opmath_type<scalar_t>;
    using V = Vec<scalar_t>;
    const auto* scores = s_GRk.const_data_ptr<wide_t>();
    auto* ps = p_GRk.mutable_data_ptr<scalar_t>();
    auto* lse = lse_NH.mutable_data_ptr<wide_t>();
    const V factor(scale);
    for_each_row(s_GRk.size(0) * s_GRk.size(1), n_keys, [&](int64_t row) {
      const auto [query, head, first, last] = score_row(row, chunk, sight);
      const auto* s = scores + row * n_keys + first;
      auto* p = ps + row * n_keys;
      const wide_t top = vec::map_reduce_all<wide_t>(
          [&](const V& score) { return score * factor; },
          [](const V& a, const V& b) { return vec::maximum(a, b); }, s, last - first);
      const V most(top);
      const wide_t sum = vec::map_reduce_all<wide_t>(
          [&](const V& score) { return (score * factor - most).exp_u20(); },
          [](const V& a, const V& b) { return a + b; }, s, last - first);
      const V shift(lse[query * heads + head] = top + std::log(sum));
      vec::map([&](const V& score) { return (score * factor - shift).exp_u20(); }, p + first, s, last - first);
      std::fill(p, p + first, scalar_t(0));
      std::fill(p + last, p + n_keys, scalar_t(0));
    });
  });
  return p_GRk;
}

// P = exp(scale s - lse) and dS = scale P (dP - Delta) of a chunk, zero where a query does not see a key.
struct ScoreGrads {
  Tensor p_GRk, ds_GRk;
};

// Gradients of some keys and of their values, (G, m, d), summed over chunks.
struct KeyGrads {
  Tensor k_Gmd, v_Gmd;
};

// Kept queries with what the backward needs of them, and the gradients that are summed over chunks.
struct Backward {
  Groups groups;
  Tensor q_KHd, grad_KHd; // in the dtype of the products
  Tensor wide_q_KHd;      // in the dtype of the scores
  Tensor lse_KH, delta_KH, grad_q_KHd;
  double scale;
  bool loops;

  // Adds the share of some keys to dQ, and to their own gradients where these are wanted. k, v: (m, G, d).
  void add(const Tensor& k_mGd, const Tensor& v_mGd, const Sight& sight, const KeyGrads* key_grads) {
    const auto k_Gmd = keys_by_group(k_mGd, q_KHd.scalar_type()), v_Gmd = keys_by_group(v_mGd, q_KHd.scalar_type());
    const auto wide_k_Gmd = k_Gmd.to(wide_q_KHd.scalar_type());
    for_each_chunk(sight, q_KHd.size(1), most_queries(loops, groups.repeats), [&](const Chunk& chunk) {
      const auto keys = [&](const Tensor& x_Gmd) { return x_Gmd.narrow(1, chunk.first, chunk.n_keys); };
      const auto q = groups.fold(q_KHd, chunk), grad = groups.fold(grad_KHd, chunk);
      const auto s = at::bmm(groups.fold(wide_q_KHd, chunk), keys(wide_k_Gmd).transpose(1, 2));
      const auto dp = at::bmm(grad, keys(v_Gmd).transpose(1, 2));
      const auto [p, ds] = loops ? score_grads_loops(s, dp, chunk, sight) : score_grads_aten(s, dp, chunk, sight);
      if (key_grads != nullptr) {
        keys(key_grads->v_Gmd).add_(at::bmm(p.transpose(1, 2), grad));
        keys(key_grads->k_Gmd).add_(at::bmm(ds.transpose(1, 2), q));
      }
      grad_q_KHd.narrow(0, chunk.begin, chunk.n).add_(groups.unfold(at::bmm(ds, keys(k_Gmd)), chunk));
    });
  }

  ScoreGrads score_grads_aten(const Tensor& s, const Tensor& dp, const Chunk& chunk, const Sight& sight) const {
    const auto folded = [&](const Tensor& x_KH) { return groups.fold(x_KH.unsqueeze(-1), chunk); };
    groups.scale_and_hide(s, chunk, sight, scale);
    const auto p = s.sub_(folded(lse_KH)).exp_();
    return {p, dp.sub(folded(delta_KH)).mul_(p).mul_(scale)};
  }

  // In one pass over the rows. Overwrites dp, and s where it has the dtype of dp.
  ScoreGrads score_grads_loops(const Tensor& s, const Tensor& dp, const Chunk& chunk, const Sight& sight) const {
    const int64_t heads = lse_KH.size(1), n_keys = chunk.n_keys;
    TORCH_INTERNAL_ASSERT(s.is_contiguous() && dp.is_contiguous() && lse_KH.is_contiguous() &&
                          delta_KH.is_contiguous());
    auto p = s.scalar_type() == dp.scalar_type() ? s : at::empty_like(dp);
    COLLIDER_DISPATCH(dp.scalar_type(), [&] {
      using wide_t = at::opmath_type<scalar_t>;
      using V = Vec<scalar_t>;
      const auto* scores = s.const_data_ptr<wide_t>();
      auto *ps = p.mutable_data_ptr<scalar_t>(), *dps = dp.mutable_data_ptr<scalar_t>();
      const auto *lse = lse_KH.const_data_ptr<wide_t>(), *delta = delta_KH.const_data_ptr<wide_t>();
      for_each_row(s.size(0) * s.size(1), n_keys, [&](int64_t row) {
        const auto [query, head, first, last] = score_row(row, chunk, sight);
        auto *p_row = ps + row * n_keys, *ds_row = dps + row * n_keys;
        const V factor(scale), shift(lse[query * heads + head]), mean(delta[query * heads + head]);
        vec::map([&](const V& score) { return (score * factor - shift).exp_u20(); }, p_row + first,
                 scores + row * n_keys + first, last - first);
        vec::map2<scalar_t>([&](const V& weight, const V& grad) { return weight * (grad - mean) * factor; },
                            ds_row + first, p_row + first, ds_row + first, last - first);
        for (auto* x_row : {p_row, ds_row}) {
          std::fill(x_row, x_row + first, scalar_t(0));
          std::fill(x_row + last, x_row + n_keys, scalar_t(0));
        }
      });
    });
    return {p, dp};
  }
};

} // namespace

CausalOutput causal_chunks(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                         const KeptRows& rows) {
  const auto dtype = q_NHd.scalar_type(), wide = accumulate_dtype(dtype);
  const bool loops = rows.path(q_NHd) == Path::kLoops;
  const Groups groups(q_NHd, k_NGd);
  const auto& sight = rows.sight(Keys::kAll, q_NHd.device());
  const auto k_GNd = keys_by_group(k_NGd, wide), v_GNd = keys_by_group(v_NGd, loops ? dtype : wide);
  auto out_NHd = at::empty_like(q_NHd);
  auto lse_NH = at::empty({q_NHd.size(0), q_NHd.size(1)}, q_NHd.options().dtype(wide));
  for_each_chunk(sight, q_NHd.size(1), most_queries(loops, groups.repeats), [&](const Chunk& chunk) {
    const auto keys = [&](const Tensor& x_GNd) { return x_GNd.narrow(1, chunk.first, chunk.n_keys); };
    const auto s = at::bmm(groups.fold(q_NHd, chunk).to(wide), keys(k_GNd).transpose(1, 2));
    Tensor p;
    if (loops) {
      p = softmax_loops(s, dtype, scale, chunk, sight, lse_NH);
    } else {
      groups.scale_and_hide(s, chunk, sight, scale);
      const auto lse = s.logsumexp(-1, /*keepdim=*/true);
      lse_NH.narrow(0, chunk.begin, chunk.n).copy_(groups.unfold(lse, chunk).squeeze(-1));
      p = (s - lse).exp_();
    }
    out_NHd.narrow(0, chunk.begin, chunk.n).copy_(groups.unfold(at::bmm(p, keys(v_GNd)), chunk));
  });
  return {out_NHd, lse_NH};
}

CausalGrads causal_chunks_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                   const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                   const KeptRows& rows) {
  const auto dtype = q_NHd.scalar_type(), wide = forward.lse_NH.scalar_type();
  const bool loops = rows.path(q_NHd) == Path::kLoops;
  const auto products = loops ? dtype : wide;
  const auto device = q_NHd.device();
  const auto q_KHd = rows.gather(q_NHd), wide_q_KHd = q_KHd.to(wide);
  const auto k_KGd = rows.gather(k_NGd), v_KGd = rows.gather(v_NGd);
  const auto delta_KH = (grad_out_KHd.to(wide) * rows.gather(forward.out_NHd).to(wide)).sum(-1);
  Backward backward{Groups(q_NHd, k_NGd), q_KHd.to(products), grad_out_KHd.to(products), wide_q_KHd,
                    rows.gather(forward.lse_NH), delta_KH, at::zeros_like(wide_q_KHd), scale, loops};

  const auto no_grads = [&] {
    return at::zeros({k_KGd.size(1), k_KGd.size(0), k_KGd.size(2)}, wide_q_KHd.options());
  };
  const KeyGrads kept{no_grads(), no_grads()};
  backward.add(k_KGd, v_KGd, rows.sight(rows.filtered() ? Keys::kKept : Keys::kAll, device), &kept);
  if (rows.filtered()) {
    backward.add(k_NGd.index_select(0, rows.dropped_M), v_NGd.index_select(0, rows.dropped_M),
                 rows.sight(Keys::kDropped, device), /*key_grads=*/nullptr);
  }
  const auto rows_first = [&](const Tensor& x_GKd) { return x_GKd.transpose(0, 1).to(dtype).contiguous(); };
  return {backward.grad_q_KHd.to(dtype), rows_first(kept.k_Gmd), rows_first(kept.v_Gmd)};
}

} // namespace collider
