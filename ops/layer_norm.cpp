// LayerNorm: y = w (x - mean) / sqrt(var + eps) + b over D. Backward: ATen's, on kept rows.
#include "graph.h"

namespace collider {
namespace {

struct LayerNorm : Function<LayerNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_D, const Tensor& b_D,
                        double eps, const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto [y_ND, mean_N1, rstd_N1] =
        at::native_layer_norm(as_rows(x_BTD), w_D.sizes(), w_D, b_D, eps);
    ctx->save_for_backward({x_BTD, w_D, b_D, mean_N1, rstd_N1});
    save_rows(ctx, rows);
    return y_ND.view(x_BTD.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &x_BTD = saved[0], &w_D = saved[1], &b_D = saved[2];
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                     ctx->needs_input_grad(2)};
    auto [grad_x_KD, grad_w_D, grad_b_D] = at::native_layer_norm_backward(
        kept_grad(ctx, grads[0], *rows, x_BTD.scalar_type()), rows->gather(as_rows(x_BTD)), w_D.sizes(),
        rows->gather(saved[3]), rows->gather(saved[4]), w_D, b_D, needed);
    if (needed[0]) {
      out[0] = input_grad(ctx, grad_x_KD, *rows, x_BTD.sizes());
    }
    out[1] = grad_w_D;
    out[2] = grad_b_D;
    return out;
  }
};

const Registered<LayerNorm> registered_layer_norm;

} // namespace

Tensor layer_norm(const Tensor& x_BTD, const Tensor& w_D, const Tensor& b_D, double eps,
                  const KeptRowsPtr& rows) {
  return LayerNorm::apply(x_BTD, w_D, b_D, eps, rows);
}

} // namespace collider
