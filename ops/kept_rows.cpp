// KeptRows: turns a keep mask into row numbers, once a forward.
#include <algorithm>

#include "common.h"

namespace collider {
namespace {

// Row numbers as an int64 tensor. From pinned memory, so that the host does not wait for what a GPU still does.
Tensor on_device(const std::vector<int64_t>& numbers, const at::Device& device) {
  const auto options = at::TensorOptions().dtype(at::kLong).pinned_memory(device.is_cuda());
  auto host = at::empty({static_cast<int64_t>(numbers.size())}, options);
  std::copy(numbers.begin(), numbers.end(), host.mutable_data_ptr<int64_t>());
  return host.to(device, /*non_blocking=*/true);
}

} // namespace

KeptRows::KeptRows(std::vector<int64_t> starts_S1) : starts(std::move(starts_S1)) {
  TORCH_CHECK(starts.size() >= 2 && starts.front() == 0, "segments must start at row 0 and end at N");
  for (size_t s = 1; s < starts.size(); ++s) {
    TORCH_CHECK(starts[s] > starts[s - 1], "segments must be in order and not empty");
  }
}

void KeptRows::set(const Tensor& keep_N, const at::Device& device) {
  TORCH_CHECK(keep_N.scalar_type() == at::kBool && keep_N.numel() == n_rows(),
              "the keep mask must be bool and hold one value for each of the ", n_rows(), " rows");
  const auto keep_host = keep_N.reshape({-1}).to(at::kCPU).contiguous();
  const bool* keep = keep_host.const_data_ptr<bool>();
  std::vector<int64_t> dropped_host;
  rows_host.clear();
  kept_starts.assign(1, 0);
  dropped_starts.assign(1, 0);
  for (int64_t s = 0; s < n_segments(); ++s) {
    for (int64_t row = starts[s]; row < starts[s + 1]; ++row) {
      (keep[row] ? rows_host : dropped_host).push_back(row);
    }
    kept_starts.push_back(static_cast<int64_t>(rows_host.size()));
    dropped_starts.push_back(static_cast<int64_t>(dropped_host.size()));
  }
  rows_K = on_device(rows_host, device);
  dropped_M = on_device(dropped_host, device);
  sights_ = {};
  filtered_ = !dropped_host.empty(); // all rows kept: the plain dense backward, without a gather
}

const Sight& KeptRows::sight(Keys keys, const at::Device& device) const {
  auto& cached = sights_[static_cast<size_t>(keys)];
  if (cached.has_value()) {
    return *cached;
  }
  const auto& query_starts = keys == Keys::kAll ? starts : kept_starts;
  const auto& key_starts = keys == Keys::kDropped ? dropped_starts : query_starts;
  Sight sight;
  for (int64_t s = 0; s < n_segments(); ++s) {
    for (int64_t query = query_starts[s]; query < query_starts[s + 1]; ++query) {
      sight.first.push_back(key_starts[s]);
      // Before a kept row stand `query` kept rows, and so row - query dropped ones.
      sight.last.push_back(keys == Keys::kDropped ? rows_host[query] - query : query + 1);
    }
    sight.longest = std::max(sight.longest, query_starts[s + 1] - query_starts[s]);
  }
  sight.first_Q = on_device(sight.first, device);
  sight.last_Q = on_device(sight.last, device);
  sight.starts_S1 = on_device(query_starts, device).to(at::kInt);
  cached = std::move(sight);
  return *cached;
}

Tensor KeptRows::scatter(const Tensor& x_KD, at::IntArrayRef sizes) const {
  if (!filtered_) {
    return x_KD.reshape(sizes);
  }
  auto full = at::zeros(sizes, x_KD.options());
  full.view({-1, x_KD.size(-1)}).index_copy_(0, rows_K, x_KD);
  return full;
}

} // namespace collider
