// Rotary position embedding, in place: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + r/2).
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include "causal.h"

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
  const int64_t r = cos.size(-1), half = r / 2, repeats = x_NHd.size(0) / cos.size(0);
  const auto c = cos.repeat({repeats, 1}).unsqueeze(1), s = sin.repeat({repeats, 1}).unsqueeze(1);
  auto a = x_NHd.narrow(-1, 0, half), b = x_NHd.narrow(-1, half, half);
  const auto c_a = c.narrow(-1, 0, half), c_b = c.narrow(-1, half, half);
  auto s_a = s.narrow(-1, 0, half), s_b = s.narrow(-1, half, half);
  if (inverse) {
    std::swap(s_a, s_b);
    s_a = s_a.neg();
    s_b = s_b.neg();
  }
  const auto rotated_a = a * c_a - b * s_a, rotated_b = b * c_b + a * s_b;
  a.copy_(rotated_a);
  b.copy_(rotated_b);
}

} // namespace

Tensor rotate_(Tensor x_NHd, const Tensor& cos, const Tensor& sin, bool inverse) {
  const int64_t r = cos.size(-1), period = cos.size(0);
  TORCH_CHECK(r % 2 == 0 && r <= x_NHd.size(2), "the rotated width must be even and within the head");
  if (x_NHd.numel() == 0) {
    return x_NHd;
  }
  if (!x_NHd.is_cpu()) {
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
