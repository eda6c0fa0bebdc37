// The extension module as Python sees it; __init__.py documents each function.
#include <torch/csrc/utils/pybind.h>

#include "gradient_memory.h"
#include "graph.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace collider;
  py::enum_<Path>(m, "Path")
      .value("loops", Path::kLoops)
      .value("aten", Path::kAten)
      .value("fused", Path::kFused);
  py::class_<KeptRows, KeptRowsPtr>(m, "KeptRows")
      .def(py::init([](std::vector<int64_t> starts) { return c10::make_intrusive<KeptRows>(std::move(starts)); }))
      .def("set", &KeptRows::set)
      .def_readwrite("forced_path", &KeptRows::forced_path)
      .def("narrow", [](const KeptRowsPtr& rows) { narrow(rows); })
      .def_property_readonly("flow",
                             [](const KeptRows& rows) {
                               std::vector<std::pair<std::string, std::string>> edges;
                               for (const auto& edge : rows.flow) {
                                 edges.emplace_back(edge.node, edge.why_dense);
                               }
                               return edges;
                             })
      .def_property_readonly("n_rows", &KeptRows::n_rows)
      .def_property_readonly("n_kept", &KeptRows::n_kept);
  m.def("boundary", &boundary);
  m.def("embedding", &embedding);
  m.def("rms_norm", &rms_norm);
  m.def("layer_norm", &layer_norm);
  m.def("linear", &linear);
  m.def("swiglu_mlp", &swiglu_mlp);
  m.def("gelu_mlp", &gelu_mlp);
  m.def("attention", &attention);
  m.def("linear_cross_entropy", &linear_cross_entropy);
  m.def("release_gradient_memory", &release_gradient_memory);
}
