// Compact flow's face to the operators: each registers its node type, so that the walk can read its context.
#pragma once

#include <functional>
#include <typeindex>

#include "common.h"

namespace collider {

using ContextOf = std::function<AutogradContext&(torch::autograd::Node&)>;

void register_operator(std::type_index node_type, ContextOf context);

// One static instance an operator.
template <class Op>
struct Registered {
  Registered() {
    using OpNode = torch::autograd::CppNode<Op>;
    register_operator(typeid(OpNode), [](torch::autograd::Node& node) -> AutogradContext& {
      return static_cast<OpNode&>(node).ctx_;
    });
  }
};

// Called inside a backward, before any operator of the forward that the rows belong to.
void narrow(const KeptRowsPtr& rows);

} // namespace collider
