// RMSNorm: y = w * x^, x^ = x / rms(x), rms(x) = sqrt(mean(x^2) + eps) over D, computed in float32 or wider.
// Backward on kept rows, with g = dy * w:  dx = (g - x^ mean(g x^)) / rms(x),  dw = sum over rows of dy x^.
#include "common.h"

namespace collider {
namespace {

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_D, double eps,
                        const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto wide = accumulate_dtype(x_BTD.scalar_type());
    const auto x_ND = as_rows(x_BTD).to(wide);
    const auto rstd_N1 = x_ND.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
    // Rounded to the input's dtype before the weight, as Hugging Face's norms do.
    const auto y_ND = (x_ND * rstd_N1).to(x_BTD.scalar_type()).mul(w_D);
    ctx->save_for_backward({x_BTD, w_D, rstd_N1});
    save_rows(ctx, rows);
    return y_ND.view(x_BTD.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) {
      return {Tensor(), Tensor(), Tensor(), Tensor()};
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &x_BTD = saved[0], &w_D = saved[1];
    const auto wide = accumulate_dtype(x_BTD.scalar_type());
    const auto rstd_K1 = rows->gather(saved[2]);
    const auto unit_KD = rows->gather(as_rows(x_BTD)).to(wide).mul(rstd_K1);
    const auto grad_KD = kept_grad(grads[0], *rows, wide);
    Tensor grad_x, grad_w_D;
    if (ctx->needs_input_grad(1)) {
      grad_w_D = (grad_KD * unit_KD).sum(0).to(w_D.scalar_type());
    }
    if (ctx->needs_input_grad(0)) {
      auto g_KD = grad_KD * w_D.to(wide);
      const auto mean_K1 = (g_KD * unit_KD).mean(-1, /*keepdim=*/true);
      g_KD.sub_(unit_KD * mean_K1).mul_(rstd_K1);
      grad_x = rows->scatter(g_KD.to(x_BTD.scalar_type()), x_BTD.sizes());
    }
    return {grad_x, grad_w_D, Tensor(), Tensor()};
  }
};

} // namespace

Tensor rms_norm(const Tensor& x_BTD, const Tensor& w_D, double eps, const KeptRowsPtr& rows) {
  return RmsNorm::apply(x_BTD, w_D, eps, rows);
}

} // namespace collider
