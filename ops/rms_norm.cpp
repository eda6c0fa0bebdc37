// RMSNorm: y = w * x^, x^ = x / rms(x), rms(x) = sqrt(mean(x^2) + eps) over D, computed in float32 or wider.
// Backward on kept rows, with g = dy * w:  dx = (g - x^ mean(g x^)) / rms(x),  dw = sum over rows of dy x^.
#include "graph.h"
#include "rms.h"

namespace collider {

RmsOutput rms_forward(const Tensor& x_ND, const Tensor& w_D, double eps) {
  const auto wide_ND = x_ND.to(accumulate_dtype(x_ND.scalar_type()));
  const auto rstd_N1 = wide_ND.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
  return {(wide_ND * rstd_N1).to(x_ND.scalar_type()).mul(w_D), rstd_N1};
}

RmsGrads rms_backward(const Tensor& grad_KD, const Tensor& x_KD, const Tensor& w_D, const Tensor& rstd_K1,
                      bool needs_x, bool needs_w) {
  const auto wide = accumulate_dtype(x_KD.scalar_type());
  const auto unit_KD = x_KD.to(wide).mul(rstd_K1);
  const auto dy_KD = grad_KD.to(wide);
  RmsGrads grads;
  if (needs_w) {
    grads.w_D = (dy_KD * unit_KD).sum(0).to(w_D.scalar_type());
  }
  if (needs_x) {
    auto g_KD = dy_KD * w_D.to(wide);
    const auto mean_K1 = (g_KD * unit_KD).mean(-1, /*keepdim=*/true);
    grads.x_KD = g_KD.sub_(unit_KD * mean_K1).mul_(rstd_K1).to(x_KD.scalar_type());
  }
  return grads;
}

namespace {

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_D, double eps,
                        const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto out = rms_forward(as_rows(x_BTD), w_D, eps);
    ctx->save_for_backward({x_BTD, w_D, out.rstd_N1});
    save_rows(ctx, rows);
    return out.y_ND.view(x_BTD.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(4);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto& x_BTD = saved[0];
    const auto kept = rms_backward(kept_grad(ctx, grads[0], *rows, grads[0].scalar_type()),
                                   rows->gather(as_rows(x_BTD)), saved[1], rows->gather(saved[2]),
                                   ctx->needs_input_grad(0), ctx->needs_input_grad(1));
    if (kept.x_KD.defined()) {
      out[0] = input_grad(ctx, kept.x_KD, *rows, x_BTD.sizes());
    }
    out[1] = kept.w_D;
    return out;
  }
};

const Registered<RmsNorm> registered;

} // namespace

Tensor rms_norm(const Tensor& x_BTD, const Tensor& w_D, double eps, const KeptRowsPtr& rows) {
  return RmsNorm::apply(x_BTD, w_D, eps, rows);
}

} // namespace collider
