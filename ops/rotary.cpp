// Rotary position embedding, in place: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + r/2).
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include "causal.h"
#include "kernels.h"

namespace collider {
namespace {

template <typename scalar_t, typename wide_t>
void rotate_cpu(scalar_t* x, const wide_t* cos, const wide_t* sin, int64_t n_rows, int64_t heads, int64_t d,
                int64_t r, int64_t period, bool inverse) {
  const int64_t half = r / 2;
  at::parallel_for(0, n_rows, /*grain_size=*/16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const wide_t* c = cos + (n % period) * r;
      const wide_t* s = sin + (n % period) * r;
      for (int64_t h = 0; h < heads; ++h) {
        scalar_t* a = x + (n * heads + h) * d;
        scalar_t* b = a + half;
        for (int64_t i = 0; i < half; ++i) {
          const wide_t a_i = a[i], b_i = b[i];
          // The transpose of the rotation uses the other half's sine, with its sign turned.
          const wide_t s_a = inverse ? -s[half + i] : s[i];
          const wide_t s_b = inverse ? -s[i] : s[half + i];
          a[i] = static_cast<scalar_t>(a_i * c[i] - b_i * s_a);
          b[i] = static_cast<scalar_t>(b_i * c[half + i] + a_i * s_b);
        }
      }
    }
  });
}

void rotate_aten(Tensor& x_NHd, const Tensor& cos, const Tensor& sin, bool inverse) {
  const int64_t r = cos.size(-1), half = r / 2, period = cos.size(0);
  const auto x = x_NHd.view({-1, period, x_NHd.size(1), x_NHd.size(2)});
  auto a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  const auto halves = [&](const Tensor& t) { return t.unsqueeze(1).split(half, -1); };
  const auto c = halves(cos), s = halves(inverse ? -sin : sin);
  // The transpose of the rotation uses the other half's sine, with its sign turned.
  const auto rotated_a = a * c[0] - b * s[inverse ? 1 : 0], rotated_b = b * c[1] + a * s[inverse ? 0 : 1];
  a.copy_(rotated_a);
  b.copy_(rotated_b);
}

} // namespace

Tensor rotate_(Tensor x_NHd, const Tensor& cos, const Tensor& sin, bool inverse, const KeptRows& rows) {
  const int64_t r = cos.size(-1), period = cos.size(0);
  TORCH_CHECK(r % 2 == 0 && r <= x_NHd.size(2), "the rotated width must be even and within the head");
  if (x_NHd.numel() == 0) {
    return x_NHd;
  }
  if (rows.path(x_NHd) == Path::kFused) {
    using Rotate = void(const Tensor&, const Tensor&, const Tensor&, bool);
    if (const auto kernel = find_kernel<Rotate>("lightning_collider::rotate", x_NHd)) {
      TORCH_INTERNAL_ASSERT(x_NHd.is_contiguous() && cos.is_contiguous() && sin.is_contiguous());
      kernel->call(x_NHd, cos, sin, inverse);
      return x_NHd;
    }
  }
  if (rows.path(x_NHd) != Path::kLoops) {
    rotate_aten(x_NHd, cos, sin, inverse);
    return x_NHd;
  }
  TORCH_INTERNAL_ASSERT(x_NHd.is_contiguous() && cos.is_contiguous() && sin.is_contiguous());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x_NHd.scalar_type(), "rotate", [&] {
    using wide_t = at::opmath_type<scalar_t>;
    rotate_cpu(x_NHd.mutable_data_ptr<scalar_t>(), cos.const_data_ptr<wide_t>(),
               sin.const_data_ptr<wide_t>(), x_NHd.size(0), x_NHd.size(1), x_NHd.size(2), r, period, inverse);
  });
  return x_NHd;
}

} // namespace collider
