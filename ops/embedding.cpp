// Embedding: y = w[ids]. Backward: only kept rows are summed into dw.
#include "gradient_memory.h"
#include "graph.h"

namespace collider {
namespace {

// dw_v = sum of the gradients of the tokens v, zero at padding_idx.
Tensor embedding_grad(const Tensor& grad_KD, const Tensor& ids_K, int64_t vocabulary, int64_t padding_idx) {
  if (!grad_KD.is_cpu()) {
    return at::embedding_dense_backward(grad_KD, ids_K, vocabulary, padding_idx, /*scale_grad_by_freq=*/false);
  }
  // torch's own rounds after every summand, in bfloat16 three times as wrong; this one in float32, and once.
  auto grad_w_VD = empty_grad({vocabulary, grad_KD.size(1)}, grad_KD.options()).zero_().index_add_(0, ids_K, grad_KD);
  if (padding_idx >= 0) {
    grad_w_VD.select(0, padding_idx).zero_();
  }
  return grad_w_VD;
}

struct Embedding : Function<Embedding> {
  static Tensor forward(AutogradContext* ctx, const Tensor& ids_BT, const Tensor& w_VD,
                        int64_t padding_idx, const KeptRowsPtr& rows) {
    OperatorGuard guard(w_VD);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({ids_BT});
    ctx->saved_data["vocabulary"] = w_VD.size(0);
    ctx->saved_data["padding_idx"] = padding_idx;
    save_rows(ctx, rows);
    return at::embedding(w_VD, ids_BT);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) {
      return {Tensor(), Tensor(), Tensor(), Tensor()};
    }
    OperatorGuard guard(grads[0]);
    const auto rows = saved_rows(ctx);
    const auto ids_K = rows->gather(ctx->get_saved_variables()[0].reshape({-1}));
    const auto grad_KD = kept_grad(ctx, grads[0], *rows, grads[0].scalar_type());
    const auto padding_idx = ctx->saved_data["padding_idx"].toInt();
    return {Tensor(), embedding_grad(grad_KD, ids_K, ctx->saved_data["vocabulary"].toInt(), padding_idx), Tensor(),
            Tensor()};
  }
};

const Registered<Embedding> registered_embedding;

} // namespace

Tensor embedding(const Tensor& ids_BT, const Tensor& w_VD, int64_t padding_idx, const KeptRowsPtr& rows) {
  return Embedding::apply(ids_BT, w_VD, padding_idx, rows);
}

} // namespace collider
