// Compact flow: gradients of hidden states carry (K, D) between operators, instead of zeros in dropped rows.
//
// The engine checks each gradient against the shape in its receiver's InputMetadata. As a backward starts, this
// file walks its graph once and rewrites that shape for every hidden state whose gradient is made and taken by
// nodes that pass rows through: our operators of the same forward, and nodes that do not look at rows at all
// (kPassing). A node that passes its gradient on unchanged ties the hidden state it belongs to with those it
// feeds: they are all compact, or none is. Whatever touches an unknown node, a hook, retain_grad, or a gradient
// asked for by torch.autograd.grad, stays full size: the operators scatter before it and gather after it. When
// the backward ends, the shapes are put back.
#include "graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <map>
#include <string>
#include <typeindex>
#include <unordered_map>

namespace collider {

using torch::autograd::Edge;
using torch::autograd::InputMetadata;
using torch::autograd::Node;

namespace {

// Nodes that hand on what they get, whatever its rows: residual additions, casts, clones, FSDP2's boundary.
constexpr std::array kPassing{"AddBackward0", "ToCopyBackward0", "CloneBackward0",
                              "RegisterPostBackwardFunctionBackward"};

std::unordered_map<std::type_index, ContextOf>& operators() {
  static std::unordered_map<std::type_index, ContextOf> table;
  return table;
}

AutogradContext* context_of(Node& node) {
  const auto found = operators().find(typeid(node));
  return found == operators().end() ? nullptr : &found->second(node);
}

bool passes_rows(const Node& node) {
  const auto name = node.name();
  for (const auto* known : kPassing) {
    if (name == known) {
      return true;
    }
  }
  return false;
}

// FSDP puts a tensor hook on every sharded unit's output; it does not look at the gradient. FSDP2's is a method,
// FSDP1's a functools.partial.
bool is_fsdp_hook(const torch::autograd::FunctionPreHook& hook) {
  if (std::string(typeid(hook).name()).find("PyFunctionTensorPreHook") == std::string::npos) {
    return false;
  }
  // Its typeinfo is not exported, so no dynamic_cast.
  const auto& python = static_cast<const torch::autograd::PyFunctionTensorPreHook&>(hook);
  pybind11::gil_scoped_acquire gil;
  const auto text = [](const pybind11::handle& object, const char* attribute) {
    return pybind11::cast<std::string>(pybind11::str(pybind11::getattr(object, attribute, pybind11::str(""))));
  };
  for (const auto& item : pybind11::reinterpret_borrow<pybind11::dict>(python.dict)) {
    const auto function = pybind11::getattr(item.second, "func", item.second);
    const auto name = text(function, "__qualname__");
    const bool is_fsdp1 =
        name == "_pre_backward_hook" && text(function, "__module__").rfind("torch.distributed.fsdp", 0) == 0;
    if (name != "FSDPState._pre_backward" && !is_fsdp1) {
      return false;
    }
  }
  return true;
}

// A hidden state's gradient: the node that takes it (which made the hidden state), and where.
using Key = std::pair<Node*, uint32_t>;

struct HiddenState {
  Edge edge;             // invalid while no node of this backward feeds it
  Key parent;            // union-find
  bool between = false;  // one of the nodes at its ends passes rows: worth a line in the report
  std::string why_dense; // empty while nothing speaks against it
};

class Walk {
 public:
  explicit Walk(KeptRows& rows) : rows_(rows) {}

  std::vector<FlowEdge> run() {
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    TORCH_INTERNAL_ASSERT(nodes != nullptr, "compact flow is set up inside a backward");
    for (auto* node : *nodes) {
      visit(*node);
    }
    for (auto& [key, state] : states_) {
      if (state.why_dense.empty()) {
        state.why_dense = why_dense(state);
      }
    }
    share_reasons();
    return apply(*nodes);
  }

 private:
  bool ours(Node& node) const {
    auto* ctx = context_of(node);
    return ctx != nullptr && saved_rows(ctx).get() == &rows_;
  }

  // Notes what a node says about the hidden states that it feeds.
  void visit(Node& consumer) {
    const bool is_ours = ours(consumer), is_passing = !is_ours && passes_rows(consumer);
    for (uint32_t i = 0; i < consumer.num_outputs(); ++i) {
      const auto& edge = consumer.next_edge(i);
      if (!edge.is_valid() || !is_hidden_state(edge)) {
        continue;
      }
      auto& state = find_or_add({edge.function.get(), edge.input_nr});
      state.edge = edge;
      state.between |= is_ours || is_passing;
      if (is_passing && !consumer.post_hooks().empty()) {
        state.why_dense = "a hook on " + consumer.name();
      } else if (is_passing) {
        tie(edge, consumer);
      } else if (!is_ours || i != 0) {
        state.why_dense = "fed by " + consumer.name();
      }
    }
  }

  bool is_hidden_state(const Edge& edge) const {
    const auto& metadata = edge.function->input_metadata(edge.input_nr);
    if (metadata.was_default_constructed() || metadata.is_nested_tensor()) {
      return false;
    }
    const auto shape = metadata.shape_as_dim_vector();
    return shape.size() == 3 && shape[0] * shape[1] == rows_.n_rows();
  }

  HiddenState& find_or_add(const Key& key) {
    const auto [found, is_new] = states_.try_emplace(key);
    if (is_new) {
      found->second.parent = key;
    }
    return found->second;
  }

  Key root(Key key) {
    while (states_.at(key).parent != key) {
      key = states_.at(key).parent;
    }
    return key;
  }

  // A passing node's own hidden state and the one it feeds are compact together; addition may broadcast.
  void tie(const Edge& fed, Node& passing) {
    const auto& own = passing.input_metadata(0);
    const auto& other = fed.function->input_metadata(fed.input_nr);
    auto& state = find_or_add({fed.function.get(), fed.input_nr});
    if (passing.num_inputs() != 1 || own.shape_as_dim_vector() != other.shape_as_dim_vector()) {
      state.why_dense = "broadcast by " + passing.name();
      return;
    }
    const Key own_key{&passing, 0};
    find_or_add(own_key);
    const Key a = root(own_key), b = root({fed.function.get(), fed.input_nr});
    states_.at(a).parent = b;
  }

  std::string why_dense(const HiddenState& state) {
    if (!state.edge.is_valid()) {
      return "the start of a backward";
    }
    auto& producer = *state.edge.function;
    const auto nr = state.edge.input_nr;
    const bool is_ours = ours(producer), is_passing = !is_ours && passes_rows(producer);
    if (!is_ours && !is_passing) {
      return "made by " + producer.name();
    }
    if (producer.num_inputs() != 1) {
      return "one of several outputs of " + producer.name();
    }
    if (producer.retains_grad_hooks().count(nr) > 0) {
      return "retain_grad";
    }
    for (const auto& hook : producer.tensor_pre_hooks()) {
      if (!is_fsdp_hook(*hook)) {
        return "a tensor hook";
      }
    }
    if (!producer.pre_hooks().empty() || (is_passing && !producer.post_hooks().empty())) {
      return "a hook on " + producer.name();
    }
    const auto* asked = torch::autograd::get_current_graph_task_exec_info();
    if (asked != nullptr) {
      const auto info = asked->find(&producer);
      if (info != asked->end() && info->second.captures_) {
        return "asked for by torch.autograd.grad";
      }
    }
    return "";
  }

  // Tied hidden states are compact together: one reason against one of them is a reason against all.
  void share_reasons() {
    std::map<Key, std::string> reasons;
    for (auto& [key, state] : states_) {
      if (!state.why_dense.empty()) {
        reasons.emplace(root(key), state.why_dense);
      }
    }
    for (auto& [key, state] : states_) {
      const auto found = reasons.find(root(key));
      if (state.why_dense.empty() && found != reasons.end()) {
        state.why_dense = "tied to one " + found->second;
      }
    }
  }

  std::vector<FlowEdge> apply(const std::unordered_set<Node*>& nodes) {
    std::vector<FlowEdge> report;
    for (auto& [key, state] : states_) {
      if (!state.edge.is_valid()) {
        continue; // nothing of this backward arrives there
      }
      if (state.between || ours(*key.first) || passes_rows(*key.first)) {
        report.push_back({key.first->name(), state.why_dense});
      }
      if (!state.why_dense.empty()) {
        continue;
      }
      auto& metadata = const_cast<InputMetadata&>(key.first->input_metadata(key.second));
      auto& shape = metadata.mutable_shape_as_dim_vector();
      rows_.narrowed.push_back({weak(state.edge.function), key.second, shape[0], shape[1]});
      const auto width = shape[2];
      shape.clear();
      shape.push_back(rows_.n_kept());
      shape.push_back(width);
      if (auto* ctx = context_of(*key.first)) {
        ctx->saved_data["takes_compact"] = true;
      }
    }
    for (auto* node : nodes) {
      if (!ours(*node) || node->num_outputs() == 0 || !node->next_edge(0).is_valid()) {
        continue;
      }
      const auto& edge = node->next_edge(0);
      const auto found = states_.find({edge.function.get(), edge.input_nr});
      const bool compact = found != states_.end() && found->second.why_dense.empty();
      context_of(*node)->saved_data["gives_compact"] = compact;
      if (compact) {
        rows_.giving.push_back(weak(node->getptr()));
      }
    }
    return report;
  }

  KeptRows& rows_;
  std::map<Key, HiddenState> states_;
};

} // namespace

void register_operator(std::type_index node_type, ContextOf context) {
  operators().emplace(node_type, std::move(context));
}

void widen(KeptRows& rows) {
  for (auto& state : rows.narrowed) {
    const auto node = state.node.lock();
    if (!node) {
      continue;
    }
    auto& metadata = const_cast<InputMetadata&>(node->input_metadata(state.input_nr));
    auto& shape = metadata.mutable_shape_as_dim_vector();
    const auto width = shape[1];
    shape.clear();
    shape.push_back(state.batch);
    shape.push_back(state.length);
    shape.push_back(width);
    if (auto* ctx = context_of(*node)) {
      ctx->saved_data["takes_compact"] = false;
    }
  }
  for (auto& giving : rows.giving) {
    if (const auto node = giving.lock()) {
      context_of(*node)->saved_data["gives_compact"] = false;
    }
  }
  rows.narrowed.clear();
  rows.giving.clear();
}

// Widens when it goes: with a backward that fails, whose callbacks the engine does not call.
struct Widening {
  explicit Widening(KeptRowsPtr given) : rows(std::move(given)) {}
  Widening(const Widening&) = delete;
  ~Widening() { widen(*rows); }
  KeptRowsPtr rows;
};

void narrow(const KeptRowsPtr& rows) {
  if (!rows->filtered() || !rows->narrowed.empty()) {
    return; // dense, or done by another mark of this backward
  }
  rows->flow = Walk(*rows).run();
  auto after = std::make_shared<Widening>(rows);
  torch::autograd::Engine::get_default_engine().queue_callback([after] { widen(*after->rows); });
}

} // namespace collider
