// Linear: y = x w^T + b. Backward on kept rows: dw = dy^T x, db = sum dy, dx = dy w.
#include "graph.h"
#include "products.h"

namespace collider {
namespace {

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_ED, const Tensor& b_E,
                        at::ScalarType compute, const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto x_ND = as_rows(x_BTD).to(compute);
    const auto y_NE = affine(x_ND, operand(w_ED, compute), operand(b_E, compute));
    ctx->save_for_backward({x_ND, w_ED, b_E});
    ctx->saved_data["sizes"] = x_BTD.sizes();
    ctx->saved_data["dtype"] = x_BTD.scalar_type();
    save_rows(ctx, rows);
    auto sizes = x_BTD.sizes().vec();
    sizes.back() = w_ED.size(0);
    return y_NE.view(sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &x_ND = saved[0], &w_ED = saved[1], &b_E = saved[2];
    const auto compute = x_ND.scalar_type();
    const auto grad_KE = kept_grad(ctx, grads[0], *rows, compute);
    if (ctx->needs_input_grad(0)) {
      const auto grad_KD = rows_times(grad_KE, operand(w_ED, compute));
      out[0] = input_grad(ctx, grad_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                             ctx->saved_data["sizes"].toIntVector());
    }
    if (ctx->needs_input_grad(1)) {
      out[1] = weight_grad(true, grad_KE, rows->gather(x_ND), w_ED.scalar_type());
    }
    out[2] = bias_grad(ctx->needs_input_grad(2), grad_KE, b_E);
    return out;
  }
};

const Registered<Linear> registered_linear;

} // namespace

Tensor linear(const Tensor& x_BTD, const Tensor& w_ED, const OptionalTensor& b_E, const KeptRowsPtr& rows) {
  return Linear::apply(x_BTD, w_ED, or_empty(b_E, w_ED), compute_dtype(x_BTD), rows);
}

} // namespace collider
