// GELU MLP: y = gelu(x w1^T + b1) w2^T + b2, gelu exact or by its tanh approximation.
// The pre-activation is kept from the forward; the backward works on its kept rows.
#include "graph.h"
#include "products.h"

namespace collider {
namespace {

c10::string_view approximation(bool tanh) { return tanh ? "tanh" : "none"; }

struct GeluMlp : Function<GeluMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_up_FD,
                        const Tensor& b_up_F, const Tensor& w_down_DF, const Tensor& b_down_D, bool tanh,
                        at::ScalarType compute, const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto x_ND = as_rows(x_BTD).to(compute);
    const auto up_NF = affine(x_ND, operand(w_up_FD, compute), operand(b_up_F, compute));
    const auto y_ND = affine(at::gelu(up_NF, approximation(tanh)), operand(w_down_DF, compute),
                             operand(b_down_D, compute));
    ctx->save_for_backward({x_ND, w_up_FD, b_up_F, w_down_DF, b_down_D, up_NF});
    ctx->saved_data["tanh"] = tanh;
    ctx->saved_data["sizes"] = x_BTD.sizes();
    ctx->saved_data["dtype"] = x_BTD.scalar_type();
    save_rows(ctx, rows);
    auto sizes = x_BTD.sizes().vec();
    sizes.back() = w_down_DF.size(0);
    return y_ND.view(sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(8);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &w_up_FD = saved[1], &b_up_F = saved[2], &w_down_DF = saved[3], &b_down_D = saved[4];
    const auto compute = saved[0].scalar_type();
    const auto gelu = approximation(ctx->saved_data["tanh"].toBool());
    const auto grad_KD = kept_grad(ctx, grads[0], *rows, compute);
    const auto up_KF = rows->gather(saved[5]);
    if (ctx->needs_input_grad(3)) {
      out[3] = weight_grad(true, grad_KD, at::gelu(up_KF, gelu), w_down_DF.scalar_type());
    }
    out[4] = bias_grad(ctx->needs_input_grad(4), grad_KD, b_down_D);
    const auto grad_up_KF = at::gelu_backward(rows_times(grad_KD, operand(w_down_DF, compute)), up_KF, gelu);
    if (ctx->needs_input_grad(1)) {
      out[1] = weight_grad(true, grad_up_KF, rows->gather(saved[0]), w_up_FD.scalar_type());
    }
    out[2] = bias_grad(ctx->needs_input_grad(2), grad_up_KF, b_up_F);
    if (ctx->needs_input_grad(0)) {
      const auto grad_x_KD = rows_times(grad_up_KF, operand(w_up_FD, compute));
      out[0] = input_grad(ctx, grad_x_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                             ctx->saved_data["sizes"].toIntVector());
    }
    return out;
  }
};

const Registered<GeluMlp> registered_gelu_mlp;

} // namespace

Tensor gelu_mlp(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                const std::vector<OptionalTensor>& biases, bool tanh, const KeptRowsPtr& rows) {
  TORCH_CHECK(weights.size() == 2 && biases.size() == 2, "gelu_mlp takes up and down");
  const auto bias = [&](int i) { return or_empty(biases[i], weights[i]); };
  return GeluMlp::apply(x_BTD, weights[0], bias(0), weights[1], bias(1), tanh, compute_dtype(x_BTD), rows);
}

} // namespace collider
