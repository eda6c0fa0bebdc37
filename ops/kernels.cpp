// What the kernels of triton_kernels.py take and give; see there for what they compute.
#include <torch/library.h>

TORCH_LIBRARY(lightning_collider, m) {
  m.def(
      "dropped_keys(Tensor(a!) grad_q, Tensor q, Tensor grad_out, Tensor out, Tensor lse, Tensor k, Tensor v, "
      "Tensor dropped, Tensor first, Tensor last, float scale) -> ()");
  m.def("rotate(Tensor(a!) x, Tensor cos, Tensor sin, bool inverse) -> ()");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor? rows) -> (Tensor, Tensor, Tensor)");
  m.def("rms_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor? rows) -> (Tensor, Tensor)");
}
