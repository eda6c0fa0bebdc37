// Large tensors that are about to be filled: gradients of weights, and activations.
#pragma once

#include "common.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace collider {

constexpr size_t kLargeBytes = size_t{1} << 23; // four huge pages: below, an aligned one hardly fits

// Like at::empty. The C library gives large blocks back to the system as they are freed, and the next one is mapped
// anew at a fault for every 4 KiB: 40 of the 70 ms that zeros for TinyLlama's embedding take (eval/RESULTS.md).
// Asking for huge pages saves most of these. It is advice: where the system does not take it, nothing changes.
inline Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  auto x = at::empty(sizes, options);
#ifdef __linux__
  if (x.is_cpu() && x.nbytes() >= kLargeBytes) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
    const auto first = (begin + page - 1) / page * page, last = (begin + x.nbytes()) / page * page;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return x;
}

} // namespace collider
