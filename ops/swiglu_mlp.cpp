// SwiGLU MLP: y = (silu(x wg^T) * (x wu^T)) wd^T, each projection with an optional bias.
// Gate and up are kept from the forward; everything else of the backward is computed from their kept rows.
#include "graph.h"

namespace collider {
namespace {

struct SwigluMlp : Function<SwigluMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_gate_FD,
                        const Tensor& b_gate_F, const Tensor& w_up_FD, const Tensor& b_up_F,
                        const Tensor& w_down_DF, const Tensor& b_down_D, at::ScalarType compute,
                        const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto x_ND = as_rows(x_BTD).to(compute);
    const auto gate_NF = affine(x_ND, operand(w_gate_FD, compute), operand(b_gate_F, compute));
    const auto up_NF = affine(x_ND, operand(w_up_FD, compute), operand(b_up_F, compute));
    const auto act_NF = at::silu(gate_NF).mul_(up_NF);
    const auto y_ND = affine(act_NF, operand(w_down_DF, compute), operand(b_down_D, compute));
    ctx->save_for_backward(
        {x_ND, w_gate_FD, b_gate_F, w_up_FD, b_up_F, w_down_DF, b_down_D, gate_NF, up_NF});
    ctx->saved_data["sizes"] = x_BTD.sizes();
    ctx->saved_data["dtype"] = x_BTD.scalar_type();
    save_rows(ctx, rows);
    auto sizes = x_BTD.sizes().vec();
    sizes.back() = w_down_DF.size(0);
    return y_ND.view(sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(9);
    if (!grads[0].defined()) {
      return out;
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto &w_gate_FD = saved[1], &b_gate_F = saved[2], &w_up_FD = saved[3], &b_up_F = saved[4],
               &w_down_DF = saved[5], &b_down_D = saved[6];
    const auto compute = saved[0].scalar_type();
    const auto grad_KD = kept_grad(ctx, grads[0], *rows, compute);
    const auto gate_KF = rows->gather(saved[7]), up_KF = rows->gather(saved[8]);

    const auto silu_KF = at::silu(gate_KF);
    out[5] = weight_grad(ctx->needs_input_grad(5), grad_KD, silu_KF * up_KF, w_down_DF.scalar_type());
    out[6] = bias_grad(ctx->needs_input_grad(6), grad_KD, b_down_D);
    auto grad_act_KF = at::mm(grad_KD, operand(w_down_DF, compute));
    const auto grad_up_KF = grad_act_KF * silu_KF;
    const auto grad_gate_KF = at::silu_backward(grad_act_KF.mul_(up_KF), gate_KF);

    const auto x_KD = rows->gather(saved[0]);
    out[1] = weight_grad(ctx->needs_input_grad(1), grad_gate_KF, x_KD, w_gate_FD.scalar_type());
    out[2] = bias_grad(ctx->needs_input_grad(2), grad_gate_KF, b_gate_F);
    out[3] = weight_grad(ctx->needs_input_grad(3), grad_up_KF, x_KD, w_up_FD.scalar_type());
    out[4] = bias_grad(ctx->needs_input_grad(4), grad_up_KF, b_up_F);
    if (ctx->needs_input_grad(0)) {
      auto grad_x_KD = at::mm(grad_gate_KF, operand(w_gate_FD, compute));
      grad_x_KD.addmm_(grad_up_KF, operand(w_up_FD, compute));
      out[0] = input_grad(ctx, grad_x_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                             ctx->saved_data["sizes"].toIntVector());
    }
    return out;
  }
};

const Registered<SwigluMlp> registered;

} // namespace

Tensor swiglu_mlp(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                  const std::vector<OptionalTensor>& biases, const KeptRowsPtr& rows) {
  TORCH_CHECK(weights.size() == 3 && biases.size() == 3, "swiglu_mlp takes gate, up and down");
  const auto bias = [&](int i) { return or_empty(biases[i], weights[i]); };
  return SwigluMlp::apply(x_BTD, weights[0], bias(0), weights[1], bias(1), weights[2], bias(2),
                          compute_dtype(x_BTD), rows);
}

} // namespace collider
