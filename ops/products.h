// The GEMMs of the operators: rows times a weight, and the gradients of weights and biases.
#pragma once

#include <algorithm>

#include "gradient_memory.h"

namespace collider {

// Calls product(first, n) for blocks of rows that cover x.
// How many rows are kept is anybody's guess, and oneDNN's bfloat16 GEMM minds: it cuts rows into blocks that
// divide their number, so that one of 578 = 2 x 17 x 17 rows takes 1.7 times what one of 512 does, and 13 % more
// on average over random numbers (eval/RESULTS.md). Multiples of 512, and what is at most 256, have no such numbers.
template <typename F>
void for_row_blocks(const Tensor& x_ND, const F& product) {
  const int64_t n_rows = x_ND.size(0);
  const bool minds = x_ND.is_cpu() && x_ND.scalar_type() == at::kBFloat16;
  for (int64_t first = 0, n; first < n_rows; first += n) {
    n = n_rows - first;
    if (minds) {
      n = n >= 512 ? n / 512 * 512 : std::min<int64_t>(n, 256);
    }
    product(first, n);
  }
}

// y_NE = x_ND w_DE
inline void rows_times_out(Tensor& y_NE, const Tensor& x_ND, const Tensor& w_DE) {
  for_row_blocks(x_ND, [&](int64_t first, int64_t n) {
    auto y_nE = y_NE.narrow(0, first, n);
    at::mm_out(y_nE, x_ND.narrow(0, first, n), w_DE);
  });
}

inline Tensor rows_times(const Tensor& x_ND, const Tensor& w_DE) {
  auto y_NE = at::empty({x_ND.size(0), w_DE.size(1)}, x_ND.options());
  rows_times_out(y_NE, x_ND, w_DE);
  return y_NE;
}

// y_NE += x_ND w_DE
inline void add_rows_times(const Tensor& y_NE, const Tensor& x_ND, const Tensor& w_DE) {
  for_row_blocks(x_ND, [&](int64_t first, int64_t n) {
    y_NE.narrow(0, first, n).addmm_(x_ND.narrow(0, first, n), w_DE);
  });
}

// y_NE = x_ND w_ED^T + b_E
inline void affine_out(Tensor& y_NE, const Tensor& x_ND, const Tensor& w_ED, const Tensor& b_E) {
  if (b_E.numel() == 0) {
    rows_times_out(y_NE, x_ND, w_ED.t());
    return;
  }
  for_row_blocks(x_ND, [&](int64_t first, int64_t n) {
    auto y_nE = y_NE.narrow(0, first, n);
    at::addmm_out(y_nE, b_E, x_ND.narrow(0, first, n), w_ED.t());
  });
}

inline Tensor affine(const Tensor& x_ND, const Tensor& w_ED, const Tensor& b_E) {
  auto y_NE = at::empty({x_ND.size(0), w_ED.size(0)}, x_ND.options());
  affine_out(y_NE, x_ND, w_ED, b_E);
  return y_NE;
}

// A weight's gradient in the weight's own dtype.
inline Tensor grad_in(at::ScalarType dtype, const Tensor& grad) {
  return grad.scalar_type() == dtype ? grad : empty_grad(grad.sizes(), grad.options().dtype(dtype)).copy_(grad);
}

// Gradients of a weight and of a bias, in the parameter's dtype; undefined where nobody asks.
inline Tensor weight_grad(bool needed, const Tensor& grad_KE, const Tensor& x_KD, at::ScalarType dtype) {
  if (!needed) {
    return Tensor();
  }
  auto grad_ED = empty_grad({grad_KE.size(1), x_KD.size(1)}, grad_KE.options());
  return grad_in(dtype, at::mm_out(grad_ED, grad_KE.t(), x_KD));
}

inline Tensor bias_grad(bool needed, const Tensor& grad_KE, const Tensor& b_E) {
  return needed ? grad_KE.sum(0, false, accumulate_dtype(grad_KE.scalar_type())).to(b_E.scalar_type())
                : Tensor();
}

// A parameter in the dtype that GEMMs compute in.
inline Tensor operand(const Tensor& w, at::ScalarType compute) { return w.to(compute); }

} // namespace collider
