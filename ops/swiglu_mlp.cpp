// SwiGLU MLP: y = (silu(x wg^T) * (x wu^T)) wd^T, each projection with an optional bias.
// Gate and up are kept from the forward; everything else of the backward is computed from their kept rows:
//   dup = dact silu(gate),   dgate = dact up sigma (1 + gate (1 - sigma)),   sigma = 1 / (1 + exp(-gate)).
#include "graph.h"
#include "kernels.h"
#include "products.h"
#include "vec_rows.h"

namespace collider {
namespace {

// silu(g) = g sigma, with sigma = 1 / (1 + exp(-g)).
template <typename V>
V sigma(const V& gate) {
  return V(1) / (V(1) + gate.neg().exp_u20());
}

// silu(g) u. A lambda, not a function: the loops over it inline it.
constexpr auto swiglu = [](const auto& gate, const auto& up) { return gate * sigma(gate) * up; };

Tensor activation(const Tensor& gate_NF, const Tensor& up_NF, const KeptRows& rows) {
  if (!loops_apply(rows, {gate_NF, up_NF})) {
    return at::silu(gate_NF).mul_(up_NF);
  }
  auto act_NF = at::empty_like(gate_NF);
  const int64_t width = gate_NF.size(1);
  COLLIDER_DISPATCH(gate_NF.scalar_type(), [&] {
    const auto *gate = gate_NF.const_data_ptr<scalar_t>(), *up = up_NF.const_data_ptr<scalar_t>();
    auto* act = act_NF.mutable_data_ptr<scalar_t>();
    for_each_row(gate_NF.size(0), width, [&](int64_t n) {
      const int64_t at = n * width;
      vec::map2<scalar_t>(swiglu, act + at, gate + at, up + at, width);
    });
  });
  return act_NF;
}

struct ActivationGrads {
  Tensor act_KF, gate_KF, up_KF; // the activation again, and the gradients of gate and up
};

// From the gradient of the activation at kept rows; gate and up at all rows.
ActivationGrads activation_backward(const Tensor& grad_KF, const Tensor& gate_NF, const Tensor& up_NF,
                                    const KeptRows& rows) {
  if (rows.path(grad_KF) == Path::kFused) {
    using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                        const OptionalTensor&);
    if (const auto kernel = find_kernel<Backward>("lightning_collider::swiglu_backward", grad_KF)) {
      const auto [act_KF, grad_gate_KF, grad_up_KF] = kernel->call(grad_KF, gate_NF, up_NF, rows.kept_or_all());
      return {act_KF, grad_gate_KF, grad_up_KF};
    }
  }
  if (!loops_apply(rows, {grad_KF, gate_NF, up_NF})) {
    const auto gate_KF = rows.gather(gate_NF), up_KF = rows.gather(up_NF), silu_KF = at::silu(gate_KF);
    return {silu_KF * up_KF, at::silu_backward(grad_KF * up_KF, gate_KF), grad_KF * silu_KF};
  }
  ActivationGrads out{at::empty_like(grad_KF), at::empty_like(grad_KF), at::empty_like(grad_KF)};
  const int64_t width = grad_KF.size(1);
  const RowIndex row(rows);
  COLLIDER_DISPATCH(grad_KF.scalar_type(), [&] {
    using V = Vec<scalar_t>;
    const auto *grad = grad_KF.const_data_ptr<scalar_t>(), *gate = gate_NF.const_data_ptr<scalar_t>(),
               *up = up_NF.const_data_ptr<scalar_t>();
    auto *act = out.act_KF.mutable_data_ptr<scalar_t>(), *grad_gate = out.gate_KF.mutable_data_ptr<scalar_t>(),
         *grad_up = out.up_KF.mutable_data_ptr<scalar_t>();
    for_each_row(grad_KF.size(0), width, [&](int64_t k) {
      const int64_t at = k * width;
      const auto *gate_k = gate + row(k) * width, *up_k = up + row(k) * width;
      vec::map2<scalar_t>(swiglu, act + at, gate_k, up_k, width);
      vec::map2<scalar_t>([](const V& dy, const V& g) { return dy * g * sigma(g); }, grad_up + at, grad + at,
                          gate_k, width);
      vec::map3<scalar_t>(
          [](const V& dy, const V& g, const V& u) {
            const V s = sigma(g), one(1);
            return dy * u * s * (one + g * (one - s));
          },
          grad_gate + at, grad + at, gate_k, up_k, width);
    });
  });
  return out;
}

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
    const auto act_NF = activation(gate_NF, up_NF, *rows);
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
    const auto [act_KF, grad_gate_KF, grad_up_KF] =
        activation_backward(rows_times(grad_KD, operand(w_down_DF, compute)), saved[7], saved[8], *rows);
    out[5] = weight_grad(ctx->needs_input_grad(5), grad_KD, act_KF, w_down_DF.scalar_type());
    out[6] = bias_grad(ctx->needs_input_grad(6), grad_KD, b_down_D);

    const auto x_KD = rows->gather(saved[0]);
    out[1] = weight_grad(ctx->needs_input_grad(1), grad_gate_KF, x_KD, w_gate_FD.scalar_type());
    out[2] = bias_grad(ctx->needs_input_grad(2), grad_gate_KF, b_gate_F);
    out[3] = weight_grad(ctx->needs_input_grad(3), grad_up_KF, x_KD, w_up_FD.scalar_type());
    out[4] = bias_grad(ctx->needs_input_grad(4), grad_up_KF, b_up_F);
    if (ctx->needs_input_grad(0)) {
      auto grad_x_KD = rows_times(grad_gate_KF, operand(w_gate_FD, compute));
      add_rows_times(grad_x_KD, grad_up_KF, operand(w_up_FD, compute));
      out[0] = input_grad(ctx, grad_x_KD.to(ctx->saved_data["dtype"].toScalarType()), *rows,
                             ctx->saved_data["sizes"].toIntVector());
    }
    return out;
  }
};

const Registered<SwigluMlp> registered_swiglu_mlp;

} // namespace

Tensor swiglu_mlp(const Tensor& x_BTD, const std::vector<Tensor>& weights,
                  const std::vector<OptionalTensor>& biases, const KeptRowsPtr& rows) {
  TORCH_CHECK(weights.size() == 3 && biases.size() == 3, "swiglu_mlp takes gate, up and down");
  const auto bias = [&](int i) { return or_empty(biases[i], weights[i]); };
  return SwigluMlp::apply(x_BTD, weights[0], bias(0), weights[1], bias(1), weights[2], bias(2),
                          compute_dtype(x_BTD), rows);
}

} // namespace collider
