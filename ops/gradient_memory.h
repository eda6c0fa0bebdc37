// Memory of weights' gradients on the CPU, kept from one backward to the next.
#pragma once

#include "common.h"

namespace collider {

// Like at::empty, for the gradient of a weight.
// Each backward makes gradients of the same sizes, as large as the weights. The C library gives such blocks back to
// the system as they are freed, and fetching them anew, page by page, cleared, was up to a fifth of a filtered
// backward (eval/RESULTS.md). So blocks are kept for the next gradient of their size, as a GPU's allocator does,
// until nobody has asked for one for some ten backwards.
Tensor empty_grad(at::IntArrayRef sizes, const at::TensorOptions& options);

// Gives back the blocks that no gradient uses, and those in use as soon as they are free. Returns the bytes given back.
int64_t release_gradient_memory();

} // namespace collider
