// Attention: y = causal(rotate(n(x wq^T)), rotate(n(x wk^T)), x wv^T) wo^T, each projection with an optional
// bias, and n an optional RMS norm over each head. Queries, keys, values, output and logsumexp are kept from the
// forward; see causal.cpp for the backward's core.
#include "causal.h"
#include "graph.h"
#include "products.h"
#include "rms.h"

namespace collider {
namespace {

// The order of the tensors that Attention takes and saves.
enum Input { X, WQ, BQ, WK, BK, WV, BV, WO, BO, NQ, NK, COS, SIN, N_INPUTS };
enum Kept { Q = N_INPUTS, KEY, V, OUT, LSE, RAW_Q, RSTD_Q, RAW_K, RSTD_K };

// What a query or key projection becomes, and what the backward of its norm needs (empty without one).
struct Heads {
  Tensor x_NHd, raw_NHd, rstd_N1;
};

Heads normalise(const Tensor& raw_NHd, const Tensor& norm_d, double eps, const KeptRows& rows) {
  if (norm_d.numel() == 0) {
    return {raw_NHd, or_empty(std::nullopt, raw_NHd), or_empty(std::nullopt, raw_NHd)};
  }
  const auto out = rms_forward(as_rows(raw_NHd), norm_d.to(raw_NHd.scalar_type()), eps, rows);
  return {out.y_ND.view(raw_NHd.sizes()), raw_NHd, out.rstd_N1.view({raw_NHd.size(0), raw_NHd.size(1), 1})};
}

struct Attention : Function<Attention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& wq, const Tensor& bq,
                        const Tensor& wk, const Tensor& bk, const Tensor& wv, const Tensor& bv,
                        const Tensor& wo, const Tensor& bo, const Tensor& nq, const Tensor& nk,
                        const Tensor& cos, const Tensor& sin, double norm_eps, int64_t head_dim,
                        double scale, at::ScalarType compute, const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto x_ND = as_rows(x_BTD).to(compute);
    const int64_t n_rows = x_ND.size(0);
    const auto project = [&](const Tensor& w, const Tensor& b) {
      return affine(x_ND, operand(w, compute), operand(b, compute)).view({n_rows, -1, head_dim});
    };
    const auto q = normalise(project(wq, bq), nq, norm_eps, *rows),
               k = normalise(project(wk, bk), nk, norm_eps, *rows);
    const auto q_NHd = rotate_(q.x_NHd, cos, sin, /*inverse=*/false, *rows);
    const auto k_NGd = rotate_(k.x_NHd, cos, sin, /*inverse=*/false, *rows);
    const auto v_NGd = project(wv, bv);
    const auto core = causal_attention(q_NHd, k_NGd, v_NGd, scale, *rows);
    const auto y_ND =
        affine(core.out_NHd.view({n_rows, -1}), operand(wo, compute), operand(bo, compute));
    ctx->save_for_backward({x_ND, wq, bq, wk, bk, wv, bv, wo, bo, nq, nk, cos, sin, q_NHd, k_NGd, v_NGd,
                            core.out_NHd, core.lse_NH, q.raw_NHd, q.rstd_N1, k.raw_NHd, k.rstd_N1});
    ctx->saved_data["sizes"] = x_BTD.sizes();
    ctx->saved_data["dtype"] = x_BTD.scalar_type();
    ctx->saved_data["scale"] = scale;
    save_rows(ctx, rows);
    auto sizes = x_BTD.sizes().vec();
    sizes.back() = wo.size(0);
    return y_ND.view(sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(N_INPUTS + 5);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto compute = saved[X].scalar_type();
    const int64_t head_dim = saved[Q].size(2);
    const auto parameter_grads = [&](int w, const Tensor& grad_KE, const Tensor& input_KD) {
      out[w] = weight_grad(ctx->needs_input_grad(w), grad_KE, input_KD, saved[w].scalar_type());
      out[w + 1] = bias_grad(ctx->needs_input_grad(w + 1), grad_KE, saved[w + 1]);
    };

    const auto grad_y_KD = kept_grad(ctx, grads[0], *rows, compute);
    parameter_grads(WO, grad_y_KD, rows->gather(saved[OUT]).view({grad_y_KD.size(0), saved[WO].size(1)}));
    const auto grad_out_KHd = rows_times(grad_y_KD, operand(saved[WO], compute))
                                  .view({grad_y_KD.size(0), saved[Q].size(1), head_dim});
    auto core = causal_attention_backward(grad_out_KHd, saved[Q], saved[KEY], saved[V],
                                          {saved[OUT], saved[LSE]}, ctx->saved_data["scale"].toDouble(),
                                          *rows);

    auto cos = saved[COS], sin = saved[SIN];
    if (rows->filtered()) { // one row of cos and sin for each kept row
      const auto positions_K = rows->rows_K.remainder(cos.size(0));
      cos = cos.index_select(0, positions_K);
      sin = sin.index_select(0, positions_K);
    }
    const auto flat = [&](const Tensor& grad_KHd) {
      return grad_KHd.view({grad_KHd.size(0), grad_KHd.size(1) * head_dim});
    };
    // Back through the rotation, and through the norm where there is one.
    const auto to_projection = [&](Tensor grad_KHd, int norm, int raw, int rstd) {
      grad_KHd = rotate_(grad_KHd, cos, sin, /*inverse=*/true, *rows);
      if (saved[norm].numel() == 0) {
        return flat(grad_KHd);
      }
      const auto kept = rms_backward(as_rows(grad_KHd), as_rows(saved[raw]), saved[norm],
                                     as_rows(saved[rstd]), *rows, /*needs_x=*/true,
                                     ctx->needs_input_grad(norm));
      out[norm] = kept.w_D;
      return flat(kept.x_KD.view(grad_KHd.sizes()));
    };
    const auto grad_q_KE = to_projection(core.q_KHd, NQ, RAW_Q, RSTD_Q);
    const auto grad_k_KE = to_projection(core.k_KGd, NK, RAW_K, RSTD_K);
    const auto grad_v_KE = flat(core.v_KGd);
    const auto x_KD = rows->gather(saved[X]);
    parameter_grads(WQ, grad_q_KE, x_KD);
    parameter_grads(WK, grad_k_KE, x_KD);
    parameter_grads(WV, grad_v_KE, x_KD);
    if (ctx->needs_input_grad(X)) {
      auto grad_x_KD = rows_times(grad_q_KE, operand(saved[WQ], compute));
      add_rows_times(grad_x_KD, grad_k_KE, operand(saved[WK], compute));
      add_rows_times(grad_x_KD, grad_v_KE, operand(saved[WV], compute));
      out[X] = input_grad(ctx, grad_x_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                             ctx->saved_data["sizes"].toIntVector());
    }
    return out;
  }
};

const Registered<Attention> registered_attention;

// (1 or B, T, r) -> (T or N, r), in the dtype that rotations are computed in.
Tensor rotary_rows(const Tensor& cos, at::ScalarType compute) {
  return as_rows(cos).to(accumulate_dtype(compute)).contiguous();
}

} // namespace

Tensor attention(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                 const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& norms,
                 double norm_eps, const Tensor& cos_Tr, const Tensor& sin_Tr, int64_t head_dim, double scale,
                 const KeptRowsPtr& rows) {
  TORCH_CHECK(weights.size() == 4 && biases.size() == 4 && norms.size() == 2,
              "attention takes weights and biases of q, k, v and output, and norms of q and k");
  const auto bias = [&](int i) { return or_empty(biases[i], weights[i]); };
  const auto compute = compute_dtype(x_BTD);
  return Attention::apply(x_BTD, weights[0], bias(0), weights[1], bias(1), weights[2], bias(2), weights[3],
                          bias(3), or_empty(norms[0], weights[0]), or_empty(norms[1], weights[0]),
                          rotary_rows(cos_Tr, compute), rotary_rows(sin_Tr, compute), norm_eps, head_dim,
                          scale, compute, rows);
}

} // namespace collider
