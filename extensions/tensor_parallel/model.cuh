// Products, embedding and head of ranks that share the layers of a model (--tp), in the place of those of one rank.
#pragma once

#include "extensions/tensor_parallel/tensor_parallel_ends.cuh"
#include "extensions/tensor_parallel/tensor_parallel_products.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> tensor_parallel_model(ModelParts<Float>& parts) {
  if (parts.mesh.tp().size() == 1) return {};
  const ModelOptions& o = parts.options;
  LayerContext<Float>& on = parts.context;
  const auto tp = std::make_shared<TensorParallel<Float>>(parts.mesh.tp(), o.tp_pieces, on.stream);
  const auto products = std::make_shared<TensorParallelProducts<Float>>(on, *on.products, *tp, o.recompute == Recompute::block);
  const auto embedding = std::make_shared<TensorParallelEmbedding<Float>>(on, parts.table, *tp);
  const auto head = std::make_shared<TensorParallelHead<Float>>(on, parts.table, *tp);
  on.products = products.get(), parts.embedding = embedding.get(), parts.head = head.get();
  const auto lay_out = [tp, products, embedding, head, &on, chunks = o.logit_chunks](Arena& arena) {
    products->lay_out(arena);
    tp->lay_out(arena, on.R, on.C());
    head->lay_out(arena, products->rows_between_blocks(), ceil_div(on.R, chunks));
  };
  return ModelRoom{"tensor parallel", lay_out, [tp] { tp->clear(); }};
}
