// RMSNorm: y = w * x^, x^ = x / rms(x), rms(x) = sqrt(mean(x^2) + eps) over D, computed in float32 or wider.
// Backward on kept rows, with g = dy * w:  dx = (g - x^ mean(g x^)) / rms(x),  dw = sum over rows of dy x^.
#include "graph.h"
#include "kernels.h"
#include "rms.h"
#include "vec_rows.h"

namespace collider {
namespace {

template <typename scalar_t>
void forward_loop(const Tensor& x_ND, const Tensor& w_D, double eps, Tensor& y_ND, Tensor& rstd_N1) {
  using wide_t = at::opmath_type<scalar_t>;
  using V = Vec<scalar_t>;
  const int64_t width = x_ND.size(1);
  const auto *x = x_ND.const_data_ptr<scalar_t>(), *w = w_D.const_data_ptr<scalar_t>();
  auto* y = y_ND.mutable_data_ptr<scalar_t>();
  auto* rstd = rstd_N1.mutable_data_ptr<wide_t>();
  for_each_row(x_ND.size(0), width, [&](int64_t n) {
    const auto *x_n = x + n * width;
    auto* y_n = y + n * width;
    const wide_t squares = vec::map_reduce_all<scalar_t>(
        [](const V& v) { return v * v; }, [](const V& a, const V& b) { return a + b; }, x_n, width);
    rstd[n] = 1 / std::sqrt(squares / width + static_cast<wide_t>(eps));
    const V scale(rstd[n]);
    vec::map<scalar_t>([&](const V& v) { return v * scale; }, y_n, x_n, width); // rounded to scalar_t here
    vec::map2<scalar_t>([](const V& v, const V& u) { return v * u; }, y_n, y_n, w, width);
  });
}

template <typename scalar_t>
void backward_loop(const Tensor& grad_KD, const Tensor& x_ND, const Tensor& w_D, const Tensor& rstd_N1,
                   const RowIndex& row, Tensor& grad_x_KD, Tensor& grad_w_D) {
  using wide_t = at::opmath_type<scalar_t>;
  using V = Vec<scalar_t>;
  const int64_t n_kept = grad_KD.size(0), width = x_ND.size(1);
  const auto *x = x_ND.const_data_ptr<scalar_t>(), *w = w_D.const_data_ptr<scalar_t>(),
             *grad = grad_KD.const_data_ptr<scalar_t>();
  const auto* rstd = rstd_N1.const_data_ptr<wide_t>();
  if (grad_x_KD.defined()) {
    auto* grad_x = grad_x_KD.mutable_data_ptr<scalar_t>();
    for_each_row(n_kept, width, [&](int64_t k) {
      const auto *x_k = x + row(k) * width, *grad_k = grad + k * width;
      const wide_t r = rstd[row(k)];
      const wide_t dot = vec::map3_reduce_all<scalar_t>(
          [](const V& g, const V& v, const V& u) { return g * v * u; },
          [](const V& a, const V& b) { return a + b; }, grad_k, x_k, w, width);
      const V scale(r), along(r * r * r * dot / width);
      vec::map3<scalar_t>(
          [&](const V& g, const V& v, const V& u) { return g * u * scale - v * along; }, grad_x + k * width,
          grad_k, x_k, w, width);
    });
  }
  if (grad_w_D.defined()) { // each thread sums its own columns over all rows
    auto* grad_w = grad_w_D.mutable_data_ptr<scalar_t>();
    constexpr int64_t kColumns = 64;
    for_each_row((width + kColumns - 1) / kColumns, n_kept * kColumns, [&](int64_t block) {
      const int64_t begin = block * kColumns, n = std::min(kColumns, width - begin);
      wide_t sums[kColumns] = {};
      for (int64_t k = 0; k < n_kept; ++k) {
        const auto *x_k = x + row(k) * width + begin, *grad_k = grad + k * width + begin;
        const wide_t r = rstd[row(k)];
        for (int64_t d = 0; d < n; ++d) {
          sums[d] += static_cast<wide_t>(grad_k[d]) * static_cast<wide_t>(x_k[d]) * r;
        }
      }
      std::copy(sums, sums + n, grad_w + begin);
    });
  }
}

RmsGrads backward_aten(const Tensor& grad_KD, const Tensor& x_KD, const Tensor& w_D, const Tensor& rstd_K1,
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

// CUDA's kernel rounds once, after the weight, where the definition in rms.h rounds before it too.
bool fused_applies(const KeptRows& rows, const Tensor& x_ND, const Tensor& w_D) {
  return rows.path(x_ND) == Path::kFused && x_ND.scalar_type() == w_D.scalar_type();
}

} // namespace

RmsOutput rms_forward(const Tensor& x_ND, const Tensor& w_D, double eps, const KeptRows& rows) {
  const auto wide = accumulate_dtype(x_ND.scalar_type());
  if (fused_applies(rows, x_ND, w_D)) {
    const auto [y_ND, rstd_N1] = at::_fused_rms_norm(x_ND, w_D.sizes(), w_D, eps);
    return {y_ND, rstd_N1};
  }
  if (!loops_apply(rows, {x_ND, w_D})) {
    const auto wide_ND = x_ND.to(wide);
    const auto rstd_N1 = wide_ND.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
    return {(wide_ND * rstd_N1).to(x_ND.scalar_type()).mul(w_D), rstd_N1};
  }
  RmsOutput out{at::empty_like(x_ND), at::empty({x_ND.size(0), 1}, x_ND.options().dtype(wide))};
  COLLIDER_DISPATCH(x_ND.scalar_type(), [&] { forward_loop<scalar_t>(x_ND, w_D, eps, out.y_ND, out.rstd_N1); });
  return out;
}

RmsGrads rms_backward(const Tensor& grad_KD, const Tensor& x_ND, const Tensor& w_D, const Tensor& rstd_N1,
                      const KeptRows& rows, bool needs_x, bool needs_w) {
  const int64_t heads = x_ND.size(0) / rows.n_rows();
  if (rows.path(x_ND) == Path::kFused && heads == 1) {
    using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                const OptionalTensor&);
    if (const auto kernel = find_kernel<Backward>("lightning_collider::rms_backward", x_ND)) {
      const auto [grad_x_KD, grad_w_D] = kernel->call(grad_KD, x_ND, w_D, rstd_N1, rows.kept_or_all());
      return {needs_x ? grad_x_KD : Tensor(), needs_w ? grad_w_D : Tensor()};
    }
  }
  if (!loops_apply(rows, {x_ND, w_D, grad_KD})) {
    const auto kept = [&](const Tensor& t) {
      const auto width = t.size(1);
      return rows.gather(t.view({rows.n_rows(), heads, width})).view({grad_KD.size(0), width});
    };
    if (fused_applies(rows, x_ND, w_D) && grad_KD.size(0) > 0) {
      const auto [grad_x_KD, grad_w_D] = at::_fused_rms_norm_backward(
          grad_KD, kept(x_ND), w_D.sizes(), kept(rstd_N1), w_D, std::array<bool, 2>{needs_x, needs_w});
      return {grad_x_KD, grad_w_D};
    }
    return backward_aten(grad_KD, kept(x_ND), w_D, kept(rstd_N1), needs_x, needs_w);
  }
  RmsGrads grads{needs_x ? at::empty_like(grad_KD) : Tensor(), needs_w ? at::empty_like(w_D) : Tensor()};
  COLLIDER_DISPATCH(x_ND.scalar_type(), [&] {
    backward_loop<scalar_t>(grad_KD, x_ND, w_D, rstd_N1, RowIndex(rows, heads), grads.x_KD, grads.w_D);
  });
  return grads;
}

namespace {

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_BTD, const Tensor& w_D, double eps,
                        const KeptRowsPtr& rows) {
    OperatorGuard guard(x_BTD);
    ctx->set_materialize_grads(false);
    const auto out = rms_forward(as_rows(x_BTD), w_D, eps, *rows);
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
    const auto kept =
        rms_backward(kept_grad(ctx, grads[0], *rows, grads[0].scalar_type()), as_rows(x_BTD), saved[1],
                     saved[2], *rows, ctx->needs_input_grad(0), ctx->needs_input_grad(1));
    if (kept.x_KD.defined()) {
      out[0] = input_grad(ctx, kept.x_KD, *rows, x_BTD.sizes());
    }
    out[1] = kept.w_D;
    return out;
  }
};

const Registered<RmsNorm> registered_rms_norm;

} // namespace

Tensor rms_norm(const Tensor& x_BTD, const Tensor& w_D, double eps, const KeptRowsPtr& rows) {
  return RmsNorm::apply(x_BTD, w_D, eps, rows);
}

} // namespace collider
