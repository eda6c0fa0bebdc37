// Head and loss in one: loss_n = logsumexp(h_n w^T + b) - (h_n w^T + b)[target_n], 0 where the target is -100.
//
// Forward: blocks of rows, so that only one block of logits is ever held in float32; logsumexp is kept, and so are
// the logits where they are low precision and fit kKeptLogits. Elsewhere the backward computes them again, at the
// cost of half as much again for the head. Backward, on kept rows: dz = g (softmax(z) - onehot), dh = dz w, dw = dz^T h. It goes by blocks of the
// *vocabulary*: with logsumexp known, each block's softmax stands alone, so each row of dw comes out of one GEMM
// over all kept rows (nothing is accumulated in low precision) and only dh is summed, in float32.
#include <algorithm>

#include "graph.h"

namespace collider {
namespace {

constexpr int64_t kBlockLogits = int64_t{1} << 24; // logits held at a time: 64 MiB in float32
constexpr int64_t kKeptLogits = int64_t{1} << 28;  // bytes of low-precision logits kept from the forward: 256 MiB
constexpr int64_t kNoTarget = -100;

int64_t block_size(int64_t total, int64_t other) {
  return std::clamp<int64_t>(kBlockLogits / std::max<int64_t>(other, 1), 1, std::max<int64_t>(total, 1));
}

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& h_BTD, const Tensor& w_VD, const Tensor& b_V,
                        const Tensor& targets_BT, at::ScalarType compute, const KeptRowsPtr& rows) {
    OperatorGuard guard(h_BTD);
    ctx->set_materialize_grads(false);
    const auto h_ND = as_rows(h_BTD).to(compute);
    const auto targets_N = targets_BT.reshape({-1});
    const auto w = operand(w_VD, compute), b = operand(b_V, compute);
    const int64_t n_rows = h_ND.size(0), vocabulary = w_VD.size(0);
    const auto wide = h_ND.options().dtype(accumulate_dtype(compute));
    auto lse_N = at::empty({n_rows}, wide), target_logit_N = at::empty({n_rows}, wide);
    const int64_t block = block_size(n_rows, vocabulary);
    const bool keep = compute == at::kBFloat16 && 2 * n_rows * vocabulary <= kKeptLogits;
    auto logits_NV = at::empty({keep ? n_rows : 0, vocabulary}, h_ND.options());
    for (int64_t i = 0; i < n_rows; i += block) {
      const int64_t n = std::min(block, n_rows - i);
      auto low = keep ? logits_NV.narrow(0, i, n) : at::empty({n, vocabulary}, h_ND.options());
      affine_out(low, h_ND.narrow(0, i, n), w, b);
      const auto logits = low.to(wide.dtype());
      const auto index = targets_N.narrow(0, i, n).clamp_min(0).unsqueeze(1);
      lse_N.narrow(0, i, n).copy_(logits.logsumexp(-1));
      target_logit_N.narrow(0, i, n).copy_(logits.gather(1, index).squeeze(1));
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
    auto grad_w_VD = needs_w ? at::empty_like(w) : Tensor();
    auto grad_b_V = needs_b ? at::empty_like(b_V) : Tensor();
    const int64_t vocabulary = w_VD.size(0), block = block_size(vocabulary, h_KD.size(0));
    for (int64_t v = 0; v < vocabulary; v += block) {
      const int64_t n = std::min(block, vocabulary - v);
      const auto w_nD = w.narrow(0, v, n);
      const auto logits = logits_NV.size(0) > 0
                              ? rows->gather(logits_NV.narrow(1, v, n))
                              : affine(h_KD, w_nD, b.numel() > 0 ? b.narrow(0, v, n) : b);
      auto dz = logits.to(wide, /*non_blocking=*/false, /*copy=*/true);
      dz.sub_(lse_K.unsqueeze(1)).exp_();
      const auto here_K = targets_K.ge(v).logical_and_(targets_K.lt(v + n));
      const auto column_K = (targets_K - v).clamp_(0, n - 1);
      dz.scatter_add_(1, column_K.unsqueeze(1), here_K.to(wide).neg_().unsqueeze(1));
      dz.mul_(grad_K.unsqueeze(1));
      if (needs_b) {
        grad_b_V.narrow(0, v, n).copy_(dz.sum(0));
      }
      const auto dz_low = dz.to(compute);
      if (needs_w) {
        auto grad_w_nD = grad_w_VD.narrow(0, v, n);
        at::mm_out(grad_w_nD, dz_low.t(), h_KD);
      }
      if (needs_h) {
        grad_h_KD.add_(at::mm(dz_low, w_nD));
      }
    }
    if (needs_h) {
      out[0] = input_grad(ctx, grad_h_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                             ctx->saved_data["sizes"].toIntVector());
    }
    out[1] = needs_w ? grad_w_VD.to(w_VD.scalar_type()) : Tensor();
    out[2] = grad_b_V;
    return out;
  }
};

const Registered<LinearCrossEntropy> registered;

} // namespace

Tensor linear_cross_entropy(const Tensor& h_BTD, const Tensor& w_VD, const OptionalTensor& b_V,
                            const Tensor& targets_BT, const KeptRowsPtr& rows) {
  return LinearCrossEntropy::apply(h_BTD, w_VD, or_empty(b_V, w_VD), targets_BT,
                                   compute_dtype(h_BTD), rows);
}

} // namespace collider
