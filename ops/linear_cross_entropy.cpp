// Head and loss in one: loss_n = logsumexp(h_n w^T + b) - (h_n w^T + b)[target_n], 0 where the target is -100.
//
// Forward: blocks of rows; logsumexp is kept, and so are the logits where they fit kKeptLogits. Elsewhere (and in
// float64) the backward computes them again, at the cost of half as much again for the head.
// Backward, on kept rows: dz = g (softmax(z) - onehot), dh = dz w, dw = dz^T h. It goes by blocks of the
// *vocabulary*: with logsumexp known, each block's softmax stands alone, so each row of dw comes out of one GEMM
// over all kept rows (nothing is accumulated in low precision) and only dh is summed, in float32.
#include <algorithm>

#include "graph.h"
#include "products.h"
#include "vec_rows.h"

namespace collider {
namespace {

constexpr int64_t kBlockLogits = int64_t{1} << 24; // logits held at a time: 64 MiB in float32
constexpr int64_t kKeptLogits = int64_t{1} << 28;  // bytes of logits kept from the forward: 256 MiB
constexpr int64_t kNoTarget = -100;

int64_t block_size(int64_t total, int64_t other) {
  return std::clamp<int64_t>(kBlockLogits / std::max<int64_t>(other, 1), 1, std::max<int64_t>(total, 1));
}

// Logsumexp of each row of logits, and the logit of its target (of token 0 where there is none).
void reduce_logits(const Tensor& logits_nV, const Tensor& targets_n, Tensor lse_n, Tensor target_logit_n,
                   const KeptRows& rows) {
  if (!loops_apply(rows, {logits_nV})) {
    const auto wide = logits_nV.to(lse_n.scalar_type());
    lse_n.copy_(wide.logsumexp(-1));
    // -100 alone stands for no target: gather's own check refuses every other number outside the vocabulary.
    const auto index_n = targets_n.masked_fill(targets_n == kNoTarget, 0);
    target_logit_n.copy_(wide.gather(1, index_n.unsqueeze(1)).squeeze(1));
    return;
  }
  const int64_t vocabulary = logits_nV.size(1);
  const auto* targets = targets_n.const_data_ptr<int64_t>();
  COLLIDER_DISPATCH(logits_nV.scalar_type(), [&] {
    using wide_t = at::opmath_type<scalar_t>;
    using V = Vec<scalar_t>;
    const auto* logits = logits_nV.const_data_ptr<scalar_t>();
    auto *lse = lse_n.mutable_data_ptr<wide_t>(), *target_logit = target_logit_n.mutable_data_ptr<wide_t>();
    for_each_row(logits_nV.size(0), vocabulary, [&](int64_t n) {
      const auto* z = logits + n * vocabulary;
      const wide_t top = vec::reduce_all<scalar_t>(
          [](const V& a, const V& b) { return vec::maximum(a, b); }, z, vocabulary);
      const V shift(top);
      const wide_t sum = vec::map_reduce_all<scalar_t>(
          [&](const V& v) { return (v - shift).exp_u20(); },
          [](const V& a, const V& b) { return a + b; }, z, vocabulary);
      lse[n] = top + std::log(sum);
      target_logit[n] = static_cast<wide_t>(z[std::max<int64_t>(targets[n], 0)]);
    });
  });
}

// dz_n = g_n (exp(z_n - lse_n) - onehot_n) for columns [first, first + V') of the vocabulary, at kept rows.
// logits: K rows, or all N of which the kept ones are read. Everything else: kept rows.
Tensor softmax_grad(const Tensor& logits_nV, const Tensor& targets_K, const Tensor& lse_K, const Tensor& grad_K,
                    int64_t first, int64_t n_columns, const KeptRows& rows) {
  const int64_t n_kept = targets_K.size(0), stride = logits_nV.size(1);
  const bool compact = logits_nV.size(0) == n_kept;
  const int64_t offset = stride == n_columns ? 0 : first; // a block of its own, or columns of all logits
  if (!loops_apply(rows, {logits_nV})) {
    auto z = logits_nV.narrow(1, offset, n_columns);
    auto dz = (compact ? z : rows.gather(z)).to(lse_K.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    dz.sub_(lse_K.unsqueeze(1)).exp_();
    const auto here_K = targets_K.ge(first).logical_and_(targets_K.lt(first + n_columns));
    const auto column_K = (targets_K - first).clamp_(0, n_columns - 1);
    dz.scatter_add_(1, column_K.unsqueeze(1), here_K.to(dz.scalar_type()).neg_().unsqueeze(1));
    return dz.mul_(grad_K.unsqueeze(1)).to(logits_nV.scalar_type());
  }
  auto dz_Kn = at::empty({n_kept, n_columns}, logits_nV.options());
  const auto* targets = targets_K.const_data_ptr<int64_t>();
  const RowIndex row(rows);
  COLLIDER_DISPATCH(logits_nV.scalar_type(), [&] {
    using wide_t = at::opmath_type<scalar_t>;
    using V = Vec<scalar_t>;
    const auto* logits = logits_nV.const_data_ptr<scalar_t>() + offset;
    const auto *lse = lse_K.const_data_ptr<wide_t>(), *grad = grad_K.const_data_ptr<wide_t>();
    auto* dz = dz_Kn.mutable_data_ptr<scalar_t>();
    for_each_row(n_kept, n_columns, [&](int64_t k) {
      const auto* z = logits + (compact ? k : row(k)) * stride;
      auto* dz_k = dz + k * n_columns;
      const V shift(lse[k]), scale(grad[k]);
      vec::map<scalar_t>([&](const V& v) { return (v - shift).exp_u20() * scale; }, dz_k, z, n_columns);
      const int64_t column = targets[k] - first;
      if (column >= 0 && column < n_columns) { // in full precision: near 1 for a token that is known well
        const wide_t p = std::exp(static_cast<wide_t>(z[column]) - lse[k]);
        dz_k[column] = static_cast<scalar_t>((p - 1) * grad[k]);
      }
    });
  });
  return dz_Kn;
}

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& h_BTD, const Tensor& w_VD, const Tensor& b_V,
                        const Tensor& targets_BT, at::ScalarType compute, const KeptRowsPtr& rows) {
    OperatorGuard guard(h_BTD);
    ctx->set_materialize_grads(false);
    const auto h_ND = as_rows(h_BTD).to(compute);
    const auto targets_N = targets_BT.reshape({-1}).contiguous();
    const auto w = operand(w_VD, compute), b = operand(b_V, compute);
    const int64_t n_rows = h_ND.size(0), vocabulary = w_VD.size(0);
    const auto wide = h_ND.options().dtype(accumulate_dtype(compute));
    auto lse_N = at::empty({n_rows}, wide), target_logit_N = at::empty({n_rows}, wide);
    const int64_t block = block_size(n_rows, vocabulary);
    const auto bytes = n_rows * vocabulary * static_cast<int64_t>(h_ND.element_size());
    const bool keep = compute != at::kDouble && bytes <= kKeptLogits;
    auto logits_NV = at::empty({keep ? n_rows : 0, vocabulary}, h_ND.options());
    for (int64_t i = 0; i < n_rows; i += block) {
      const int64_t n = std::min(block, n_rows - i);
      auto logits = keep ? logits_NV.narrow(0, i, n) : at::empty({n, vocabulary}, h_ND.options());
      affine_out(logits, h_ND.narrow(0, i, n), w, b);
      reduce_logits(logits, targets_N.narrow(0, i, n), lse_N.narrow(0, i, n), target_logit_N.narrow(0, i, n),
                    *rows);
    }
    ctx->save_for_backward({h_ND, w_VD, b_V, targets_N, lse_N, logits_NV});
    ctx->saved_data["sizes"] = h_BTD.sizes();
    ctx->saved_data["dtype"] = h_BTD.scalar_type();
    save_rows(ctx, rows);
    return (lse_N - target_logit_N).masked_fill_(targets_N == kNoTarget, 0).view(targets_BT.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(6);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &w_VD = saved[1], &b_V = saved[2], &logits_NV = saved[5];
    const auto h_KD = rows->gather(saved[0]);
    const auto targets_K = rows->gather(saved[3]), lse_K = rows->gather(saved[4]);
    const auto compute = h_KD.scalar_type(), wide = lse_K.scalar_type();
    const auto grad_K = rows->gather(grads[0].reshape({-1})).to(wide).masked_fill(targets_K == kNoTarget, 0);
    const auto w = operand(w_VD, compute), b = operand(b_V, compute);

    const bool needs_h = ctx->needs_input_grad(0), needs_w = ctx->needs_input_grad(1),
               needs_b = ctx->needs_input_grad(2);
    auto grad_h_KD = needs_h ? at::zeros(h_KD.sizes(), h_KD.options().dtype(wide)) : Tensor();
    auto grad_w_VD = needs_w ? empty_grad(w.sizes(), w.options()) : Tensor();
    auto grad_b_V = needs_b ? at::empty_like(b_V) : Tensor();
    const bool kept_logits = logits_NV.size(0) > 0;
    const int64_t vocabulary = w_VD.size(0), block = block_size(vocabulary, h_KD.size(0));
    for (int64_t v = 0; v < vocabulary; v += block) {
      const int64_t n = std::min(block, vocabulary - v);
      const auto w_nD = w.narrow(0, v, n);
      const auto logits =
          kept_logits ? logits_NV : affine(h_KD, w_nD, b.numel() > 0 ? b.narrow(0, v, n) : b);
      const auto dz = softmax_grad(logits, targets_K, lse_K, grad_K, v, n, *rows);
      if (needs_b) {
        grad_b_V.narrow(0, v, n).copy_(dz.sum(0, false, wide));
      }
      if (needs_w) {
        auto grad_w_nD = grad_w_VD.narrow(0, v, n);
        at::mm_out(grad_w_nD, dz.t(), h_KD);
      }
      if (needs_h) {
        grad_h_KD.add_(rows_times(dz, w_nD));
      }
    }
    if (needs_h) {
      out[0] = input_grad(ctx, grad_h_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                          ctx->saved_data["sizes"].toIntVector());
    }
    out[1] = needs_w ? grad_in(w_VD.scalar_type(), grad_w_VD) : Tensor();
    out[2] = grad_b_V;
    return out;
  }
};

const Registered<LinearCrossEntropy> registered_linear_cross_entropy;

} // namespace

Tensor linear_cross_entropy(const Tensor& h_BTD, const Tensor& w_VD, const OptionalTensor& b_V,
                            const Tensor& targets_BT, const KeptRowsPtr& rows) {
  return LinearCrossEntropy::apply(h_BTD, w_VD, or_empty(b_V, w_VD), targets_BT,
                                   compute_dtype(h_BTD), rows);
}

} // namespace collider
