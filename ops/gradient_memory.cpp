#include "gradient_memory.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <mutex>

namespace collider {
namespace {

constexpr size_t kLargeBytes = size_t{1} << 20; // smaller ones the C library keeps by itself
constexpr int64_t kPatience = 4096;             // gradients: a model of 40 layers makes about 300 in a backward

struct Block {
  at::DataPtr memory;
  size_t bytes;
  int64_t epoch;       // releases before it was taken
  int64_t freed_after; // gradients
};

class GradientMemory final : public c10::Allocator {
 public:
  static GradientMemory& get() {
    static auto* const only = new GradientMemory; // never destroyed: gradients may be freed as the process ends
    return *only;
  }

  at::DataPtr allocate(size_t bytes) override {
    auto* const block = take(bytes).release();
    return {block->memory.get(), block, &give_back, at::Device(at::kCPU)};
  }

  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }

  int64_t release() {
    std::vector<std::unique_ptr<Block>> released;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++epoch_;
    released.swap(free_);
    int64_t bytes = 0;
    for (const auto& block : released) {
      bytes += static_cast<int64_t>(block->bytes);
    }
    return bytes;
  }

 private:
  std::unique_ptr<Block> take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++n_taken_;
    // in the order in which they were freed
    const auto idle = [&](const auto& block) { return block->freed_after + kPatience < n_taken_; };
    free_.erase(free_.begin(), std::find_if_not(free_.begin(), free_.end(), idle));
    const auto fits = [&](const auto& block) { return block->bytes == bytes; };
    if (const auto found = std::find_if(free_.rbegin(), free_.rend(), fits); found != free_.rend()) {
      auto block = std::move(*found);
      free_.erase(std::next(found).base());
      return block;
    }
    return std::make_unique<Block>(Block{c10::GetAllocator(c10::kCPU)->allocate(bytes), bytes, epoch_, 0});
  }

  static void give_back(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    auto& self = get();
    const std::lock_guard<std::mutex> lock(self.mutex_);
    if (block->epoch == self.epoch_) {
      block->freed_after = self.n_taken_;
      self.free_.push_back(std::move(block));
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
  int64_t n_taken_ = 0, epoch_ = 0;
};

} // namespace

Tensor empty_grad(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(dtype));
  if (!options.device().is_cpu() || bytes < kLargeBytes) {
    return at::empty(sizes, options);
  }
  return at::detail::empty_generic(sizes, &GradientMemory::get(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

int64_t release_gradient_memory() { return GradientMemory::get().release(); }

} // namespace collider
