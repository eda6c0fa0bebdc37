// Root mean square normalisation of rows, for the norms of a block and for those of queries and keys.
#pragma once

#include "common.h"

namespace collider {

struct RmsOutput {
  Tensor y_ND;
  Tensor rstd_N1; // 1 / rms(x), float32 or wider
};

// y = w * x / rms(x), with x / rms(x) rounded to x's dtype first, as Hugging Face's norms do.
RmsOutput rms_forward(const Tensor& x_ND, const Tensor& w_D, double eps, const KeptRows& rows);

struct RmsGrads {
  Tensor x_KD, w_D; // undefined where not needed
};

// grad at kept rows; x and rstd at all rows. A row of the batch may hold several rows of these (heads).
RmsGrads rms_backward(const Tensor& grad_KD, const Tensor& x_ND, const Tensor& w_D, const Tensor& rstd_N1,
                      const KeptRows& rows, bool needs_x, bool needs_w);

} // namespace collider
