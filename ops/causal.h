// The two halves of an attention operator that need no weights: rotary embedding and causal attention.
#pragma once

#include "common.h"

namespace collider {

// Rotates the first r of the d numbers of every head, in place, and returns x. cos and sin: (N or period, r),
// row n of x uses row n % period. inverse: the transposed rotation, which is what the backward needs.
Tensor rotate_(Tensor x_NHd, const Tensor& cos, const Tensor& sin, bool inverse, const KeptRows& rows);

struct CausalOutput {
  Tensor out_NHd;
  Tensor lse_NH; // logsumexp of the scaled scores of each row, float32 or wider
};

CausalOutput causal_attention(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                              const KeptRows& rows);

struct CausalGrads {
  Tensor q_KHd, k_KGd, v_KGd;
};

// Gradients at kept rows, from the gradient of the output at kept rows. All other arguments are full size.
CausalGrads causal_attention_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                      const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                      const KeptRows& rows);

// The same in chunks of queries, in ATen calls that every device has and in the CPU's loops:
CausalOutput causal_chunks(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                           const KeptRows& rows);
CausalGrads causal_chunks_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                   const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                   const KeptRows& rows);

// With CUDA's flash attention, where it takes such queries:
bool flash_applies(const Tensor& q_NHd, const KeptRows& rows);
CausalOutput causal_flash(const Tensor& q_NHd, const Tensor& k_NGd, const Tensor& v_NGd, double scale,
                          const KeptRows& rows);
CausalGrads causal_flash_backward(const Tensor& grad_out_KHd, const Tensor& q_NHd, const Tensor& k_NGd,
                                  const Tensor& v_NGd, const CausalOutput& forward, double scale,
                                  const KeptRows& rows);

} // namespace collider
