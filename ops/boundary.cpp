// Boundary: y = x, on both sides of a module whose backward is not ours. In backward it takes and gives what the
// other side of each edge asks for, (K, D) or full size, so a dense module leaves its neighbours compact.
#include "graph.h"

namespace collider {
namespace {

struct Boundary : Function<Boundary> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const KeptRowsPtr& rows) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["sizes"] = x_BTD.sizes();
    save_rows(ctx, rows);
    return x_BTD.view_as(x_BTD);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(2);
    if (grads[0].defined()) {
      const auto rows = saved_rows(ctx);
      const auto grad_KD = kept_grad(ctx, grads[0], *rows, grads[0].scalar_type());
      out[0] = input_grad(ctx, grad_KD, *rows, ctx->saved_data["sizes"].toIntVector());
    }
    return out;
  }
};

const Registered<Boundary> registered_boundary;

} // namespace

Tensor boundary(const Tensor& x_BTD, const KeptRowsPtr& rows) { return Boundary::apply(x_BTD, rows); }

} // namespace collider
