// Loops over rows on the CPU: parallel over rows, vectorised along each of them. One pass over memory replaces
// several ATen operations, and a row that backward needs is read where the forward left it, without a gather.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include "common.h"

#define COLLIDER_DISPATCH(dtype, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, dtype, "lightning_collider", __VA_ARGS__)

namespace collider {

namespace vec = at::vec;

// What a lambda for vec::map computes in: float for bfloat16.
template <typename scalar_t>
using Vec = vec::Vectorized<at::opmath_type<scalar_t>>;

// Calls f(row) for each of n rows, each of which touches `width` numbers.
template <typename F>
void for_each_row(int64_t n, int64_t width, const F& f) {
  const int64_t grain = std::max<int64_t>(1, at::internal::GRAIN_SIZE / std::max<int64_t>(width, 1));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      f(row);
    }
  });
}

// Where the k-th kept row stands among all rows; with `heads` rows of data to each row.
struct RowIndex {
  explicit RowIndex(const KeptRows& rows, int64_t heads = 1)
      : rows_K(rows.filtered() ? rows.rows_host.data() : nullptr), heads(heads) {}
  int64_t operator()(int64_t k) const {
    return rows_K == nullptr ? k : rows_K[k / heads] * heads + k % heads;
  }
  const int64_t* rows_K;
  int64_t heads;
};

// Whether the loops here apply: rows of one dtype, packed, in the CPU's memory.
inline bool loops_apply(const KeptRows& rows, std::initializer_list<Tensor> tensors) {
  if (rows.path(*tensors.begin()) != Path::kLoops) {
    return false;
  }
  const auto dtype = tensors.begin()->scalar_type();
  if (dtype == at::kHalf) {
    return false; // an operator with a GEMM refuses it by name
  }
  for (const auto& x : tensors) {
    if (!x.is_cpu() || !x.is_contiguous() || x.scalar_type() != dtype) {
      return false;
    }
  }
  return true;
}

} // namespace collider
