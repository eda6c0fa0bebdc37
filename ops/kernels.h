// Kernels that are written in Python (triton_kernels.py) and reached through torch's dispatcher. An operator asks for
// one by name, and does without where none is registered for its device, and in float64: they compute in float32.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "common.h"

namespace collider {

template <class Signature>
std::optional<c10::TypedOperatorHandle<Signature>> find_kernel(const char* name, const Tensor& x) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const auto key = x.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU; // the CPU: Triton's interpreter
  const bool found = op.hasKernelForDispatchKey(key) && x.scalar_type() != at::kDouble;
  return found ? std::make_optional(op.typed<Signature>()) : std::nullopt;
}

} // namespace collider
